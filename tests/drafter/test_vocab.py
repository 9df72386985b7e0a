"""Draft vocabularies: chosen by counts, mapped both ways, hashed, and refused where they cannot be meant."""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.__main__ import main
from drafter.checkpoint.vocab import DraftVocab, VocabError
from drafter.data.tensorfile import write_tensors


def by_hand(counts: list[int], size: int, forced: set[int]) -> list[int]:
    """The most frequent tokens, ties by the lower id, the forced ones first."""
    others = sorted((token for token in range(len(counts)) if token not in forced), key=lambda t: (-counts[t], t))
    return sorted([*forced, *others[: size - len(forced)]])


@given(st.data())
def test_the_most_frequent_tokens(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=30))
    size = data.draw(st.integers(1, len(counts)))
    forced = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=size))
    vocab = DraftVocab.from_counts(np.array(counts), size, forced)
    expected = by_hand(counts, size, forced)
    assert vocab.target_ids.tolist() == expected
    total = sum(counts)
    assert vocab.coverage(np.array(counts)) == (sum(counts[t] for t in expected) / total if total else 1.0)


@given(st.sets(st.integers(0, 60), min_size=1))
def test_the_map_goes_there_and_back(ids: set[int]) -> None:
    vocab = DraftVocab(np.array(sorted(ids), dtype=np.int64), 61)
    for row, token in enumerate(sorted(ids)):
        assert row + vocab.d2t[row] == token
        assert vocab.rows[token] == row
    assert np.flatnonzero(vocab.t2d).tolist() == sorted(ids)
    assert (vocab.rows < 0).sum() == 61 - len(ids)
    assert DraftVocab.from_tensors(vocab.d2t, vocab.t2d, 61).hash == vocab.hash


def test_the_hash_is_the_one_that_is_written_down() -> None:
    expected = hashlib.sha256(struct.pack("<4q", 2, 3, 7, 10)).hexdigest()
    assert DraftVocab(np.array([2, 3, 7]), 10).hash == expected
    assert DraftVocab(np.array([2, 3, 7]), 11).hash != expected


@pytest.mark.parametrize(
    ("ids", "size", "reason"),
    [
        ([3, 2], 10, "2 follows 3 at row 1"),
        ([2, 2], 10, "2 follows 2 at row 1"),
        ([2, 10], 10, "names the target ids 2 to 10, but the target has 10 tokens"),
        ([-1, 4], 10, "names the target ids -1 to 4"),
        ([], 10, "found int64 [0]"),
        ([[1]], 10, "found int64 [1, 1]"),
    ],
)
def test_a_map_that_cannot_be_meant(ids: list[int], size: int, reason: str) -> None:
    with pytest.raises(VocabError, match=reason.replace("[", r"\[").replace("]", r"\]")):
        DraftVocab(np.array(ids, dtype=np.int64), size)


@pytest.mark.parametrize(("size", "forced"), [(0, ()), (11, ()), (1, (2, 3)), (3, (10,)), (3, (-1,))])
def test_a_size_that_cannot_be_made(size: int, forced: tuple[int, ...]) -> None:
    with pytest.raises(VocabError):
        DraftVocab.from_counts(np.ones(10, np.int64), size, forced)


def test_two_halves_of_different_vocabularies() -> None:
    with pytest.raises(VocabError, match="not the same ones"):
        DraftVocab.from_tensors(DraftVocab(np.array([1, 2]), 5).d2t, DraftVocab(np.array([1, 3]), 5).t2d, 5)


