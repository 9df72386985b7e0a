"""Drafter folders as they are written: tensors, hashes, and all or nothing."""

import fcntl
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from drafter.checkpoint.folder import DrafterError
from drafter.checkpoint.manifest import (
    Manifest,
    file_sha256,
    new_folder,
    read_manifest,
    stopped_as_interrupted,
    write_folder,
)
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


def filled(folder):
    with new_folder(folder) as beside:
        (beside / "x").write_text("ours")


@pytest.mark.parametrize("name", ["out.tmp", "out.part", ".out", "out~"])
def test_what_lies_beside_is_not_touched(tmp_path, name):
    """Not even what is named as a program would name its half-written work: it may be the very source."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "precious").write_text("theirs")
    filled(tmp_path / "out")
    assert (tmp_path / "out" / "x").read_text() == "ours"
    assert (tmp_path / name / "precious").read_text() == "theirs"
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "other"):
        raise ZeroDivisionError
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["out", name])


def dangling(path):
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [dangling, os.mkdir, lambda path: path.write_text(""), lambda path: os.mkfifo(path)])
def test_whatever_has_the_name_is_in_the_way(tmp_path, make):
    """At once, not when the work is done."""
    make(tmp_path / "out")
    begun = False
    with pytest.raises(DrafterError, match="exists already"), new_folder(tmp_path / "out"):
        begun = True
    assert not begun and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_name_that_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "new" / "..", Path(), Path(".."), tmp_path):
        with pytest.raises(DrafterError, match="exists already"):
            filled(path)
    assert not list(tmp_path.iterdir())


def test_two_at_once(tmp_path):
    """The second is told, and the first is not disturbed; what a killed process left is taken over."""
    with new_folder(tmp_path / "out") as beside:
        (beside / "x").write_text("first")
        with pytest.raises(DrafterError, match="written by another process"):
            filled(tmp_path / "out")
        assert (beside / "x").read_text() == "first"
        left = beside
    left.mkdir()
    (left / "half").write_text("")
    filled(tmp_path / "second" / "out")
    shutil.rmtree(tmp_path / "out")
    filled(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x"] and not left.exists()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def unsupported(lock, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    filled(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_cleans_up(tmp_path, number):
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    inherited = signal.signal(number, usual)  # nohup has SIGHUP ignored
    try:
        with pytest.raises(KeyboardInterrupt), stopped_as_interrupted(), new_folder(tmp_path / "a" / "out"):
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) == usual
    finally:
        signal.signal(number, inherited)
    assert not list(tmp_path.iterdir())


def test_a_signal_that_is_ignored_stays_so(tmp_path):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopped_as_interrupted(), new_folder(tmp_path / "out"):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (tmp_path / "out").is_dir()
