"""Write a safetensors file part by part, so that one larger than memory passes through a few megabytes of it.

8 bytes of length, a JSON header padded to a multiple of eight, the tensors one after another in the order given.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

SYNC_BYTES = 256 * 1024 * 1024  # the disk is set to work this often: not all of a large file waits for the end
PASSED_BYTES = 16 * 1024 * 1024  # copied at once by the kernel
HASHED_BYTES = 128 * 1024  # read at once to be hashed: what a core's own cache holds is read at twice the speed
# What kernels and file systems say that cannot copy from file to file.
CANNOT_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


@dataclass(frozen=True)
class Part:
    """One tensor to write. dtype: safetensors' name. chunks: its bytes in order, `nbytes` in all.

    A chunk may be used again for the next one: it is written and hashed before that is asked for. lies: a file and the
    byte in it from which the very same bytes lie there, where they do; the kernel copies them then.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunks: Callable[[], Iterable[memoryview]]
    lies: tuple[Path, int] | None = None


def write_parts(
    file: Path,
    parts: Sequence[Part],
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int], object] = int,
) -> str:
    """Write a file beside its place, sync it and rename it; returns its sha256. `progress` gets each piece's bytes.

    Raises OSError (a full disk, say), and what a part's chunks raise; then nothing is left behind.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for part in parts:
        header[part.name] = {
            "dtype": part.dtype,
            "shape": list(part.shape),
            "data_offsets": [at, at + part.nbytes],
        }
        at += part.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    beside = file.with_name(file.name + ".tmp")
    try:
        with beside.open("wb", buffering=0) as stream, ThreadPoolExecutor(1) as hasher, ThreadPoolExecutor(1) as syncer:
            stream.write(head)
            writing = _Writing(stream.fileno(), hashlib.sha256(head), hasher, syncer, progress)
            for part in parts:
                begun = stream.tell()
                if part.lies is None or not writing.passed(*part.lies, part.nbytes):
                    for chunk in part.chunks():
                        writing.write(chunk)
                assert stream.tell() - begun == part.nbytes, f"{part.name} gave another number of bytes"
            found = writing.sha256()
            os.fsync(stream.fileno())
        beside.replace(file)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)
    return found


class _Writing:
    """A file that grows, hashed by another thread in the order in which it does, and synced by a third."""

    def __init__(
        self,
        descriptor: int,
        digest: Hash,
        hasher: ThreadPoolExecutor,
        syncer: ThreadPoolExecutor,
        progress: Callable[[int], object],
    ) -> None:
        self._descriptor, self._digest, self._progress = descriptor, digest, progress
        self._hasher, self._syncer = hasher, syncer
        self._passed: list[Future[None]] = []  # what is hashed after it was copied
        self._unsynced = 0

    def write(self, chunk: memoryview) -> None:
        """Write it; it has been hashed when this returns."""
        hashed = self._hasher.submit(self._digest.update, chunk)
        left = chunk.cast("B") if chunk.nbytes else b""
        while left:
            left = left[os.write(self._descriptor, left) :]
        hashed.result()
        self._count(chunk.nbytes)

    def passed(self, source: Path, begin: int, count: int) -> bool:
        """Let the kernel copy bytes of another file. False where it cannot, and then nothing is written."""
        with source.open("rb", buffering=0) as stream:
            at, end = begin, begin + count
            while at < end:
                try:
                    size = os.copy_file_range(stream.fileno(), self._descriptor, min(PASSED_BYTES, end - at), at)
                except OSError as error:
                    if at == begin and error.errno in CANNOT_COPY:
                        return False
                    raise
                if size == 0:
                    raise OSError(errno.EIO, "it became shorter while it was read", str(source))
                self._count(size)
                at += size
        self._passed.append(self._hasher.submit(hash_range, self._digest, source, begin, count))
        return True

    def sha256(self) -> str:
        """Of all that was written."""
        for hashed in self._passed:
            hashed.result()
        return self._digest.hexdigest()

    def _count(self, size: int) -> None:
        self._progress(size)
        self._unsynced += size
        if self._unsynced >= SYNC_BYTES:
            self._syncer.submit(os.fdatasync, self._descriptor)
            self._unsynced = 0


def hash_range(digest: Hash, file: Path, begin: int, count: int) -> None:
    """Update a digest with `count` bytes of a file from byte `begin`. Raises OSError where they are not there."""
    buffer = memoryview(bytearray(min(HASHED_BYTES, count)))
    with file.open("rb", buffering=0) as stream:
        stream.seek(begin)
        while count:
            size = stream.readinto(buffer[: min(len(buffer), count)])
            if not size:
                raise OSError(errno.EIO, "it became shorter while it was read", str(file))
            digest.update(buffer[:size])
            count -= size


def sync_folder(folder: Path) -> None:
    """Make the names in a folder as lasting as the files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
