"""What spoils a drafter folder in place, and the checks that may name it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from drafter.report import file_sha256

WEIGHTS = "model.safetensors"
UNREADABLE = ("readable",)


@dataclass(frozen=True)
class Mutation:
    """One spoilt folder: `apply` spoils it in place, and at least one of `names` must find it."""

    kind: str
    name: str
    apply: Callable[[Path], None]
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


def tensors(change: Callable[[dict[str, np.ndarray]], None]) -> Callable[[Path], None]:
    """A change to the tensors of a folder, which are written back."""

    def apply(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in found.items()}, folder / WEIGHTS)

    return apply


def raw(change: Callable[[bytes], bytes], name: str = WEIGHTS) -> Callable[[Path], None]:
    """A change to a file's bytes."""

    def apply(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return apply


def header(change: Callable[[dict], None]) -> Callable[[Path], None]:
    """A change to the header of the weights; the data stay as they are."""

    def edit(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        found = json.loads(data[8 : 8 + length])
        change(found)
        text = json.dumps(found).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return raw(edit)


def with_manifest(folder: Path) -> None:
    """An eyas.json as its maker would have written it now."""
    from drafter.checkpoint.vocab import DraftVocab

    found = load_file(folder / WEIGHTS)
    ids = np.sort(found["d2t"].astype(np.int64) + np.arange(len(found["d2t"])))
    hashes = {name: file_sha256(folder / name) for name in ("config.json", WEIGHTS)}
    written = {"format": 1, "sha256": hashes, "vocab_hash": DraftVocab(ids, len(found["t2d"])).hash}
    (folder / "eyas.json").write_text(json.dumps(written))


def signed(apply: Callable[[Path], None]) -> Callable[[Path], None]:
    """The mutation of a folder that has a manifest."""

    def whole(folder: Path) -> None:
        with_manifest(folder)
        apply(folder)

    return whole