@pytest.mark.parametrize("content", [None, b"", b"not safetensors"])
def test_a_file_that_is_none(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "vocab.safetensors"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(VocabError, match="does not exist" if content is None else "is not a draft vocabulary"):
        DraftVocab.load(file)


MASK = np.array([True, False, True])


@pytest.mark.parametrize(
    "tensors",
    [
        {"d2t": np.array([0.0, 1.0], np.float32), "t2d": MASK},
        {"d2t": np.array([[0], [1]]), "t2d": MASK},
        {"d2t": np.array([0, 1]), "t2d": MASK.astype(np.float32)},
        {"d2t": np.array([0, 1]), "t2d": MASK[None]},
        {"d2t": np.array([0, 1], np.uint16), "t2d": MASK},
        {"d2t": np.array([0, 1])},
        {"t2d": MASK},
    ],
)
def test_tensors_that_are_none(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    write_tensors(tmp_path / "vocab.safetensors", tensors)
    with pytest.raises(VocabError, match="is not a draft vocabulary"):
        DraftVocab.load(tmp_path / "vocab.safetensors")


@pytest.mark.parametrize("kind", [np.uint16, np.float16, np.float32])
@pytest.mark.parametrize("of_map", [np.int64, np.int32])
def test_a_map_beside_weights(tmp_path: Path, kind: type, of_map: type) -> None:
    """A drafter's own file, bf16 (uint16) among others, which safetensors' numpy reader does not know."""
    vocab = DraftVocab(np.array([0, 2]), 3)
    tensors = {"lm_head.weight": np.ones((2, 4), kind), "d2t": vocab.d2t.astype(of_map), "t2d": vocab.t2d}
    write_tensors(tmp_path / "model.safetensors", tensors)
    assert DraftVocab.load(tmp_path / "model.safetensors").hash == vocab.hash


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 20}))
    special = [{"id": 0, "special": True}, {"id": 19, "special": True}, {"id": 5, "special": False}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": special}))
    return folder


def conversations(file: Path, *answers: list[int], past: int = 0) -> str:
    rows = ({"messages": [], "input_ids": [1, 1, 1], "output_ids": ids, "meta": {"past": past}} for ids in answers)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_the_command_counts_answers_alone(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = conversations(tmp_path / "train.jsonl", [7, 7, 8, 3, 3], [7, 4, 3, 2], past=1)
    held = conversations(tmp_path / "held.jsonl", [7, 8, 9, 9])
    out = tmp_path / "vocab.safetensors"
    command = ["vocab", "--conversations", train, "--target", str(target), "--size", "5", "--out", str(out)]
    assert main([*command, "--held-out", held, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    counts = Counter([7, 7, 8, 3, 7, 4, 3])
    vocab = DraftVocab.load(out)
    assert vocab.target_ids.tolist() == [0, 3, 4, 7, 19]
    assert found["vocab_hash"] == vocab.hash
    assert (found["counted_tokens"], found["distinct_tokens"], found["never_seen_rows"]) == (7, len(counts), 2)
    assert found["coverage"] == pytest.approx(6 / 7)
    assert found["held_out_coverage"] == 0.25


@pytest.mark.parametrize(
    ("answer", "reason"), [([25], "has the token 25, but the target has 20"), ([], "has no output_ids")]
)
def test_answers_that_cannot_be_counted(
    target: Path, tmp_path: Path, answer: list[int], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train, out = conversations(tmp_path / "train.jsonl", answer), tmp_path / "vocab.safetensors"
    command = ["vocab", "--conversations", train, "--target", str(target), "--size", "5", "--out", str(out)]
    assert main(command) == 1
    assert reason in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("content", ["", "\n \n"])
@pytest.mark.parametrize("empty", ["train", "held"])
def test_a_file_without_a_conversation(
    target: Path, tmp_path: Path, content: str, empty: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: conversations(tmp_path / f"{name}.jsonl", [7, 8]) for name in ("train", "held")}
    Path(files[empty]).write_text(content)
    out = tmp_path / "vocab.safetensors"
    command = ["vocab", "--conversations", files["train"], "--held-out", files["held"], "--target", str(target)]
    assert main([*command, "--size", "5", "--out", str(out)]) == 1
    shown = capsys.readouterr()
    assert f"{files[empty]} holds no conversation" in shown.err and shown.err.count("\n") == 1
    assert not out.exists() and shown.out == ""


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [None, "{", "[]", "3", "[" * 100_000, '{"vocab_size": [], "added_tokens": [1]}'])
def test_a_target_that_is_none(
    target: Path, tmp_path: Path, name: str, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    (target / name).unlink()
    if content is None:
        (target / name).mkdir()
    else:
        (target / name).write_text(content)
    train, out = conversations(tmp_path / "train.jsonl", [7]), tmp_path / "vocab.safetensors"
    command = ["vocab", "--conversations", train, "--target", str(target), "--size", "5", "--out", str(out)]
    assert main(command) == 1
    shown = capsys.readouterr().err
    assert str(target / name) in shown and shown.count("\n") == 1


def test_a_vocabulary_that_cannot_be_written(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = conversations(tmp_path / "train.jsonl", [7])
    (tmp_path / "folder").mkdir()
    for out in (tmp_path / "missing" / "vocab.safetensors", tmp_path / "folder"):
        command = ["vocab", "--conversations", train, "--target", str(target), "--size", "5", "--out", str(out)]
        assert main(command) == 1
        assert f"{out} cannot be written" in capsys.readouterr().err
