"""Broken drafter folders are refused before an engine is started."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from drafter.checkpoint.folder import DrafterError, read_folder
from tests.server.drafters import DRAFT_VOCAB, HIDDEN, llama_tensors, write_drafter


def test_a_good_folder(tmp_path):
    folder = read_folder(write_drafter(tmp_path / "d"))
    assert folder.layer_ids == [1, 2, 3]
    assert folder.max_context == 2048
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


@pytest.mark.parametrize("header", [b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32"}}', b"\xff\xfe", b'{"a": null}'])
def test_a_broken_header(tmp_path, header):
    write_drafter(tmp_path / "d")
    (tmp_path / "d" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DrafterError, match="broken safetensors header"):
        read_folder(tmp_path / "d")


@pytest.mark.parametrize("name", sorted(set(llama_tensors()) - {"t2d"}))
def test_a_missing_tensor(tmp_path, name):
    tensors = llama_tensors()
    del tensors[name]
    with pytest.raises(DrafterError) as caught:
        read_folder(write_drafter(tmp_path / "d", tensors))
    assert name.removeprefix("midlayer.") in str(caught.value)


def test_a_head_of_another_size(tmp_path):
    with pytest.raises(DrafterError, match=r"lm_head.weight has 16 rows but draft_vocab_size is 15"):
        read_folder(write_drafter(tmp_path / "d", draft_vocab_size=15))


@pytest.mark.parametrize("d2t", [np.zeros(15, np.int64), np.zeros((16, 1), np.int64), np.zeros(16, np.float32)])
def test_a_map_of_another_shape(tmp_path, d2t):
    with pytest.raises(DrafterError, match="d2t is"):
        read_folder(write_drafter(tmp_path / "d", {**llama_tensors(), "d2t": d2t}))


@pytest.mark.parametrize(
    ("config", "message"),
    [("{", "is not JSON"), ("[]", "'architectures' is None"), ('{"architectures": ["LlamaForCausalLM"]}', "expected")],
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
    (tmp_path / "d" / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    with pytest.raises(DrafterError, match="found none"):
        read_folder(tmp_path / "d")
    (tmp_path / "d" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(DrafterError, match=r"pytorch_model.bin, a pickle"):
        read_folder(tmp_path / "d")
    save_file({"x": np.zeros(1)}, tmp_path / "d" / "model.safetensors")
    with pytest.raises(DrafterError, match=r"lacks fc.weight"):
        read_folder(tmp_path / "d")
