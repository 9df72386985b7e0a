"""Formats there and back bit for bit; what would change the result is refused; inspect tells what a folder is."""

import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from drafter.__main__ import main
from drafter.checkpoint.formats import FormatError, ids_of, inputs_of
from drafter.checkpoint.preflight import read_folder
from drafter.checkpoint.subject import TargetFacts
from tests.drafter.spoilt_files import CANARY, Bomb
from tests.drafter.spoilt_tensors import scramble, to_absolute
from tests.drafter.test_preflight import random_weights, write_config, write_target
from tests.server.drafters import HIDDEN, MLA, TARGET_IDS, VOCAB, llama_tensors, mla_tensors, write_drafter


@pytest.fixture
def sound(tmp_path):
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}
    return write_drafter(tmp_path / "d", random_weights(llama_tensors()), eagle_config=layers, rms_norm_eps=1e-6)


@pytest.fixture
def target(tmp_path):
    folder = write_target(tmp_path / "target")
    embed = np.random.default_rng(1).normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    save_file({"model.embed_tokens.weight": embed}, folder / "model.safetensors")
    return folder


def convert(source, to, out, *more):
    return main(["convert", str(source), "--to", to, "--out", str(out), *map(str, more)])


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype and np.array_equal(left[name], right[name]), name


@pytest.mark.parametrize("to", ["speculators", "modelopt"])
def test_there_and_back(tmp_path, sound, target, to):
    assert convert(sound, to, tmp_path / "there", "--target", target) == 0
    there = weights(tmp_path / "there")
    assert not any(name.startswith("midlayer") for name in there)
    assert ("t2d" in there, "embed_tokens.weight" in there) == (to == "speculators",) * 2
    assert convert(tmp_path / "there", "sglang", tmp_path / "back", "--target", target) == 0
    same(weights(tmp_path / "back"), weights(sound))
    assert read_folder(tmp_path / "back").layer_ids == [0, 3, 6]


def test_rows_in_any_order_become_ascending_with_the_head(tmp_path, sound):
    """Model-Optimizer's rows go by frequency; each target token keeps its row."""
    tensors = weights(sound)
    scramble(tensors, 2)
    del tensors["t2d"]
    save_file(tensors, sound / "model.safetensors")
    assert convert(sound, "sglang", tmp_path / "out") == 0
    found = weights(tmp_path / "out")
    before, after = tensors["d2t"] + np.arange(len(TARGET_IDS)), found["d2t"] + np.arange(len(TARGET_IDS))
    assert after.tolist() == sorted(before.tolist()) != before.tolist()
    for row, token in enumerate(after):
        old = int(np.flatnonzero(before == token)[0])
        assert np.array_equal(found["lm_head.weight"][row], tensors["lm_head.weight"][old])
    assert np.array_equal(np.flatnonzero(found["t2d"]), after)
    assert convert(sound, "modelopt", tmp_path / "as-it-is") == 0
    same(
        {n: t for n, t in weights(tmp_path / "as-it-is").items() if n in ("d2t", "lm_head.weight")},
        {n: t for n, t in tensors.items() if n in ("d2t", "lm_head.weight")},
    )


def test_absolute_ids_become_offsets(tmp_path, sound):
    whole = weights(sound)
    tensors = dict(whole)
    to_absolute(tensors)
    save_file(tensors, sound / "model.safetensors")
    assert convert(sound, "sglang", tmp_path / "out") == 0
    same(weights(tmp_path / "out"), whole)


def test_an_mla_drafter(tmp_path, target, capsys):
    drafter = write_drafter(tmp_path / "mla", random_weights(mla_tensors()), **MLA)
    assert convert(drafter, "modelopt", tmp_path / "there") == 0
    assert convert(tmp_path / "there", "sglang", tmp_path / "back") == 0
    same(weights(tmp_path / "back"), weights(drafter))
    assert convert(drafter, "speculators", tmp_path / "no", "--target", target) == 1
    assert "latent attention" in capsys.readouterr().err and not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("change", "layer", "why"),
    [
        ({"norm_before_residual": True}, {}, "norm_before_residual is true"),
        ({}, {"layer_types": ["sliding_attention"]}, "sliding window"),
        ({}, {"use_sliding_window": True}, "sliding window"),
        ({}, {"model_type": "qwen3"}, "Qwen3 layer norms"),
        ({}, {"attention_bias": True}, "attention has biases"),
        ({}, {"mlp_bias": True}, "MLP has biases"),
        ({}, {"num_hidden_layers": 2}, "the second is another"),
        ({"target_hidden_size": 99}, {}, "target_hidden_size"),
        ({"speculators_model_type": "dflash"}, {}, "expected 'eagle3'"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, {}, "no ids for"),
        ({"eagle_aux_hidden_state_layer_ids": "1"}, {}, "expected layers"),
    ],
)
def test_what_would_change_the_result_is_refused(tmp_path, sound, target, capsys, change, layer, why):
    assert convert(sound, "speculators", tmp_path / "theirs", "--target", target) == 0
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    write_config(tmp_path / "theirs", **change, transformer_layer_config=config["transformer_layer_config"] | layer)
    capsys.readouterr()
    assert convert(tmp_path / "theirs", "sglang", tmp_path / "out", "--target", target) == 1
    shown = capsys.readouterr()
    assert why in shown.err and shown.err.count("\n") == 1 and not (tmp_path / "out").exists()


