"""Checks of the numbers themselves: NaN, infinities and rows of zeros. Reads every weight once, a few MB at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafter.checkpoint import shapes
from drafter.checkpoint.findings import Finding, error, warning
from drafter.checkpoint.folder import TensorInfo
from drafter.checkpoint.subject import Subject

CHUNK_BYTES = 8 * 1024 * 1024
# dtype: (the unsigned integer of its width, the bits of its exponent, all but the sign)
BITS: dict[str, tuple[type[np.unsignedinteger[Any]], int, int]] = {
    "BF16": (np.uint16, 0x7F80, 0x7FFF),
    "F16": (np.uint16, 0x7C00, 0x7FFF),
    "F32": (np.uint32, 0x7F800000, 0x7FFFFFFF),
}


@dataclass(frozen=True)
class Scan:
    """What a tensor holds: rows with a NaN or an infinity, rows of zeros, and how many rows there are."""

    rows: int
    not_finite: NDArray[np.int64]
    zero: NDArray[np.int64]


def finite(subject: Subject) -> Iterator[Finding]:
    """A NaN spreads to every logit, and argmax of NaN is the first token: nothing fails, nothing is accepted."""
    for name, scan in _scans(subject):
        if len(scan.not_finite):
            yield error(
                f"drafter {subject.folder.path}: {name} has NaN or infinity in {len(scan.not_finite):,} of "
                f"{scan.rows:,} rows (first row {scan.not_finite[0]})",
                "finite weights",
                "go back to a checkpoint from before the training run diverged, or copy the file again",
            )


def zero_rows(subject: Subject) -> Iterator[Finding]:
    """A tensor of zeros was never loaded or trained; single rows of zeros are seldom meant."""
    for name, scan in _scans(subject):
        if scan.rows and len(scan.zero) == scan.rows:
            yield error(
                f"drafter {subject.folder.path}: {name} is all zero", "trained weights", "export the drafter again"
            )
        elif len(scan.zero):
            yield warning(
                f"drafter {subject.folder.path}: {name} has {len(scan.zero):,} of {scan.rows:,} rows of zeros (first "
                f"row {scan.zero[0]})",
                "trained rows",
                "export the drafter again if nobody pruned it",
            )


@lru_cache(maxsize=256)  # two checks ask for each tensor; what is kept is small
def scan_tensor(file: Path, tensor: TensorInfo, identity: str) -> Scan:
    """Look at every number of a float tensor. A vector counts as one row. `identity`: the folder's hash."""
    kind, exponent, magnitude = BITS[tensor.dtype]
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    width = (tensor.end - tensor.begin) // max(rows, 1)
    step = max(1, CHUNK_BYTES // max(width, 1))
    bad: list[NDArray[np.int64]] = []
    zero: list[NDArray[np.int64]] = []
    if tensor.end > tensor.begin:
        with file.open("rb") as stream:
            stream.seek(tensor.begin)
            for start in range(0, rows, step):
                count = min(step, rows - start)
                block = np.frombuffer(stream.read(count * width), kind).reshape(count, -1)
                bad.append(start + np.flatnonzero(((block & kind(exponent)) == exponent).any(1)))
                zero.append(start + np.flatnonzero(~(block & kind(magnitude)).any(1)))
    empty = np.zeros(0, np.int64)
    return Scan(rows, np.concatenate([empty, *bad]), np.concatenate([empty, *zero]))


def _scans(subject: Subject) -> Iterator[tuple[str, Scan]]:
    """Each float weight that SGLang loads and keeps."""
    expected = shapes.expected_shapes(subject.config)
    for name, tensor in subject.folder.tensors.items():
        if shapes.canonical_name(name, subject.folder.architecture) in expected and tensor.dtype in BITS:
            yield name, scan_tensor(subject.folder.path / tensor.file, tensor, subject.folder.sha256)
