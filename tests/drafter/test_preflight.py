"""Every spoilt drafter is named by the right check or is harmless; nothing is executed, and nothing is a traceback."""

import json
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from drafter.__main__ import main
from drafter.checkpoint import shapes
from drafter.checkpoint.findings import in_the_way
from drafter.checkpoint.folder import DrafterError, open_folder
from drafter.checkpoint.preflight import NAMES, preflight
from drafter.checkpoint.subject import Deployment, Subject, read_target
from drafter.data.tensorfile import map_tensors
from tests.drafter.mutations import mutations
from tests.drafter.spoilt_files import CANARY
from tests.server.drafters import (
    HEADS,
    HIDDEN,
    TARGET_IDS,
    VOCAB,
    llama_tensors,
    write_drafter,
)

ALL = list(mutations())
KINDS = ("truncated", "dtype", "shape", "missing", "extra", "swapped maps", "absolute", "NaN", "duplicates")
KINDS += ("out of range", "header", "links", "pickle")
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 8,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 2048,
}


def random_weights(tensors):
    rng = np.random.default_rng(3)
    return {
        name: rng.normal(size=tensor.shape).astype(np.float32) if tensor.dtype == np.float32 else tensor
        for name, tensor in tensors.items()
    }


@pytest.fixture
def sound(tmp_path):
    return write_drafter(
        tmp_path / "d", random_weights(llama_tensors()), eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}
    )


def write_target(path, **config):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({k: v for k, v in (TARGET | config).items() if v is not ...}))
    return path


def errors(folder, target=None, deployment=None):
    found = preflight(Subject(open_folder(folder), target and read_target(target), deployment))
    return {finding.check: finding for finding in in_the_way(found)}


def loaded(folder):
    """What SGLang would load, by the names that it gives the tensors."""
    found = open_folder(folder)
    return {
        shapes.canonical_name(name, found.architecture): np.array(map_tensors(folder / tensor.file, [name])[name])
        for name, tensor in found.tensors.items()
        if not name.endswith("t2d")
    }


def test_a_sound_drafter(sound, tmp_path):
    assert errors(sound, write_target(tmp_path / "target")) == {}
    assert main(["preflight", str(sound), "--target", str(tmp_path / "target")]) == 0


def test_there_are_enough_of_each_kind():
    counted = Counter(mutation.kind for mutation in ALL)
    assert len(ALL) >= 200
    assert all(counted[kind] >= 5 for kind in KINDS), counted
    assert sum(not mutation.names for mutation in ALL) <= len(ALL) / 10
    assert len({str(mutation) for mutation in ALL}) == len(ALL)
    assert {name for mutation in ALL for name in mutation.names} <= {*NAMES, "readable"}


@pytest.mark.parametrize("mutation", ALL, ids=str)
def test_a_spoilt_drafter(sound, mutation):
    before = loaded(sound)
    mutation.apply(sound)
    try:
        findings = preflight(Subject(open_folder(sound)))
        named = {finding.check for finding in findings}
    except DrafterError as refused:
        assert "\n" not in str(refused)
        named = {"readable"}
    assert not (sound / CANARY).exists(), "a pickle was loaded"
    if mutation.names:
        assert named & set(mutation.names), named
    else:
        assert named == set()
        after = loaded(sound)
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("kind", sorted({mutation.kind for mutation in ALL if mutation.names}))
def test_the_command_says_it_in_a_line_each(sound, tmp_path, capsys, kind):
    target = write_target(tmp_path / "target")
    mutation = next(mutation for mutation in ALL if mutation.kind == kind and mutation.names)
    mutation.apply(sound)
    code = main(["preflight", str(sound), "--target", str(target), "--json"])
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert shown.err == "" and code == (0 if found["ok"] else 1)
    assert {finding["check"] for finding in found["findings"]} & set(mutation.names)
    assert main(["preflight", str(sound), "--target", str(target)]) == code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(found["findings"]) + 1
    assert all(line.startswith(("error", "warning", "info")) for line in lines[:-1])


