"""Write a drafter folder: config.json and model.safetensors as SGLang reads them, and eyas.json, which says whence."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from drafter.checkpoint.folder import DrafterError
from drafter.report import file_sha256

MANIFEST = "eyas.json"
SAFETENSORS = {"float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "bool": "BOOL"}


@dataclass(frozen=True)
class Bf16:
    """bf16 numbers, which numpy has no name for: the same bits as uint16."""

    bits: np.ndarray


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


def to_bf16(x: np.ndarray) -> Bf16:
    """float32 rounded to the nearest bf16, ties to even. NaN and infinities are refused by an assertion."""
    assert np.isfinite(x).all(), "a weight is not finite"
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return Bf16(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))


def write_tensors(file: Path, tensors: dict[str, np.ndarray | Bf16]) -> None:
    """A safetensors file (8 bytes of length, a JSON header, the data), written beside and renamed."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        array = tensor.bits if isinstance(tensor, Bf16) else tensor
        dtype = "BF16" if isinstance(tensor, Bf16) else SAFETENSORS[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (math.ceil(len(raw) / 8) * 8 - len(raw))  # data starts at a multiple of eight
    beside = file.with_name(file.name + ".tmp")
    with beside.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors.values():
            stream.write(np.ascontiguousarray(tensor.bits if isinstance(tensor, Bf16) else tensor).tobytes())
    beside.replace(file)


def write_folder(
    folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray | Bf16], manifest: Manifest
) -> None:
    """A new drafter folder, complete or not there at all. Raises DrafterError where `folder` exists already."""
    if folder.exists():
        raise DrafterError(f"{folder} exists already: name another folder, or remove it first.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(folder.name + ".tmp")
    beside.mkdir(exist_ok=True)
    write_tensors(beside / "model.safetensors", tensors)
    (beside / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    whole = {
        "format": 1,
        "name": manifest.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "sha256": {name: file_sha256(beside / name) for name in ("config.json", "model.safetensors")},
        "vocab_hash": manifest.vocab_hash,
        "target": manifest.target,
        "capture": manifest.capture,
        "origin": manifest.origin,
        "training": manifest.training,
        "reports": [],
        "state": "candidate",
    }
    (beside / MANIFEST).write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    beside.rename(folder)


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