def test_an_embedding_of_its_own_is_refused(tmp_path, sound, target, capsys):
    assert convert(sound, "speculators", tmp_path / "theirs", "--target", target) == 0
    tensors = weights(tmp_path / "theirs")
    tensors["embed_tokens.weight"][3, 3] += 1
    save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    assert convert(tmp_path / "theirs", "sglang", tmp_path / "out", "--target", target) == 1
    assert "its embedding is not the target's" in capsys.readouterr().err


def test_norm_output_has_two_meanings(tmp_path, sound, target, capsys):
    write_config(sound, norm_output=True)
    assert convert(sound, "speculators", tmp_path / "a", "--target", target) == 1
    assert "--norm-output fed-back" in capsys.readouterr().err
    for meaning, kept in (("fed-back", True), ("head-only", False)):
        out = tmp_path / meaning
        assert convert(sound, "speculators", out, "--target", target, "--norm-output", meaning) == 0
        assert json.loads((out / "config.json").read_text())["norm_output"] is kept
        assert convert(sound, "sglang", tmp_path / f"{meaning}-flat", "--norm-output", meaning) == 0
        assert json.loads((tmp_path / f"{meaning}-flat" / "config.json").read_text()).get("norm_output", False) is kept


@pytest.mark.parametrize("more", [[], ["--target"]])
def test_the_target_where_it_is_needed(tmp_path, sound, capsys, more):
    other = write_target(tmp_path / "other", hidden_size=HIDDEN * 2)
    given = [*more, other] if more else []
    assert convert(sound, "speculators", tmp_path / "out", *given) == 1
    assert ("name its own target" if more else "give --target DIR") in capsys.readouterr().err


def test_an_eagle_checkpoint(tmp_path, sound, target, capsys):
    whole = weights(sound)
    folder = tmp_path / "eagle"
    folder.mkdir()
    config = json.loads((sound / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    del config["eagle_config"]
    (folder / "config.json").write_text(json.dumps(config))
    halves = {n: torch.from_numpy(t).half() if t.dtype == np.float32 else torch.from_numpy(t) for n, t in whole.items()}
    torch.save(halves, folder / "pytorch_model.bin")
    assert convert(folder, "sglang", tmp_path / "out") == 1
    assert "EAGLE names no captured layers" in capsys.readouterr().err
    assert convert(folder, "sglang", tmp_path / "out", "--target", target) == 0
    found = weights(tmp_path / "out")
    same(found, {n: t.astype(np.float16) if t.dtype == np.float32 else t for n, t in whole.items()})
    assert read_folder(tmp_path / "out").layer_ids == [1, 3, 4]  # inputs of 2, 4 and 5 of 8 layers
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder / CANARY), 2))
    assert convert(folder, "sglang", tmp_path / "bomb", "--target", target) == 1
    shown = capsys.readouterr().err
    assert "never loaded" in shown and shown.count("\n") == 1
    assert not (folder / CANARY).exists() and not (tmp_path / "bomb").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".eagle")]


ODD = {
    "float64": lambda x: x.double(),
    "float8_e4m3fn": lambda x: x.to(torch.float8_e4m3fn),
    "complex64": lambda x: x.to(torch.complex64),
    "int16": lambda x: x.to(torch.int16),
    "torch.sparse_coo": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["fc.weight", "d2t"])
def test_an_eagle_tensor_of_an_odd_kind(tmp_path, sound, target, capsys, kind, name):
    folder = eagle_of(sound, tmp_path / "eagle", lambda whole: whole | {name: ODD[kind](whole[name])})
    assert convert(folder, "sglang", tmp_path / "out", "--target", target) == 1
    shown = capsys.readouterr().err
    assert name in shown and kind in shown and "save it again" in shown and shown.count("\n") == 1


