"""Hidden-state shards on disk: what a target computed along a text, read by memory map. Reader alone, for now."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drafter.data.target import target_identity

NUMPY = {"BF16": np.uint16, "F32": np.float32, "I32": np.int32, "I64": np.int64, "BOOL": np.bool_}


class ShardError(ValueError):
    """Shards that cannot be learnt from: says what was found, what was expected and what to do."""


@dataclass(frozen=True)
class Document:
    """One text. Hidden states are uint16 views of bf16, or float32: aux_hidden [T, n_aux * H], final_hidden [T, H]."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    aux_hidden: np.ndarray
    final_hidden: np.ndarray
    name: str


class ShardFolder:
    """Documents of a folder, in the manifest's order."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self._tensors = [open_tensors(path / shard["file"]) for shard in manifest["shards"]]
        self._where = [
            (shard, at) for shard, found in enumerate(self._tensors) for at in range(len(found["doc_offsets"]) - 1)
        ]

    def __len__(self) -> int:
        return len(self._where)

    @property
    def data_hash(self) -> str:
        """sha256 over the shards' hashes."""
        return hashlib.sha256(json.dumps([shard["sha256"] for shard in self.manifest["shards"]]).encode()).hexdigest()

    def document(self, index: int) -> Document:
        """One document, by memory map."""
        shard, at = self._where[index]
        found = self._tensors[shard]
        span = slice(int(found["doc_offsets"][at]), int(found["doc_offsets"][at + 1]))
        return Document(
            input_ids=found["input_ids"][span],
            loss_mask=found["loss_mask"][span],
            aux_hidden=found["aux_hidden"][span],
            final_hidden=found["final_hidden"][span],
            name=f"{self.manifest['shards'][shard]['file']}:{at}",
        )


def open_shards(path: Path) -> ShardFolder:
    """Raises ShardError where there is no manifest."""
    try:
        return ShardFolder(path, json.loads((path / "manifest.json").read_bytes()))
    except FileNotFoundError as error:
        raise ShardError(f"{path} is no shard folder ({error.filename} is missing): capture it first.") from None


def open_tensors(file: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file as memory maps."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return {
        name: np.memmap(file, NUMPY[entry["dtype"]], "r", 8 + length + entry["data_offsets"][0], tuple(entry["shape"]))
        for name, entry in header.items()
    }


def check_target(manifest: dict[str, Any], folder: Path) -> None:
    """Raises ShardError where the shards were captured from another target than the one in `folder`."""
    for key, found in target_identity(folder).items():
        wanted = manifest["target"].get(key)
        if wanted != found:
            raise ShardError(
                f"the shards' target has {key} {wanted}, {folder} has {found}: capture again from this target, or give "
                "the target that the shards came from."
            )
