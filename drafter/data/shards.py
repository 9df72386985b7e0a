"""Hidden-state shards on disk: what a drafter is trained on, one folder for one target and one choice of layers.

manifest.json lists every shard with its sha256; a shard that it does not list does not exist. A shard is safetensors:
input_ids int32 [T], loss_mask bool [T], aux_hidden [T, n_aux*H], final_hidden [T, H] (after the final norm) and
doc_offsets int64 [D+1], where document i has the rows doc_offsets[i] to doc_offsets[i+1].
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from drafter.data.target import TARGET_HASHES, TargetError, target_identity
from drafter.data.tensorfile import TensorFileError, map_tensors, sync_folder, write_tensors
from drafter.report import ids_sha256

FORMAT = 1
AFTER_NORM = "after_norm"
MANIFEST = "manifest.json"
HIDDEN_TYPES: dict[str, type] = {"bfloat16": np.uint16, "float32": np.float32}
CONVENTIONS = ("output_of_layer", "input_to_layer")
NAME_DIGITS = 32
SHARD_BYTES = 256 * 1024 * 1024
# What two captures must share to lie in one folder, beside the target's hashes.
KIND_KEYS = ("layer_ids", "convention", "hidden_size", "n_aux", "dtype", "final_hidden")


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
            for begin, end in zip(tensors["doc_offsets"][:-1], tensors["doc_offsets"][1:], strict=True)
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


class ShardWriter:
    """Adds documents to a folder, a shard of about `shard_bytes` at a time. One writer at a time has a folder.

    What was added since the last whole shard is lost with the process; `close` writes it out. Raises ShardError where
    the folder holds another target, other layers, or another type, or where another process writes to it.
    """

    def __init__(
        self,
        path: Path,
        *,
        target: dict[str, str],
        layer_ids: list[int],
        convention: str,
        hidden_size: int,
        dtype: str,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        assert dtype in HIDDEN_TYPES and convention in CONVENTIONS
        self.path = path
        self.waiting_bytes = 0  # of documents that are added and in no shard yet
        self._shard_bytes = shard_bytes
        self._waiting: list[Document] = []
        kind = {
            "target": target,
            "layer_ids": layer_ids,
            "convention": convention,
            "hidden_size": hidden_size,
            "n_aux": len(layer_ids),
            "dtype": dtype,
            "final_hidden": AFTER_NORM,
        }
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ShardError(f"the folder {path} cannot be made ({error.strerror}): choose another one.") from None
        self._lock = lock_folder(path)
        try:
            self.names, self._manifest = self._go_on(kind)
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def documents(self) -> int:
        """Documents that are safe on the disk."""
        return int(self._manifest["documents"])

    @property
    def bytes(self) -> int:
        """Bytes of the shards on the disk and of what waits to be written."""
        on_disk = sum((self.path / shard["file"]).stat().st_size for shard in self._manifest["shards"])
        return on_disk + self.waiting_bytes

    def add(self, document: Document) -> None:
        """Take a document; a full shard is written at once. Raises ShardError (a wrong shape, NaN) or OSError."""
        self._check(document)
        self._waiting.append(document)
        self.waiting_bytes += document_bytes(document)
        self.names.add(document.name)
        if self.waiting_bytes >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what waits as one shard. Raises OSError; then what waits is dropped and the folder is as before."""
        waiting, self._waiting, self.waiting_bytes = self._waiting, [], 0
        if not waiting:
            return
        file = self.path / f"shard-{len(self._manifest['shards']):05d}.safetensors"
        try:
            write_tensors(
                file,
                {
                    "input_ids": np.concatenate([each.input_ids for each in waiting]),
                    "loss_mask": np.concatenate([each.loss_mask for each in waiting]),
                    "aux_hidden": np.concatenate([each.aux_hidden for each in waiting]),
                    "final_hidden": np.concatenate([each.final_hidden for each in waiting]),
                    "doc_offsets": np.cumsum([0, *(len(each.input_ids) for each in waiting)], dtype=np.int64),
                },
            )
            tokens = sum(len(each.input_ids) for each in waiting)
            shard = {"file": file.name, "sha256": _sha256(file), "tokens": tokens, "documents": len(waiting)}
            manifest = {
                **self._manifest,
                "documents": self._manifest["documents"] + len(waiting),
                "tokens": self._manifest["tokens"] + tokens,
                "shards": [*self._manifest["shards"], shard],
            }
            write_manifest(self.path, manifest)
        except BaseException:
            self.names.difference_update(each.name for each in waiting)
            raise
        self._manifest = manifest

    def close(self) -> None:
        """Write what waits and let go of the folder. Safe to call again. Raises OSError."""
        if self._lock < 0:
            return
        try:
            self.flush()
        finally:
            os.close(self._lock)
            self._lock = -1

    def _go_on(self, kind: dict[str, Any]) -> tuple[set[str], dict[str, Any]]:
        if not (self.path / MANIFEST).exists():
            for stray in self.path.glob("shard-*.safetensors*"):
                stray.unlink()  # written before a first manifest that never came
            return set(), {"format": FORMAT, **kind, "documents": 0, "tokens": 0, "shards": []}
        folder = open_shards(self.path)
        for key, found, wanted in (
            *((key, folder.manifest["target"][key], kind["target"][key]) for key in TARGET_HASHES),
            *((key, folder.manifest[key], kind[key]) for key in KIND_KEYS),
        ):
            if found != wanted:
                raise ShardError(
                    f"{self.path} was captured with {key} {found!r}, this capture has {wanted!r}: choose another folder."
                )
        listed = {shard["file"] for shard in folder.manifest["shards"]}
        for stray in self.path.glob("shard-*.safetensors*"):
            if stray.name not in listed:
                stray.unlink()  # a process died between the shard and the manifest
        return set(folder.names()), folder.manifest

    def _check(self, document: Document) -> None:
        manifest, rows = self._manifest, len(document.input_ids)
        hidden_type, width = HIDDEN_TYPES[manifest["dtype"]], manifest["hidden_size"]
        if not rows:
            raise ShardError(f"document {document.name} is empty: leave it out.")
        for name, array, dtype, shape in (
            ("input_ids", document.input_ids, np.int32, (rows,)),
            ("loss_mask", document.loss_mask, np.bool_, (rows,)),
            ("aux_hidden", document.aux_hidden, hidden_type, (rows, manifest["n_aux"] * width)),
            ("final_hidden", document.final_hidden, hidden_type, (rows, width)),
        ):
            if array.dtype != dtype or array.shape != shape:
                raise ShardError(
                    f"document {document.name}: {name} is {array.dtype} {list(array.shape)}, "
                    f"expected {np.dtype(dtype)} {list(shape)}."
                )
        for name, array in (("aux_hidden", document.aux_hidden), ("final_hidden", document.final_hidden)):
            if wrong := not_finite(array):
                raise ShardError(
                    f"document {document.name}: {name} has {wrong:,} values that are NaN or infinite: the target "
                    "overflows in this type; capture in bfloat16 or float32, or leave the document out."
                )