def test_no_torch_is_needed(sound, tmp_path):
    target = write_target(tmp_path / "target")
    code = (
        "import sys\nfor name in ('torch', 'transformers', 'pydantic', 'httpx'): sys.modules[name] = None\n"
        f"from drafter.checkpoint.folder_cli import run_preflight\nimport argparse\nfrom pathlib import Path\n"
        f"sys.exit(run_preflight(argparse.Namespace(folder=Path({str(sound)!r}), target=Path({str(target)!r}), "
        "profile=None, force=[], json=False)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_force_passes_one_check_and_no_other(sound, tmp_path, capsys):
    target = str(write_target(tmp_path / "target"))
    tensors = load_file(sound / "model.safetensors")
    tensors["fc.weight"][0, 0] = np.nan
    save_file(tensors, sound / "model.safetensors")
    write_config(sound, norm_before_residual=True)
    command = ["preflight", str(sound), "--target", target, "--json"]
    assert main([*command, "--force", "finite"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert {each["check"]: each["forced"] for each in found if each["severity"] == "error"} == {
        "finite": True,
        "unserved-options": False,
    }
    assert main([*command, "--force", "finite", "--force", "unserved-options"]) == 0
    capsys.readouterr()
    assert main([*command, "--force", "finit"]) == 1
    assert "'finit' is no check: choose from architecture" in capsys.readouterr().err
    assert main([*command, "--force", "readable"]) == 1
    assert "nothing to hand" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "forced", "unchecked"),
    [
        (
            {"architectures": ["Eagle3OfTomorrow"]},
            "architecture",
            {"d2t-range", "finite", "tensors-missing", "vocab-size"},
        ),
        ({"hidden_size": 0}, "config-sizes", {"d2t-range", "finite", "tensors-missing", "vocab-size"}),
        ({"num_aux_hidden_states": 4}, "aux-layers", {"d2t-range", "finite", "tensors-missing", "vocab-size"}),
    ],
)
def test_what_a_forced_check_leaves_unchecked_is_said(sound, tmp_path, capsys, config, forced, unchecked):
    """A NaN and a lost tensor behind an error that is forced past are not found: that must not look like soundness."""
    target = write_target(tmp_path / "target")
    write_config(sound, **config)
    main(["preflight", str(sound), "--target", str(target)])
    assert "not checked" not in capsys.readouterr().out
    main(["preflight", str(sound), "--target", str(target), "--force", forced, "--force", "rope"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "not checked: " in line]
    assert [line.split()[0] for line in lines] == ["warning"]
    assert unchecked <= set(re.findall(r"[\w-]+", lines[0])) and "rope" not in lines[0]


def write_config(folder, **keys):
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"vocab_size": VOCAB + 1}, "vocab-size"),
        ({"hidden_size": HIDDEN * 2}, "fc-width"),
        ({"num_hidden_layers": 7}, "layers-in-target"),
    ],
)
def test_another_target(sound, tmp_path, change, check):
    assert check in errors(sound, write_target(tmp_path / "target", **change))


