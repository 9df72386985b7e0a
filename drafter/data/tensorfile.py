"""Safetensors files as numpy arrays over a memory map, bfloat16 as the uint16 of its bits.

safetensors' own numpy reader knows no bfloat16, and torch must not be needed to look at a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

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


def tensor_names(file: Path) -> list[str]:
    """The names of a file's tensors. Raises TensorFileError."""
    return list(_open(file)[0])


def tensor_bytes(file: Path, name: str) -> memoryview:
    """One tensor's bytes as they lie in the file, whatever its type. Raises TensorFileError."""
    header, data_U = _open(file)
    begin, end = header[name]["data_offsets"]
    return data_U[begin:end].data


def write_tensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a file beside its place, sync it and rename it; uint16 is written as bfloat16.

    Raises OSError (a full disk, say); then nothing is left behind.
    """
    # The widest type first keeps every tensor aligned, as safetensors does it.
    whole = sorted(
        ((name, np.ascontiguousarray(tensor)) for name, tensor in tensors.items()),
        key=lambda named: (-named[1].itemsize, named[0]),
    )
    header, at = {}, 0
    for name, tensor in whole:
        header[name] = {
            "dtype": SAFETENSORS_TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    beside = file.with_name(file.name + ".tmp")
    try:
        with beside.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for _, tensor in whole:
                stream.write(tensor.data)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(file)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder as lasting as the files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open(file: Path) -> tuple[dict[str, Any], np.ndarray]:
    """The header (without metadata), and the bytes after it."""
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
        header.pop("__metadata__", None)
        ends = [_checked_end(entry) for entry in header.values()]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise TensorFileError(f"{file} has a broken safetensors header ({error}): make it again.") from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise TensorFileError(f"{file} has {size} bytes, its header says {expected}: it is cut short, make it again.")
    if expected == 8 + length:
        return header, np.zeros(0, np.uint8)
    return header, np.memmap(file, np.uint8, "r", offset=8 + length)


def _checked_end(entry: dict[str, Any]) -> int:
    begin, end = (int(offset) for offset in entry["data_offsets"])
    shape = [int(size) for size in entry["shape"]]
    if not 0 <= begin <= end or any(size < 0 for size in shape) or not isinstance(entry["dtype"], str):
        raise ValueError(f"{entry} is no tensor")
    return end
