"""Write a drafter folder: config.json and model.safetensors as SGLang reads them, and eyas.json, which says whence."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from drafter.checkpoint.folder import DrafterError
from drafter.data.tensorfile import array_part, plain_bytes
from drafter.data.tensorwriter import sync_folder, write_parts
from drafter.report import file_sha256

MANIFEST = "eyas.json"


@dataclass(frozen=True)
class Manifest:
    """eyas.json without what `write_folder` finds out itself (the date and the hashes of the files).

    target: {name, config_sha256, tokenizer_sha256, lm_head_sha256}; capture: {layer_ids, convention}; origin: {kind,
    parent, command, data_hash, git}; training: whatever says how it was trained.
    """

    name: str
    vocab_hash: str
    target: dict[str, Any]
    capture: dict[str, Any]
    origin: dict[str, Any]
    training: dict[str, Any]


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], manifest: Manifest) -> None:
    """A new drafter folder, complete or not there at all; uint16 is bfloat16.

    Raises DrafterError where `folder` exists already.
    """
    parts = [array_part(name, tensor) for name, tensor in tensors.items()]
    with new_folder(folder) as beside:
        (beside / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
        write_manifest(beside, manifest, write_parts(beside / "model.safetensors", parts, {"format": "pt"}))


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `folder` when the block ends and is removed when it fails or is interrupted.

    It lies beside `folder` as .NAME.tmp, and is locked: what a killed process left there is removed, what another
    process is filling is not. Raises DrafterError where `folder` exists already, or is being written.
    """
    if folder.name == ".." or os.path.lexists(folder):  # a link that leads nowhere is in the way too
        raise DrafterError(f"{folder} exists already: name another folder, or remove it first.")
    made = [parent for parent in folder.absolute().parents if not parent.exists()]
    beside = folder.with_name(f".{folder.name}.tmp")
    lock, ours = None, False
    try:
        beside.mkdir(parents=True, exist_ok=True)
        lock = os.open(beside, os.O_RDONLY)
        _take(lock, folder, beside)
        ours = True
        for left in beside.iterdir():
            left.unlink()
        yield beside
        beside.rename(folder)
    except BaseException:
        if ours:
            shutil.rmtree(beside, ignore_errors=True)
        for empty in (beside, *made):
            with suppress(OSError):
                empty.rmdir()
        raise
    finally:
        if lock is not None:
            os.close(lock)
    sync_folder(folder.parent)


def _take(lock: int, folder: Path, beside: Path) -> None:
    """Raises DrafterError where another process fills the folder, or has just finished it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = not beside.exists() or beside.stat().st_ino != os.fstat(lock).st_ino
    except BlockingIOError:
        taken = True
    except OSError:  # a file system without locks: Lustre, some NFS
        taken = False
    if taken:
        raise DrafterError(f"{folder} is being written by another process: wait for it, or name another.")


@contextmanager
def stopped_as_interrupted() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that is closed, clean up as Ctrl-C does; one that is ignored stays so."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    mine = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in mine:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, before[number])


def write_manifest(folder: Path, manifest: Manifest, weights_sha256: str) -> None:
    """eyas.json beside config.json and model.safetensors, whose hash is known from writing it."""
    whole = {
        "format": 1,
        "name": manifest.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "sha256": {"config.json": file_sha256(folder / "config.json"), "model.safetensors": weights_sha256},
        "vocab_hash": manifest.vocab_hash,
        "target": manifest.target,
        "capture": manifest.capture,
        "origin": manifest.origin,
        "training": manifest.training,
        "reports": [],
        "state": "candidate",
    }
    (folder / MANIFEST).write_text(json.dumps(whole, indent=1) + "\n", "utf-8")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """eyas.json of a drafter folder; None for a foreign one, which has none. Raises DrafterError where it is broken."""
    try:
        found = json.loads(plain_bytes(folder / MANIFEST))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise DrafterError(f"{folder / MANIFEST} is not JSON ({error}): copy it again, or remove it.") from None
    if not isinstance(found, dict) or found.get("format") != 1:
        raise DrafterError(f"{folder / MANIFEST} is not a drafter manifest of format 1: use the version that wrote it.")
    return found
