"""The draft vocabulary: which target ids a drafter may guess, and the two maps of it that a checkpoint carries."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


class VocabError(ValueError):
    """A draft vocabulary that cannot be meant."""


@dataclass(frozen=True)
class DraftVocab:
    """`target_ids`: int64 [U], ascending and distinct, all below `target_vocab_size`."""

    target_ids: np.ndarray
    target_vocab_size: int

    def __post_init__(self) -> None:
        ids = self.target_ids
        if (
            ids.ndim != 1
            or not len(ids)
            or (np.diff(ids) <= 0).any()
            or ids[0] < 0
            or ids[-1] >= self.target_vocab_size
        ):
            raise VocabError(
                f"a draft vocabulary of {ids.shape} ids is not ascending and distinct below "
                f"{self.target_vocab_size:,}: build it again from counts."
            )

    @cached_property
    def d2t(self) -> np.ndarray:
        """Offsets, int64 [U]: target id = draft id + d2t[draft id]."""
        return self.target_ids - np.arange(len(self.target_ids))

    @cached_property
    def t2d(self) -> np.ndarray:
        """Bool [V]: whether a target id is in the draft vocabulary."""
        known = np.zeros(self.target_vocab_size, dtype=bool)
        known[self.target_ids] = True
        return known

    @cached_property
    def hash(self) -> str:
        """sha256 over the ids and then the target vocabulary size, all as little-endian int64."""
        total = hashlib.sha256(self.target_ids.astype("<i8").tobytes())
        total.update(np.array(self.target_vocab_size, "<i8").tobytes())
        return total.hexdigest()

    @classmethod
    def from_tensors(cls, d2t: np.ndarray, t2d: np.ndarray | None, target_vocab_size: int) -> DraftVocab:
        """From a checkpoint's tensors. Raises VocabError where the two maps disagree."""
        vocab = cls(d2t.astype(np.int64) + np.arange(len(d2t)), target_vocab_size)
        if t2d is not None and not np.array_equal(vocab.t2d, t2d.astype(bool)):
            raise VocabError("d2t and t2d name different tokens: export the drafter again.")
        return vocab

    def save(self, file: Path) -> None:
        """Write the two maps as safetensors, beside and renamed."""
        beside = file.with_name(file.name + ".tmp")
        save_file({"d2t": self.d2t, "t2d": self.t2d}, beside)
        beside.replace(file)

    @classmethod
    def load(cls, file: Path) -> DraftVocab:
        """Read what `save` wrote. Raises VocabError where it is not that."""
        try:
            found = load_file(file)
            return cls.from_tensors(found["d2t"], found["t2d"], len(found["t2d"]))
        except (OSError, KeyError) as error:
            raise VocabError(f"{file} holds no draft vocabulary ({error}): give a file with d2t and t2d.") from None
