"""Write a safetensors file part by part, so that one larger than memory passes through a few megabytes of it.

8 bytes of length, a JSON header padded to a multiple of eight, the tensors one after another in the order given.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SYNC_BYTES = 256 * 1024 * 1024  # the disk is set to work this often: not all of a large file waits for the end


@dataclass(frozen=True)
class Part:
    """One tensor to write. dtype: safetensors' name. chunks: its bytes in order, `nbytes` in all.

    A chunk may be used again for the next one: it is written and hashed before that is asked for.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunks: Callable[[], Iterable[memoryview]]


def write_parts(
    file: Path,
    parts: Sequence[Part],
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int], object] = int,
) -> str:
    """Write a file beside its place, sync it and rename it; returns its sha256. `progress` gets each chunk's bytes.

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
    digest = hashlib.sha256(head)
    beside = file.with_name(file.name + ".tmp")
    try:
        with beside.open("wb") as stream, ThreadPoolExecutor(1) as hasher, ThreadPoolExecutor(1) as syncer:
            stream.write(head)
            unsynced = 0
            for part in parts:
                begun = stream.tell()
                for chunk in part.chunks():
                    hashed = hasher.submit(digest.update, chunk)
                    count = stream.write(chunk)
                    hashed.result()
                    progress(count)
                    unsynced += count
                    if unsynced >= SYNC_BYTES:
                        syncer.submit(os.fdatasync, stream.fileno())
                        unsynced = 0
                assert stream.tell() - begun == part.nbytes, f"{part.name} gave another number of bytes"
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(file)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder as lasting as the files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
