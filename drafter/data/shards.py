"""Hidden-state shards on disk: what a drafter is trained on, one folder for one target and one choice of layers.

manifest.json lists every shard with its sha256; a shard that it does not list does not exist. A shard is safetensors:
input_ids int32 [T], loss_mask bool [T], aux_hidden [T, n_aux*H], final_hidden [T, H] (after the final norm) and
doc_offsets int64 [D+1], where document i has the rows doc_offsets[i] to doc_offsets[i+1].
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from drafter.data.target import TARGET_HASHES, TargetError, target_identity
from drafter.data.tensorfile import TensorFileError, map_tensors
from drafter.report import file_sha256, ids_sha256

FORMAT = 1
AFTER_NORM = "after_norm"
MANIFEST = "manifest.json"
HIDDEN_TYPES: dict[str, type] = {"bfloat16": np.uint16, "float32": np.float32}
CONVENTIONS = ("output_of_layer", "input_to_layer")
NAME_DIGITS = 32
SAME_TO_JOIN = (*TARGET_HASHES, "layer_ids", "convention", "hidden_size", "dtype", "final_hidden")


class ShardError(ValueError):
    """A shard folder that cannot be read or written: the file, what was found, what to do."""


@dataclass(frozen=True)
class Document:
    """One conversation. Hidden states are memory maps where they were read: uint16 bits of bfloat16, or float32.

    input_ids int32 [T]; loss_mask bool [T]; aux_hidden [T, n_aux*H]; final_hidden [T, H], after the final norm.
    name: `document_name` of the ids.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    aux_hidden: np.ndarray
    final_hidden: np.ndarray
    name: str


@dataclass(frozen=True)
class ShardFolder:
    """A folder of shards, opened by `open_shards`."""

    path: Path
    manifest: dict[str, Any]
    _tensors: list[dict[str, np.ndarray]] = field(repr=False)

    def __len__(self) -> int:
        return int(self._first_documents[-1])

    def document(self, index: int) -> Document:
        """Document `index`, from 0. Raises IndexError past the end."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        shard = int(np.searchsorted(self._first_documents, index, side="right")) - 1
        tensors, within = self._tensors[shard], index - int(self._first_documents[shard])
        begin, end = (int(row) for row in tensors["doc_offsets"][within : within + 2])
        input_ids = tensors["input_ids"][begin:end]
        return Document(
            input_ids,
            tensors["loss_mask"][begin:end],
            tensors["aux_hidden"][begin:end],
            tensors["final_hidden"][begin:end],
            document_name(input_ids),
        )

    def names(self) -> list[str]:
        """The names of all documents, in order. Reads every token id, and no hidden state."""
        return [
            document_name(tensors["input_ids"][begin:end])
            for tensors in self._tensors
            for begin, end in pairwise(tensors["doc_offsets"])
        ]

    @cached_property
    def data_hash(self) -> str:
        """sha256 over the shards' own hashes, in order, one a line: what a drafter says that it was trained on."""
        lines = "".join(f"{shard['sha256']}\n" for shard in self.manifest["shards"])
        return hashlib.sha256(lines.encode()).hexdigest()

    @cached_property
    def _first_documents(self) -> np.ndarray:
        counts = [shard["documents"] for shard in self.manifest["shards"]]
        return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def document_name(input_ids: np.ndarray) -> str:
    """32 hex digits that name a document by its token ids."""
    return ids_sha256(input_ids.tolist())[:NAME_DIGITS]


def not_finite(hidden: np.ndarray) -> int:
    """How many values are NaN or infinite; uint16 is read as bfloat16."""
    if hidden.dtype == np.uint16:
        return int(np.count_nonzero((hidden & 0x7F80) == 0x7F80))
    return int(hidden.size - np.count_nonzero(np.isfinite(hidden)))


def open_shards(path: Path, verify: bool = False) -> ShardFolder:
    """Open a folder and check that every listed shard is whole and of the shape that the manifest says.

    verify: also read every byte, compare each shard's sha256, and look for NaN. Raises ShardError.
    """
    manifest = _read_manifest(path)
    folder = ShardFolder(path, manifest, [_map_shard(path, manifest, shard) for shard in manifest["shards"]])
    for key in ("documents", "tokens"):
        listed = sum(shard[key] for shard in manifest["shards"])
        if manifest[key] != listed:
            raise ShardError(f"{path / MANIFEST} says {manifest[key]} {key}, its shards have {listed}: capture again.")
    if verify:
        for shard, tensors in zip(manifest["shards"], folder._tensors, strict=True):
            _verify_shard(path / shard["file"], shard["sha256"], tensors)
    return folder


def join_shards(folders: list[ShardFolder]) -> ShardFolder:
    """Folders of one target and the same layers as one; the data hash is that of all their shards, in this order.

    Its path is the first folder's. Raises ShardError where two differ, or share a shard.
    """
    first, *others = folders
    if not others:
        return first
    for folder in others:
        for key in SAME_TO_JOIN:
            wanted, found = ({**each.manifest, **each.manifest["target"]}[key] for each in (first, folder))
            if found != wanted:
                raise ShardError(
                    f"{folder.path} has {key} {found!r}, {first.path} has {wanted!r}: train on shards of one target "
                    "and the same layers."
                )
    shards = [shard for folder in folders for shard in folder.manifest["shards"]]
    twice = [name for name, count in Counter(shard["sha256"] for shard in shards).items() if count > 1]
    if twice:
        where = [str(f.path) for f in folders for shard in f.manifest["shards"] if shard["sha256"] == twice[0]]
        raise ShardError(f"{' and '.join(where)} hold the same shard {twice[0][:16]}: name each folder once.")
    sums = {key: sum(folder.manifest[key] for folder in folders) for key in ("documents", "tokens")}
    tensors = [each for folder in folders for each in folder._tensors]
    return ShardFolder(first.path, first.manifest | sums | {"shards": shards}, tensors)


