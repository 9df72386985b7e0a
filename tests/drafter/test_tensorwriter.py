"""Files are written part by part as safetensors writes them, whole or not at all; rows are read by number alone."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from drafter.checkpoint.rows import Rows
from drafter.data import tensorwriter
from drafter.data.tensorfile import (
    Span,
    TensorFileError,
    array_part,
    file_metadata,
    span_chunks,
    span_part,
    tensor_spans,
    write_tensors,
)
from drafter.data.tensorwriter import CANNOT_COPY, Part, write_parts


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "d2t": rng.integers(0, 9, 5),
        "a": rng.standard_normal((3, 4)).astype(np.float32),
        "é": rng.standard_normal((2, 3)).astype(np.float16),
        "t2d": np.array([True, False, True]),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(3.0, np.float32),
    }


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "vocab_hash": "é"}])
@pytest.mark.parametrize("sync_bytes", [1, 1 << 30])
def test_a_file_is_what_safetensors_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: dict[str, str] | None, sync_bytes: int
) -> None:
    monkeypatch.setattr(tensorwriter, "SYNC_BYTES", sync_bytes)
    file, seen = tmp_path / "a.safetensors", []
    wanted = tensors()
    digest = write_parts(file, [array_part(name, x) for name, x in wanted.items()], metadata, seen.append)
    assert digest == hashlib.sha256(file.read_bytes()).hexdigest()
    found = load_file(file)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert np.array_equal(found[name], tensor) and found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert b"".join(span_chunks(tensor_spans(file)[name])) == tensor.tobytes()
    assert list(tensor_spans(file)) == list(wanted) and file_metadata(file) == (metadata or {})
    assert sum(seen) == sum(x.nbytes for x in wanted.values())


def test_the_same_bytes_as_safetensors_itself(tmp_path: Path) -> None:
    chosen = {name: tensors()[name] for name in ("d2t", "a", "t2d")}
    save_file(chosen, tmp_path / "theirs", metadata={"format": "pt"})
    spans = tensor_spans(tmp_path / "theirs")
    write_parts(tmp_path / "ours", [array_part(name, chosen[name]) for name in spans], {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("refusal", [None, *CANNOT_COPY])
def test_what_lies_in_another_file_is_copied_by_the_kernel_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int | None
) -> None:
    monkeypatch.setattr(tensorwriter, "PASSED_BYTES", 7)
    monkeypatch.setattr(tensorwriter, "HASHED_BYTES", 5)
    monkeypatch.setattr(tensorwriter, "SYNC_BYTES", 20)
    write_parts(tmp_path / "source", [array_part(name, x) for name, x in tensors().items()])
    spans, copied = tensor_spans(tmp_path / "source"), []

    def copy(*args: int) -> int:
        if refusal is not None:
            raise OSError(refusal, "as some file systems do")
        copied.append(real(*args))
        return copied[-1]

    real = os.copy_file_range
    monkeypatch.setattr(os, "copy_file_range", copy)
    seen: list[int] = []
    parts = [span_part(spans["a"]), array_part("new", np.arange(5)), span_part(spans["é"]), span_part(spans["empty"])]
    digest = write_parts(tmp_path / "out", parts, None, seen.append)
    assert digest == hashlib.sha256((tmp_path / "out").read_bytes()).hexdigest()
    found = load_file(tmp_path / "out")
    for name in ("a", "é", "empty"):
        assert np.array_equal(found[name], tensors()[name])
    assert np.array_equal(found["new"], np.arange(5)) and sum(seen) == 48 + 40 + 12
    assert sum(copied) == (0 if refusal else 60)


@pytest.mark.parametrize("when", ["before it is copied", "before it is hashed"])
def test_a_file_that_shrinks_while_it_is_copied_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    source = tmp_path / "source"
    write_tensors(source, {"m": np.ones((400, 20), np.float32)})
    part = span_part(tensor_spans(source)["m"])
    if when == "before it is copied":
        os.truncate(source, 1000)
    else:
        real = os.copy_file_range

        def copy(*args: int) -> int:
            copied = real(*args)
            os.truncate(source, 1000)
            return copied

        monkeypatch.setattr(os, "copy_file_range", copy)
    with pytest.raises(OSError, match="became shorter"):
        write_parts(tmp_path / "out", [part])
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("existing", [False, True])
def test_what_fails_in_the_middle_leaves_the_old_file_or_none(
    tmp_path: Path, error: BaseException, existing: bool
) -> None:
    def chunks() -> Iterator[memoryview]:
        yield memoryview(b"1234")
        raise error

    file = tmp_path / "a.safetensors"
    if existing:
        file.write_bytes(b"old")
    with pytest.raises(type(error)):
        write_parts(file, [Part("a", "U8", (8,), 8, chunks)])
    assert [found.read_bytes() for found in tmp_path.iterdir()] == ([b"old"] if existing else [])


def test_a_part_that_gives_another_number_of_bytes_is_a_fault_of_ours(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="another number of bytes"):
        write_parts(tmp_path / "a", [Part("a", "U8", (8,), 8, lambda: [memoryview(b"123")])])
    assert not list(tmp_path.iterdir())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(numbers=st.lists(st.integers(0, 19), max_size=30), half=st.booleans())
def test_rows_by_number(tmp_path: Path, numbers: list[int], half: bool) -> None:
    matrix = np.arange(20 * 3).reshape(20, 3).astype(np.float16 if half else np.float32)
    others = {"a": np.ones(5, np.int64), "z": np.ones(2, np.bool_)}
    write_tensors(tmp_path / "a.safetensors", others | {"m": matrix})
    with Rows(tensor_spans(tmp_path / "a.safetensors")["m"]) as rows:
        found = rows.read(np.array(numbers, dtype=np.int64))
        assert found.dtype == matrix.dtype and np.array_equal(found, matrix[numbers])
        assert rows.read_float32(np.array(numbers, dtype=np.int64)).dtype == np.float32


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    write_tensors(file, {"m": np.ones((4, 2), np.float32)})
    span = tensor_spans(file)["m"]
    with Rows(span) as rows:
        file.write_bytes(file.read_bytes()[:-9])
        assert rows.read(np.array([0])).shape == (1, 2)
        with pytest.raises(TensorFileError, match="became shorter"):
            rows.read(np.array([3]))
    with pytest.raises(TensorFileError, match="became shorter"):
        list(span_chunks(span))


def test_a_matrix_whose_bytes_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(TensorFileError, match="do not fit"):
        Rows(Span(tmp_path / "a", "m", "F32", (4, 2), 0, 31))
