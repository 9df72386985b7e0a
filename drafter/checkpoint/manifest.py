"""Write a drafter folder: config.json and model.safetensors as SGLang reads them, and eyas.json, which says whence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from drafter.checkpoint.folder import DrafterError
from drafter.data.tensorfile import array_part
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

    Raises DrafterError where `folder` exists already.
    """
    if folder.exists():
        raise DrafterError(f"{folder} exists already: name another folder, or remove it first.")
    made = [parent for parent in folder.absolute().parents if not parent.exists()]
    beside = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(beside, ignore_errors=True)  # left by a process that was killed
    try:
        beside.mkdir(parents=True)
        yield beside
        beside.rename(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise
    sync_folder(folder.parent)


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
        found = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise DrafterError(f"{folder / MANIFEST} is not JSON ({error}): copy it again, or remove it.") from None
    if not isinstance(found, dict) or found.get("format") != 1:
        raise DrafterError(f"{folder / MANIFEST} is not a drafter manifest of format 1: use the version that wrote it.")
    return found
