"""Writes a folder of shards that is valid at every moment: a shard beside its place, then a manifest that names it."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from drafter.data.shards import (
    AFTER_NORM,
    CONVENTIONS,
    FORMAT,
    HIDDEN_TYPES,
    MANIFEST,
    Document,
    ShardError,
    not_finite,
    open_shards,
)
from drafter.data.target import TARGET_HASHES
from drafter.data.tensorfile import write_tensors
from drafter.data.tensorwriter import sync_folder
from drafter.report import file_sha256

SHARD_BYTES = 256 * 1024 * 1024
# What two captures must share to lie in one folder, beside the target's hashes.
KIND_KEYS = ("layer_ids", "convention", "hidden_size", "n_aux", "dtype", "final_hidden")


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
        files: list[str] = [shard["file"] for shard in self._manifest["shards"]]
        return self.waiting_bytes + sum((self.path / file).stat().st_size for file in files)

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
            shard = {"file": file.name, "sha256": file_sha256(file), "tokens": tokens, "documents": len(waiting)}
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
        (self.path / f"{MANIFEST}.tmp").unlink(missing_ok=True)
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
                    f"{self.path} was captured with {key} {found!r}, this capture has {wanted!r}: choose another "
                    "folder."
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


def lock_folder(path: Path) -> int:
    """A descriptor that holds the folder for this process until closed. Raises ShardError where another has it."""
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
