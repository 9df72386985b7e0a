"""Broken drafter folders are refused before an engine is started, and those that it serves rightly are not."""

import errno
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from drafter.checkpoint.folder import DrafterError
from drafter.checkpoint.preflight import read_folder
from tests.server.drafters import (
    AUX,
    DRAFT_VOCAB,
    HIDDEN,
    LLAMA,
    MLA,
    TARGET_IDS,
    VOCAB,
    llama_tensors,
    mla_tensors,
    ones,
    write_drafter,
)

STYLES = {"llama": (LLAMA, llama_tensors), "mla": (MLA, mla_tensors)}
WEIGHTS = [(style, name) for style, (_, make) in STYLES.items() for name in make() if name.endswith(".weight")]


def test_a_good_folder(tmp_path):
    folder = read_folder(write_drafter(tmp_path / "d"))
    assert folder.layer_ids == [1, 2, 3]
    assert folder.tensors["lm_head.weight"].shape == (DRAFT_VOCAB, HIDDEN)
    assert folder.tensors["d2t"].dtype == "I64"


def test_identity_follows_every_byte(tmp_path):
    first = read_folder(write_drafter(tmp_path / "a")).sha256
    assert read_folder(write_drafter(tmp_path / "b")).sha256 == first
    tensors = llama_tensors()
    tensors["norm.weight"][0] += 1
    assert read_folder(write_drafter(tmp_path / "c", tensors)).sha256 != first
    assert read_folder(write_drafter(tmp_path / "d", hidden_act="silu")).sha256 != first


@pytest.mark.parametrize("cut", [0, 4, 8, 100, -1])
def test_a_file_cut_short(tmp_path, cut):
    file = write_drafter(tmp_path / "d") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(DrafterError, match=r"cut short|broken"):
        read_folder(tmp_path / "d")


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32"}}',
        b"\xff\xfe",
        b'{"a": null}',
        b"[" * 100_000,
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [], "data_offsets": []}}',
    ],
)
def test_a_broken_header(tmp_path, header):
    write_drafter(tmp_path / "d")
    (tmp_path / "d" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DrafterError, match="broken safetensors header"):
        read_folder(tmp_path / "d")


@pytest.mark.parametrize(("style", "name"), [*WEIGHTS, ("llama", "d2t")])
def test_a_missing_tensor(tmp_path, style, name):
    config, make = STYLES[style]
    tensors = make()
    del tensors[name]
    with pytest.raises(DrafterError) as caught:
        read_folder(write_drafter(tmp_path / "d", tensors, **config))
    assert name.removeprefix("midlayer.") in str(caught.value)


@pytest.mark.parametrize(("style", "name"), WEIGHTS)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_tensor_of_another_shape(tmp_path, style, name, axis):
    config, make = STYLES[style]
    tensors = make()
    tensors[name] = np.concatenate([tensors[name]] * 2, axis) if tensors[name].ndim > axis else tensors[name][:, None]
    with pytest.raises(DrafterError, match=rf"{name} (is \[|has \d+ rows).*agree"):
        read_folder(write_drafter(tmp_path / "d", tensors, **config))


def renamed(tensors, old, new):
    return {name.replace(old, new, 1): tensor for name, tensor in tensors.items()}


def prefixed(tensors):
    return {name if name in ("lm_head.weight", "d2t", "t2d") else f"model.{name}": t for name, t in tensors.items()}


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


HEADLESS = ("lm_head.weight", "d2t", "t2d")
FULL = without(llama_tensors(), *HEADLESS) | {"lm_head.weight": ones(VOCAB, HIDDEN)}
SECOND = {
    name.replace("midlayer", "layers.1"): tensor[:, :HIDDEN] if "q_proj" in name or "k_proj" in name else tensor
    for name, tensor in llama_tensors().items()
    if name.startswith("midlayer")
} | {"layers.1.self_attn.v_proj.weight": llama_tensors()["midlayer.self_attn.v_proj.weight"][:, :HIDDEN]}
TURNED = TARGET_IDS[::-1]
SERVED = {
    "mla": (mla_tensors(), MLA),
    "layers.0": (renamed(llama_tensors(), "midlayer", "layers.0"), {}),
    "mla layers.0": (renamed(mla_tensors(), "midlayer", "layers.0"), MLA),
    "model.": (prefixed(llama_tensors()), {}),
    "model.layers.0": (prefixed(renamed(llama_tensors(), "midlayer", "layers.0")), {}),
    "embedding": (llama_tensors() | {"embed_tokens.weight": ones(VOCAB, HIDDEN)}, {}),
    "full vocabulary": (FULL, {"draft_vocab_size": VOCAB}),
    "shared head": (without(llama_tensors(), *HEADLESS), {"draft_vocab_size": None}),
    "mla shared head": (without(mla_tensors(), *HEADLESS), MLA | {"draft_vocab_size": ...}),
    "tied": (without(llama_tensors(), *HEADLESS), {"draft_vocab_size": VOCAB, "tie_word_embeddings": True}),
    "default layers": (llama_tensors(), {"eagle_config": ...}),
    "two captured layers": (
        llama_tensors() | {"fc.weight": ones(HIDDEN, 2 * HIDDEN)},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 5]}},
    ),
    "counted layers": (llama_tensors(), {"num_aux_hidden_states": AUX}),
    "another target": (
        llama_tensors() | {"fc.weight": ones(HIDDEN, AUX * 10), "embed_tokens.weight": ones(VOCAB, HIDDEN)},
        {"target_hidden_size": 10},
    ),
    "normed states": (
        llama_tensors() | {"input_norm.weight": ones(AUX * HIDDEN)},
        {"eagle_config": LLAMA["eagle_config"] | {"norm_before_fc": True}},
    ),
    "normed one by one": (
        llama_tensors() | {f"fc_norm.{layer}.weight": ones(HIDDEN) for layer in range(AUX)},
        {"fc_norm": True},
    ),
    "by their old names": (
        llama_tensors() | {f"aux_norm_{layer}.weight": ones(HIDDEN) for layer in ("low", "mid", "high")},
        {"use_aux_norm": True},
    ),
    "mla null target": (mla_tensors(), MLA | {"target_hidden_size": None}),
    "two layers": (llama_tensors() | SECOND, {"num_hidden_layers": 2}),
    "no t2d": (without(llama_tensors(), "t2d"), {}),
    "int32 map": (llama_tensors() | {"d2t": llama_tensors()["d2t"].astype(np.int32)}, {}),
    "rows in another order": (llama_tensors() | {"d2t": TURNED - np.arange(DRAFT_VOCAB)}, {}),
    "no context": (llama_tensors(), {"max_position_embeddings": None}),
}