def document_bytes(document: Document) -> int:
    """What a document takes in a shard."""
    return (
        document.input_ids.nbytes
        + document.loss_mask.nbytes
        + document.aux_hidden.nbytes
        + document.final_hidden.nbytes
    )


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


def lock_folder(path: Path) -> int:
    """A descriptor that holds the folder for this process until it is closed. Raises ShardError where another has it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ShardError(f"{path} cannot be opened ({error.strerror}): name another folder.") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ShardError(f"another capture is using {path}: wait for it, or choose another folder.") from None
    return descriptor


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Put the manifest in its place in one step. Raises OSError."""
    beside = path / f"{MANIFEST}.tmp"
    try:
        with beside.open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(manifest, indent=1) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(path / MANIFEST)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path)


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
    found = _sha256(file)
    if found != sha256:
        raise ShardError(
            f"{file} has sha256 {found}, the manifest says {sha256}: it was changed, remove the folder and capture again."
        )
    offsets = tensors["doc_offsets"]
    for begin, end in zip(offsets[:-1], offsets[1:], strict=True):
        for name in ("aux_hidden", "final_hidden"):
            if wrong := not_finite(tensors[name][begin:end]):
                raise ShardError(
                    f"{file}: {name} of document {document_name(tensors['input_ids'][begin:end])} has {wrong:,} values "
                    "that are NaN or infinite: remove the folder and capture again."
                )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
