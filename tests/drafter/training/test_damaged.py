"""A run's folder after a full disk, a bad disk or a hand: gone on with, or refused at once with what to do."""

import argparse

import pytest

from drafter.training.errors import TrainingError
from drafter.training.runstate import save_tensors
from drafter.training.train_cli import add_train
from tests.drafter.training.test_train import new_run

DAMAGES = {
    "empty": lambda whole: b"",
    "half": lambda whole: whole[: len(whole) // 2],
    "zeros": lambda whole: bytes(len(whole)),
    "noise": lambda whole: bytes(range(1, 256)) * 4,
    "text": lambda whole: b'{"a": 1}\n[]\n3\n',
    "gone": None,
}


@pytest.fixture
def begun(tmp_path, llama, shards, vocab_file):
    """A run that was stopped at its fifth step, and one that goes on."""

    def start():
        run = new_run(llama, shards, tmp_path / "run", vocab_file, steps=8)
        run.start()
        return run

    start().train(stop_after=5)
    return tmp_path / "run", start


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["best.safetensors", "checkpoint.safetensors", "log.jsonl", "teacher-*.npy"])
def test_any_file_of_a_run_may_be_damaged(begun, kind, damage):
    folder, start = begun
    file = next(folder.glob(kind))
    if DAMAGES[damage]:
        file.write_bytes(DAMAGES[damage](file.read_bytes()))
    else:
        file.unlink()
    anew = (
        kind.startswith("teacher")
        or (damage == "gone" and kind[0] in "cl")
        or (kind[0] == "l" and damage in ("empty", "half", "zeros"))
    )
    if anew:  # the labels are made again, a run without a checkpoint begins, a log's lines were cut or are missing
        start().train()
        assert (folder / "best.safetensors").exists()
        return
    with pytest.raises(TrainingError) as refused:
        start()
    assert str(file) in str(refused.value) and "remove" in str(refused.value)


def test_a_disk_that_fills_up_is_told_and_the_run_goes_on(begun, monkeypatch):
    """Every write of weights fails as safetensors fails on a full disk; what was there stays."""
    folder, start = begun
    kept = {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    run = start()
    monkeypatch.setattr("drafter.training.runstate.save_file", full_disk)
    with pytest.raises(TrainingError, match=r"checkpoint.safetensors could not be written .*No space left.*make room"):
        run.train()
    monkeypatch.undo()
    assert kept == {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    assert not list(folder.glob("*.tmp"))
    again = start()
    again.train()
    assert again.progress.step == 8


def full_disk(tensors, file, metadata):
    """What safetensors does on a full disk: a part of the file, and an error of its own kind."""
    from safetensors import SafetensorError

    file.write_bytes(b"part")
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_a_folder_that_is_gone_is_told(tmp_path):
    with pytest.raises(TrainingError, match="could not be written"):
        save_tensors(tmp_path / "not" / "there.safetensors", {}, {})


@pytest.mark.parametrize("flag", ["--seed", "--patience"])
def test_a_negative_count_is_a_usage_error(flag, capsys):
    parser = argparse.ArgumentParser()
    add_train(parser.add_subparsers())
    with pytest.raises(SystemExit):
        parser.parse_args(["train", "--shards", "s", "--target", "t", "--out", "o", "--steps", "1", flag, "-1"])
    assert "'-1' is not a whole number of 0 or more" in capsys.readouterr().err