@pytest.mark.parametrize("change", [{"3": torch.ones(1)}, {"lm_head.weight": torch.ones(3, HIDDEN)}])
def test_a_fault_of_an_eagle_checkpoint_names_its_folder(tmp_path, sound, target, capsys, change):
    folder = eagle_of(sound, tmp_path / "eagle", lambda whole: whole | change)
    assert convert(folder, "sglang", tmp_path / "out", "--target", target) == 1
    shown = capsys.readouterr().err
    assert str(folder) in shown and ".eagle-" not in shown


def eagle_of(sound, folder, change):
    folder.mkdir()
    (folder / "config.json").write_text((sound / "config.json").read_text())
    torch.save(change({name: torch.from_numpy(x) for name, x in weights(sound).items()}), folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("to", ["sglang", "modelopt"])
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda t: (t.pop("d2t"), t.pop("t2d")), "has no d2t"),
        (lambda t: t.pop("lm_head.weight"), "lacks lm_head.weight"),
        (lambda t: t.pop("norm.weight"), "lacks norm.weight"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:-1]}), "rows but draft_vocab_size"),
        (lambda t: t.update({"fc.weight": t["fc.weight"][:, :-1].copy()}), "fc.weight is"),
        (lambda t: t.update({"d2t": t["d2t"][:-1]}), "d2t"),
        (lambda t: t.update({"fc.weight": t["fc.weight"].astype(np.int32)}), "fc.weight is I32"),
    ],
)
def test_a_faulty_drafter_is_not_made_anew(tmp_path, sound, target, capsys, spoil, why, to):
    """Of speculators' format too, whose config the checks do not know as it stands."""
    assert convert(sound, "speculators", tmp_path / "theirs", "--target", target) == 0
    tensors = weights(tmp_path / "theirs")
    spoil(tensors)
    save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    capsys.readouterr()
    assert convert(tmp_path / "theirs", to, tmp_path / "out", "--target", target) == 1
    shown = capsys.readouterr().err
    assert why in shown and shown.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_conversion_that_is_interrupted(tmp_path, sound, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("drafter.checkpoint.convert_cli.write_converted", interrupted)
    assert convert(sound, "modelopt", tmp_path / "out") == 130
    assert "nothing was left behind" in capsys.readouterr().err and [p.name for p in tmp_path.iterdir()] == ["d"]


@pytest.mark.parametrize(
    ("architecture", "ids", "inputs"),
    [
        ("LlamaForCausalLM", [0, 3, 6], [1, 4, 7]),
        ("LlamaForCausalLM", [1, 3, 6], [2, 4, 7]),
        ("LlamaForCausalLM", None, [2, 4, 5]),
        ("KimiK25ForConditionalGeneration", [2, 3, 7], [2, 3, 7]),
        ("KimiK25ForConditionalGeneration", [1, 3, 6], [2, 4, 7]),
        ("DeepseekV3ForCausalLM", None, [2, 4, 5]),
    ],
)
def test_layer_ids_and_inputs_are_each_other(tmp_path, architecture, ids, inputs):
    facts = TargetFacts(tmp_path, {"num_hidden_layers": 8}, architecture, "", None, [])
    assert inputs_of(ids, facts) == inputs
    assert inputs_of(ids_of(inputs, facts), facts) == inputs


@pytest.mark.parametrize(("architecture", "inputs"), [("LlamaForCausalLM", [0, 3]), ("DeepseekV3ForCausalLM", [1, 3])])
def test_inputs_that_no_ids_mean(tmp_path, architecture, inputs):
    """A Llama has no id below 0; a DeepSeek takes a first id of 1 for something else."""
    facts = TargetFacts(tmp_path, {"num_hidden_layers": 8}, architecture, "", None, [])
    with pytest.raises(FormatError, match="no ids for"):
        ids_of(inputs, facts)


@pytest.mark.parametrize("to", ["sglang", "speculators", "modelopt"])
def test_inspect(tmp_path, sound, target, capsys, to):
    assert convert(sound, to, tmp_path / "out", "--target", target) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["vocabulary"]["size"] == len(TARGET_IDS) and found["vocabulary"]["ascending"]
    assert found["sizes"]["hidden_size"] == HIDDEN
    assert found["layer_ids"] == ([1, 4, 7] if to == "speculators" else [0, 3, 6])
    assert to.split("g")[0] in found["format"].lower() or (to == "modelopt" and "Model-Optimizer" in found["format"])
    assert main(["inspect", str(tmp_path / "out"), "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in found["tensors"])
    assert main(["inspect", str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_folder_that_exists_is_kept(tmp_path, sound, capsys):
    assert convert(sound, "modelopt", sound) == 1
    assert "exists already" in capsys.readouterr().err
