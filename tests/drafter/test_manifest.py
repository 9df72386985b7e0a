"""Drafter folders as they are written: tensors, hashes, and all or nothing."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from drafter.checkpoint.folder import DrafterError
from drafter.checkpoint.manifest import Manifest, file_sha256, read_manifest, write_folder
from drafter.checkpoint.preflight import read_folder
from drafter.checkpoint.vocab import DraftVocab
from drafter.data.tensorfile import to_bf16, to_float32, write_tensors
from tests.server.drafters import TARGET_IDS, VOCAB, llama_tensors, write_drafter

HASH = DraftVocab(TARGET_IDS, VOCAB).hash
MANIFEST = Manifest("d", HASH, {"name": "t"}, {"layer_ids": [1]}, {"kind": "scratch"}, {"steps": 1})


def test_bf16_is_rounded_as_torch_rounds_it(tmp_path):
    generator = np.random.default_rng(0)
    numbers = generator.normal(size=(100, 7)).astype(np.float32) * 10.0 ** generator.integers(-30, 30, (100, 7))
    numbers = numbers.astype(np.float32)
    numbers[0, :4] = [0.0, -0.0, 1.00390625, 1.01171875]  # the last two lie half-way between two bf16
    write_tensors(tmp_path / "x.safetensors", {"a": to_bf16(numbers), "b": numbers, "c": np.array([True, False])})
    found = load_file(tmp_path / "x.safetensors")
    assert torch.equal(found["a"], torch.from_numpy(numbers).bfloat16())
    assert torch.equal(found["b"], torch.from_numpy(numbers))
    assert found["c"].tolist() == [True, False]
    assert np.array_equal(to_float32(to_bf16(numbers)), found["a"].float().numpy())


def test_what_is_not_finite_is_no_weight():
    with pytest.raises(AssertionError, match="not finite"):
        to_bf16(np.array([1.0, np.nan], np.float32))


def test_a_folder_says_whence_it_comes(tmp_path):
    config = json.loads((write_drafter(tmp_path / "a") / "config.json").read_text())
    write_folder(tmp_path / "b", config, llama_tensors(), MANIFEST)
    assert read_folder(tmp_path / "b").config == config
    found = read_manifest(tmp_path / "b")
    assert found["sha256"] == {n: file_sha256(tmp_path / "b" / n) for n in ("config.json", "model.safetensors")}
    assert (found["format"], found["name"], found["state"], found["reports"]) == (1, "d", "candidate", [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    with pytest.raises(DrafterError, match="exists already"):
        write_folder(tmp_path / "b", config, llama_tensors(), MANIFEST)
    assert read_manifest(tmp_path / "a") is None


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ('{"format": 2}', "format 1"), ("[]", "format 1")])
def test_a_broken_manifest(tmp_path, text, message):
    (tmp_path / "eyas.json").write_text(text)
    with pytest.raises(DrafterError, match=message):
        read_manifest(tmp_path)