@pytest.mark.parametrize("kind", SERVED)
def test_what_an_engine_serves_is_not_refused(tmp_path, kind):
    tensors, config = SERVED[kind]
    read_folder(write_drafter(tmp_path / "d", {n: np.ascontiguousarray(t) for n, t in tensors.items()}, **config))


def test_names_that_the_engine_skips(tmp_path):
    with pytest.raises(DrafterError, match=r"lacks fc.weight.*has model.fc.weight, a name that SGLang skips"):
        read_folder(write_drafter(tmp_path / "a", prefixed(mla_tensors()), **MLA))
    tensors = renamed(llama_tensors(), "lm_head", "model.lm_head")
    with pytest.raises(DrafterError, match=r"lacks lm_head.weight \(it has model.lm_head.weight"):
        read_folder(write_drafter(tmp_path / "b", tensors))
    with pytest.raises(DrafterError, match=r"lacks layers.1.self_attn.q_proj.weight"):
        read_folder(write_drafter(tmp_path / "c", num_hidden_layers=2))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["folder", "loop", "dangling", "unreadable"])
def test_a_file_that_is_none(tmp_path, monkeypatch, name, kind):
    file = write_drafter(tmp_path / "d") / name
    if kind == "unreadable":  # by what the system says, since root may read everything
        whole = Path.open

        def refuse(path, *args, **options):
            if path == file:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return whole(path, *args, **options)

        monkeypatch.setattr(Path, "open", refuse)
    else:
        file.unlink()
        if kind == "folder":
            file.mkdir()
        else:
            file.symlink_to(name if kind == "loop" else "nowhere")
    with pytest.raises(DrafterError, match=rf"{name} (cannot be read|is missing)"):
        read_folder(tmp_path / "d")


def test_a_folder_that_cannot_be_looked_at(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "loop", tmp_path / ("x" * 300), tmp_path / "a\0b"):
        with pytest.raises(DrafterError):
            read_folder(path)


def test_a_width_that_the_engine_would_misread(tmp_path):
    one = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4]}}
    with pytest.raises(DrafterError, match="SGLang skips fc"):
        read_folder(write_drafter(tmp_path / "a", llama_tensors() | {"fc.weight": ones(HIDDEN, HIDDEN)}, **one))
    tensors = llama_tensors() | {"fc.weight": ones(HIDDEN, AUX * 10)}
    with pytest.raises(DrafterError, match=r"lacks embed_tokens.weight"):
        read_folder(write_drafter(tmp_path / "b", tensors, target_hidden_size=10))


def test_a_head_of_another_size(tmp_path):
    with pytest.raises(DrafterError, match=r"lm_head.weight has 16 rows but draft_vocab_size is 15"):
        read_folder(write_drafter(tmp_path / "d", draft_vocab_size=15))


@pytest.mark.parametrize("d2t", [np.zeros(15, np.int64), np.zeros((16, 1), np.int64), np.zeros(16, np.float32)])
def test_a_map_of_another_shape(tmp_path, d2t):
    with pytest.raises(DrafterError, match="d2t is"):
        read_folder(write_drafter(tmp_path / "d", {**llama_tensors(), "d2t": d2t}))


@pytest.mark.parametrize(
    ("row", "offset", "message"),
    [
        (0, -1, "names the target id -1 at row 0"),
        (DRAFT_VOCAB - 1, VOCAB - DRAFT_VOCAB + 1, "the target has 64 tokens"),
        (5, 2**63 - 1, "names the target id -"),
        (1, -1, "names the target id 0 twice"),
        (1, 1, "they are not the same ones"),
    ],
)
def test_a_map_that_cannot_be_meant(tmp_path, row, offset, message):
    tensors = llama_tensors()
    tensors["d2t"][row] = offset
    with pytest.raises(DrafterError, match=message):
        read_folder(write_drafter(tmp_path / "d", tensors))


