"""Rows of a matrix in a safetensors file, read by number and nothing else: a head of 2.3 GB costs a few megabytes."""

from __future__ import annotations

import os
from types import TracebackType

import numpy as np

from drafter.checkpoint.vocab import Ids
from drafter.data.tensorfile import NUMPY_TYPES, Span, TensorFileError, to_bf16, to_float32

FLOATS = ("BF16", "F16", "F32")
CHUNK_BYTES = 1024 * 1024  # of rows at a time: larger arrays are given back to the system after each use, and cost more


class Rows:
    """A float matrix [R, H] in a file, opened for reading; a context manager."""

    def __init__(self, span: Span) -> None:
        """Raises TensorFileError where it is no matrix of FLOATS (a quantised head, say)."""
        if span.dtype not in FLOATS or len(span.shape) != 2:
            raise TensorFileError(
                f"{span.file}: {span.name} is {span.dtype} {list(span.shape)}, expected a matrix of "
                f"{', '.join(FLOATS)}: name an unquantised checkpoint."
            )
        self.span = span
        self.count, self.width = span.shape
        self.dtype = np.dtype(NUMPY_TYPES[span.dtype])
        self.row_bytes = self.width * self.dtype.itemsize
        if self.count * self.row_bytes != span.nbytes:
            raise TensorFileError(
                f"{span.file}: {span.name} is {span.dtype} {list(span.shape)} in {span.nbytes} bytes, which do not "
                "fit: the file is damaged, make it again."
            )
        self._descriptor = os.open(span.file, os.O_RDONLY)

    def __enter__(self) -> Rows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    @property
    def chunk(self) -> int:
        """Rows that make CHUNK_BYTES."""
        return max(1, CHUNK_BYTES // max(1, self.row_bytes))

    def read(self, numbers: Ids) -> np.ndarray:
        """The rows of these numbers, [R, H] in the file's own type (uint16 is bfloat16)."""
        found = np.empty((len(numbers), self.width), self.dtype)
        if not found.size:
            return found
        view = found.reshape(-1).view(np.uint8).data
        begins = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)  # of runs that lie side by side
        for begin, end in zip(begins, [*begins[1:], len(numbers)], strict=True):
            at = self.span.begin + int(numbers[begin]) * self.row_bytes
            self._fill(view[int(begin) * self.row_bytes : int(end) * self.row_bytes], at)
        return found

    def read_float32(self, numbers: Ids) -> np.ndarray:
        """The same as float32."""
        return to_float32(self.read(numbers))

    def _fill(self, view: memoryview, at: int) -> None:
        while view:
            count = os.preadv(self._descriptor, [view], at)
            if not count:
                raise TensorFileError(f"{self.span.file} became shorter while it was read.")
            view, at = view[count:], at + count


def from_float32(x_RH: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Finite float32 rounded to a matrix's own type: the other way of `to_float32`.

    Raises TensorFileError where a number is beyond that type.
    """
    with np.errstate(over="ignore"):
        found = to_bf16(x_RH) if dtype == np.uint16 else x_RH.astype(dtype)
    if not np.isfinite(to_float32(found)).all():
        kind = "BF16" if dtype == np.uint16 else dtype.name
        raise TensorFileError(
            f"rows that are made reach {np.abs(x_RH).max():.3g}, beyond {kind}, the type of the matrix: give a "
            "drafter in bf16 or fp32, or another --init."
        )
    return found