def token_bytes(n_aux: int, hidden_size: int, dtype: str) -> int:
    """What one token takes in a shard: its hidden states, its id, and its place in the mask."""
    return (n_aux + 1) * hidden_size * np.dtype(HIDDEN_TYPES[dtype]).itemsize + 5


def check_target(manifest: dict[str, Any], target_folder: Path) -> None:
    """Raises ShardError where the shards were captured from another target than the one in this folder."""
    try:
        found = target_identity(target_folder)
    except TargetError as error:
        raise ShardError(str(error)) from None
    for key in TARGET_HASHES:
        if manifest["target"][key] != found[key]:
            raise ShardError(
                f"the shards come from another target: {key} is {manifest['target'][key]} in their manifest and "
                f"{found[key]} in {target_folder}: name the target that they were captured from, or capture again."
            )


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ShardError(f"{file} is missing: name a folder that `python -m drafter capture` wrote.") from None
    except OSError as error:
        raise ShardError(f"{file} cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise ShardError(f"{file} is not JSON ({error}): capture again.") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise ShardError(f"{file} has format {found!r}, expected {FORMAT}: capture again with this version.")
    expected: dict[str, type] = {
        "target": dict,
        "layer_ids": list,
        "convention": str,
        "hidden_size": int,
        "n_aux": int,
        "dtype": str,
        "documents": int,
        "tokens": int,
        "shards": list,
    }
    for key, kind in expected.items():
        if not isinstance(manifest.get(key), kind):
            raise ShardError(f"{file}: {key!r} is {manifest.get(key)!r}, expected {kind.__name__}: capture again.")
    if missing := [key for key in TARGET_HASHES if not isinstance(manifest["target"].get(key), str)]:
        raise ShardError(f"{file}: target has no {', '.join(missing)}: capture again.")
    for key, allowed in (
        ("dtype", tuple(HIDDEN_TYPES)),
        ("convention", CONVENTIONS),
        ("final_hidden", (AFTER_NORM,)),
        ("n_aux", (len(manifest["layer_ids"]),)),
    ):
        if manifest.get(key) not in allowed:
            expected_words = " or ".join(map(str, allowed))
            raise ShardError(f"{file}: {key} is {manifest.get(key)!r}, expected {expected_words}: capture again.")
    for shard in manifest["shards"]:
        whole = isinstance(shard, dict) and all(isinstance(shard.get(key), int) for key in ("tokens", "documents"))
        if not whole or not all(isinstance(shard.get(key), str) for key in ("file", "sha256")):
            raise ShardError(f"{file}: a shard is described by {shard!r}: expected file, sha256, tokens, documents.")
        if Path(shard["file"]).name != shard["file"]:
            raise ShardError(f"{file}: shard {shard['file']!r} lies outside the folder: this manifest is not ours.")
    return manifest


def _map_shard(path: Path, manifest: dict[str, Any], shard: dict[str, Any]) -> dict[str, np.ndarray]:
    file, rows, documents = path / shard["file"], shard["tokens"], shard["documents"]
    try:
        tensors = map_tensors(file)
    except TensorFileError as error:
        raise ShardError(f"{error} Remove the folder and capture again.") from None
    hidden, width = np.dtype(HIDDEN_TYPES[manifest["dtype"]]), manifest["hidden_size"]
    expected = {
        "input_ids": (np.dtype(np.int32), (rows,)),
        "loss_mask": (np.dtype(np.bool_), (rows,)),
        "aux_hidden": (hidden, (rows, manifest["n_aux"] * width)),
        "final_hidden": (hidden, (rows, width)),
        "doc_offsets": (np.dtype(np.int64), (documents + 1,)),
    }
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    for name, (dtype, shape) in expected.items():
        if found.get(name) != (dtype, shape):
            what = "is missing" if name not in found else f"is {found[name][0]} {list(found[name][1])}"
            raise ShardError(
                f"{file}: {name} {what}, the manifest says {dtype} {list(shape)}: remove the folder and capture again."
            )
    offsets = tensors["doc_offsets"]
    if offsets[0] != 0 or offsets[-1] != rows or (np.diff(offsets) <= 0).any():
        raise ShardError(f"{file}: doc_offsets do not rise from 0 to {rows}: remove the folder and capture again.")
    return tensors


def _verify_shard(file: Path, sha256: str, tensors: dict[str, np.ndarray]) -> None:
    found = file_sha256(file)
    if found != sha256:
        raise ShardError(
            f"{file} has sha256 {found}, the manifest says {sha256}: it was changed, remove the folder and "
            "capture again."
        )
    offsets = tensors["doc_offsets"]
    for begin, end in pairwise(offsets):
        for name in ("aux_hidden", "final_hidden"):
            if wrong := not_finite(tensors[name][begin:end]):
                raise ShardError(
                    f"{file}: {name} of document {document_name(tensors['input_ids'][begin:end])} has {wrong:,} values "
                    "that are NaN or infinite: remove the folder and capture again."
                )
