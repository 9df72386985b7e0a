"""Safetensors files as numpy arrays over a memory map, bfloat16 as the uint16 of its bits.

safetensors' own numpy reader knows no bfloat16, and torch must not be needed to look at a file.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drafter.data.tensorwriter import Part, write_parts

CHUNK_BYTES = 8 * 1024 * 1024  # read or written at once where a tensor passes through
MAX_HEADER_BYTES = 100 * 1024 * 1024  # safetensors' own limit
NUMPY_TYPES: dict[str, type] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": np.uint16,
    "F32": np.float32,
}
SAFETENSORS_TYPES = {np.dtype(kind): name for name, kind in NUMPY_TYPES.items()}


class TensorFileError(ValueError):
    """A file that is not safetensors, or not whole."""


def map_tensors(file: Path, only: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """The tensors of a file, or those named in `only`, by memory map: nothing is read before it is looked at.

    Raises TensorFileError where the file is missing, cut short, not safetensors, or has a type not in NUMPY_TYPES.
    """
    header, data_U = _open(file)
    tensors = {}
    for name, entry in header.items():
        if only is not None and name not in only:
            continue
        dtype, (begin, end) = NUMPY_TYPES.get(entry["dtype"]), entry["data_offsets"]
        if dtype is None:
            raise TensorFileError(
                f"{file}: {name} has type {entry['dtype']}, expected one of {', '.join(NUMPY_TYPES)}."
            )
        try:
            tensors[name] = data_U[begin:end].view(dtype).reshape(entry["shape"])
        except ValueError:
            raise TensorFileError(
                f"{file}: {name} is {entry['dtype']} {entry['shape']} in {end - begin} bytes, which do not fit: "
                "the file is damaged, make it again."
            ) from None
    return tensors


def plain_bytes(file: Path) -> bytes:
    """What a file of a model's folder holds. Raises OSError, also for a pipe or a device, which may never end."""
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "it is no plain file", str(file))
    return file.read_bytes()


def tensor_names(file: Path) -> list[str]:
    """The names of a file's tensors. Raises TensorFileError."""
    return list(_open(file)[0])


@dataclass(frozen=True)
class Span:
    """Where one tensor lies: `nbytes` of `file` from byte `begin`. dtype: safetensors' name (F32, BF16, I64, ...)."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


def tensor_spans(file: Path) -> dict[str, Span]:
    """Every tensor of a file by name, in the order in which they lie there. Raises TensorFileError."""
    header, _, start = _read_header(file)
    spans = {}
    for name, entry in sorted(header.items(), key=lambda named: named[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        spans[name] = Span(file, name, entry["dtype"], tuple(entry["shape"]), start + begin, end - begin)
    return spans


def file_metadata(file: Path) -> dict[str, str]:
    """The free text of a file's header. Raises TensorFileError."""
    return _read_header(file)[1]


def span_chunks(span: Span) -> Iterator[memoryview]:
    """A tensor's bytes as they lie in the file, whatever its type, through one buffer of CHUNK_BYTES."""
    buffer = memoryview(bytearray(min(CHUNK_BYTES, span.nbytes)))
    with span.file.open("rb", buffering=0) as stream:
        stream.seek(span.begin)
        left = span.nbytes
        while left:
            count = stream.readinto(buffer[: min(len(buffer), left)])
            if not count:
                raise TensorFileError(f"{span.file} became shorter while it was read.")
            left -= count
            yield buffer[:count]


def span_part(span: Span) -> Part:
    """A tensor as it lies in another file."""
    return Part(span.name, span.dtype, span.shape, span.nbytes, lambda: span_chunks(span), (span.file, span.begin))


def write_tensors(file: Path, tensors: Mapping[str, np.ndarray]) -> str:
    """Write a file beside its place, sync it and rename it; uint16 is written as bfloat16. Returns its sha256.

    Raises OSError (a full disk, say); then nothing is left behind.
    """
    # The widest type first keeps every tensor aligned, as safetensors does it.
    ordered = sorted(tensors.items(), key=lambda named: (-named[1].itemsize, named[0]))
    return write_parts(file, [array_part(name, tensor) for name, tensor in ordered])


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bfloat16, ties to even, as uint16. What is not finite fails an assertion."""
    assert np.isfinite(x).all(), "a weight is not finite"
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_float32(x: np.ndarray) -> np.ndarray:
    """float32 of a tensor as `map_tensors` gives it, in which uint16 is bfloat16."""
    if x.dtype == np.uint16:
        bits = x.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return x.astype(np.float32, copy=False)


def array_part(name: str, tensor: np.ndarray) -> Part:
    """A tensor that is in memory; uint16 is bfloat16."""
    whole = np.ascontiguousarray(tensor)
    return Part(name, SAFETENSORS_TYPES[whole.dtype], tensor.shape, whole.nbytes, lambda: [whole.data])


def _open(file: Path) -> tuple[dict[str, Any], np.ndarray]:
    """The header (without metadata), and the bytes after it."""
    header, _, start = _read_header(file)
    if start == file.stat().st_size:
        return header, np.zeros(0, np.uint8)
    return header, np.memmap(file, np.uint8, "r", offset=start)


def _read_header(file: Path) -> tuple[dict[str, Any], dict[str, str], int]:
    """The header's tensors, its metadata, and where the data begin; the file is as long as it says."""
    if file.exists() and not file.is_file():
        raise TensorFileError(f"{file} is no plain file: copy the file there.")
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            raw = stream.read(length) if 8 < length + 8 <= min(size, MAX_HEADER_BYTES) else b""
    except FileNotFoundError:
        raise TensorFileError(f"{file} is missing.") from None
    except OSError as error:
        raise TensorFileError(f"{file} cannot be read ({error.strerror}).") from None
    if not raw:
        raise TensorFileError(f"{file} has {size} bytes and is not safetensors, or is cut short: make it again.")
    try:
        header = json.loads(raw)
        metadata = {str(key): str(value) for key, value in (header.pop("__metadata__", None) or {}).items()}
        ends = [_checked_end(entry) for entry in header.values()]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise TensorFileError(f"{file} has a broken safetensors header ({error!s:.200}): make it again.") from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise TensorFileError(f"{file} has {size} bytes, its header says {expected}: it is cut short, make it again.")
    return header, metadata, 8 + length


def _checked_end(entry: dict[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    if not all(type(size) is int and size >= 0 for size in (begin, end, *entry["shape"])):
        raise ValueError(f"{entry} is no tensor")
    if begin > end or not isinstance(entry["dtype"], str):
        raise ValueError(f"{entry} is no tensor")
    return int(end)