@pytest.mark.parametrize("d2t", [TARGET_IDS, TARGET_IDS[:1].repeat(DRAFT_VOCAB)])
def test_a_map_of_ids_instead_of_offsets(tmp_path, d2t):
    with pytest.raises(DrafterError):
        read_folder(write_drafter(tmp_path / "d", {**llama_tensors(), "d2t": np.ascontiguousarray(d2t)}))


@pytest.mark.parametrize("t2d", [np.zeros(VOCAB, bool), np.ones(VOCAB, bool), np.zeros(8, bool), ones(VOCAB)])
def test_a_membership_that_does_not_agree(tmp_path, t2d):
    with pytest.raises(DrafterError, match="t2d"):
        read_folder(write_drafter(tmp_path / "d", {**llama_tensors(), "t2d": t2d}))


def test_a_map_over_a_shared_head(tmp_path):
    with pytest.raises(DrafterError, match=r"d2t is I64 \[16\], expected integers \[64\]"):
        read_folder(write_drafter(tmp_path / "d", draft_vocab_size=None))


SIZES = ["vocab_size", "hidden_size", "num_hidden_layers", "draft_vocab_size", "max_position_embeddings", "head_dim"]
MEANT = [("mla", key, value) for key in ("q_lora_rank", "kv_lora_rank") for value in ("x", 0)]
MEANT += [("llama", key, value) for key in SIZES for value in ("many", -1, 0, True, 2.5, [1], {})]
MEANT += [("llama", key, value) for key in SIZES[:3] for value in (None, ...)]
MEANT += [
    ("llama", "draft_vocab_size", ...),
    ("llama", "target_hidden_size", None),
    ("llama", "target_hidden_size", ""),
]
MEANT += [
    ("llama", "num_hidden_layers", 10**9),
    ("mla", "num_hidden_layers", 2),
    ("llama", "tie_word_embeddings", True),
]
MEANT += [("llama", "num_aux_hidden_states", value) for value in (4, "3")]
MEANT += [("llama", "eagle_config", value) for value in ([], "x", 3, [1, 2, 3])]


@pytest.mark.parametrize(("style", "key", "value"), MEANT)
def test_a_config_that_cannot_be_meant(tmp_path, style, key, value):
    config, make = STYLES[style]
    with pytest.raises(DrafterError, match=rf"config.json: .*{'size fc for 4' if value == 4 else key}"):
        read_folder(write_drafter(tmp_path / "d", make(), **(config | {key: value})))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("ids", ["abc", [0.5], [True], [-1], [1, 1, 2], [], {}, 3, ["1"], [None], [[1]], "123"])
def test_layers_that_cannot_be_meant(tmp_path, style, ids):
    config, make = STYLES[style]
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    with pytest.raises(
        DrafterError, match=r"config.json: 'eagle_config.eagle_aux_hidden_state_layer_ids' is .*layers? "
    ):
        read_folder(write_drafter(tmp_path / "d", make(), **(config | nested)))


def test_layers_that_only_size_fc(tmp_path):
    config = MLA | {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}
    tensors = mla_tensors() | {"fc.weight": ones(HIDDEN, 4 * HIDDEN)}
    with pytest.raises(DrafterError, match="capture 3 layers and size fc for 4"):
        read_folder(write_drafter(tmp_path / "d", tensors, **config))
    with pytest.raises(DrafterError, match="'eagle_aux_hidden_state_layer_ids' is 'x'"):
        read_folder(write_drafter(tmp_path / "d", tensors, **(config | {"eagle_aux_hidden_state_layer_ids": "x"})))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("1" * 5000, "is not JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "'architectures' is None"),
        ('{"architectures": ["LlamaForCausalLM"]}', "expected"),
    ],
)
def test_a_broken_config(tmp_path, config, message):
    write_drafter(tmp_path / "d")
    (tmp_path / "d" / "config.json").write_text(config)
    with pytest.raises(DrafterError, match=message):
        read_folder(tmp_path / "d")


def test_what_is_not_a_drafter(tmp_path):
    with pytest.raises(DrafterError, match="is not a folder"):
        read_folder(tmp_path / "nowhere")
    (tmp_path / "d").mkdir()
    with pytest.raises(DrafterError, match=r"config.json is missing"):
        read_folder(tmp_path / "d")
    shutil.copy(write_drafter(tmp_path / "good") / "config.json", tmp_path / "d")
    with pytest.raises(DrafterError, match="found none"):
        read_folder(tmp_path / "d")
    (tmp_path / "d" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(DrafterError, match=r"pytorch_model.bin, a pickle"):
        read_folder(tmp_path / "d")
    save_file({"x": np.zeros(1)}, tmp_path / "d" / "model.safetensors")
    with pytest.raises(DrafterError, match=r"lacks fc.weight"):
        read_folder(tmp_path / "d")