@pytest.mark.parametrize(
    ("architecture", "ids", "last"),
    [("LlamaForCausalLM", [0, 3, 6], True), ("LlamaForCausalLM", [0, 3, 7], False)]
    + [
        (name, ids, right)
        for name in ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")
        for ids, right in (([0, 3, 7], True), ([1, 3, 7], False), ([1, 3, 6], True), ([2, 3, 8], False))
    ],
)
def test_what_layer_ids_mean_to_a_target(sound, tmp_path, architecture, ids, last):
    """A Llama of 8 layers has no input to layer 8; a DeepSeek takes ids as inputs unless the first is 1."""
    write_config(sound, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    found = errors(sound, write_target(tmp_path / "target", architectures=[architecture]))
    assert ("layers-in-target" not in found) is last


def test_the_convention_of_the_manifest(sound, tmp_path):
    (sound / "eyas.json").write_text(json.dumps({"format": 1, "capture": {"convention": "input_to_layer"}}))
    assert "layers-in-target" in errors(sound, write_target(tmp_path / "llama"))
    kimi = write_target(tmp_path / "kimi", architectures=["KimiK25ForConditionalGeneration"])
    assert "layers-in-target" not in errors(sound, kimi)


def test_another_tokenizer(sound, tmp_path):
    target = write_target(tmp_path / "target")
    tokens = [{"id": int(TARGET_IDS[0]), "content": "<|im_end|>"}, {"id": 1, "content": "<think>"}]
    added = {"added_tokens": [token | {"special": True} for token in tokens]}
    (target / "tokenizer.json").write_text(json.dumps(added))
    facts = read_target(target)
    for named, wrong in ((facts.tokenizer_sha256, False), ("0" * 64, True)):
        (sound / "eyas.json").write_text(json.dumps({"format": 1, "target": {"tokenizer_sha256": named}}))
        assert ("made-for-target" in errors(sound, target)) is wrong
    warned = {f.check: f.found for f in preflight(Subject(open_folder(sound), facts))}
    assert warned["special-tokens"].startswith("the draft vocabulary lacks <think>: each change into or out of")


def test_another_rope_is_a_warning(sound, tmp_path):
    target = write_target(tmp_path / "target", rope_parameters={"rope_theta": 50000.0, "rope_type": "default"})
    found = {finding.check: finding for finding in preflight(Subject(open_folder(sound), read_target(target)))}
    assert found["rope"].severity == "warning" and "50000" in found["rope"].found
    write_config(sound, rope_theta=50000)
    assert "rope" not in {finding.check for finding in preflight(Subject(open_folder(sound), read_target(target)))}


SERVED = {"name": "mine", "device": "cuda", "context_length": 2048}


@pytest.mark.parametrize(
    ("changes", "target", "check"),
    [
        ({"context_length": 2049}, {}, "context-length"),
        ({"context_length": 2048}, {}, None),
        ({"layer_ids": [1]}, {}, "pinned-layers"),
        ({"sha256": "0" * 64}, {}, "pinned-hash"),
        ({}, {"kv_lora_rank": 4}, "draft-attention-backend"),
        ({"draft_attention_backend": "flashinfer"}, {"kv_lora_rank": 4}, None),
        ({"draft_attention_backend": "trtllm_mla"}, {}, "draft-attention-backend"),
        ({"attention_backend": "flashmla"}, {"kv_lora_rank": 4}, "draft-attention-backend"),
        ({"device": "cpu"}, {"kv_lora_rank": 4}, None),
        ({"extra_args": ("--speculative-use-rejection-sampling",)}, {}, "rejection-sampling"),
        ({"extra_args": ("--speculative-use-block=1",)}, {}, "rejection-sampling"),
        ({"extra_args": ("--speculative-token-map", "x")}, {}, "token-map"),
        ({"extra_args": ("--decode-log-interval", "1")}, {}, None),
    ],
)
def test_against_a_profile(sound, tmp_path, changes, target, check):
    found = errors(sound, write_target(tmp_path / "target", **target), Deployment(**(SERVED | changes)))
    assert list(found) == ([check] if check else [])


def test_a_profile_by_its_file(sound, tmp_path, capsys):
    target = write_target(tmp_path / "target")
    profile = tmp_path / "p.toml"
    profile.write_text(
        '[target]\npath="t"\nserved_name="m"\n[engine]\ndevice="cuda"\ncontext_length=4096\nmax_running_requests=1\n'
        '[drafters.mine]\npath="./d"\nlayer_ids=[1]\n'
    )
    command = ["preflight", str(sound), "--target", str(target), "--profile", str(profile), "--json"]
    assert main(command) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert {each["check"] for each in found if each["severity"] == "error"} == {"context-length", "pinned-layers"}
    for text in ("[target", "", "engine = 3\n[target]\n", "[engine]\ndevice = 1\n"):
        profile.write_text(text)
        assert main(command) == 1
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1 and "is not one" in shown.err
    profile.unlink()
    assert main(command) == 1 and "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "{", '{"vocab_size": 1}', '{"text_config": 3}', '{"architectures": 3}', "\xff"])
def test_a_target_that_is_none(sound, tmp_path, capsys, text):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "config.json").write_text(text)
    assert main(["preflight", str(sound), "--target", str(tmp_path / "t")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_hub_cache_is_no_link_out(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    write_drafter(snapshot, random_weights(llama_tensors()))
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).rename(blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert errors(snapshot) == {}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_scan_finds_each_single_number(sound, dtype):
    """Against numpy's own idea of NaN and of zero, at every place of a small tensor."""
    clean = load_file(sound / "model.safetensors")
    for at in range(clean["norm.weight"].size):
        for value in (np.nan, np.inf, -np.inf):
            tensors = {n: t.astype(dtype) if t.dtype == np.float32 else t for n, t in clean.items()}
            tensors["norm.weight"][at] = value
            save_file(tensors, sound / "model.safetensors")
            assert "finite" in errors(sound)


def test_the_names_are_told_in_the_help(capsys):
    with pytest.raises(SystemExit):
        main(["preflight", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(name in shown for name in NAMES)
