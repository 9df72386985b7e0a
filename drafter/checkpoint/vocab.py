"""The draft vocabulary: which of the target's tokens a drafter can propose, and in which order its rows lie.

Every row of a drafter's lm_head belongs to one target token through this map. Two drafters with maps that differ by
one early token disagree at nearly every row, so the map has a hash, and everything derived from it carries that hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drafter.data.tensorfile import TensorFileError, array_part, map_tensors
from drafter.data.tensorwriter import write_parts

Ids = NDArray[np.int64]


class VocabError(ValueError):
    """A draft vocabulary that cannot be meant: says what was found, what was expected and what to do."""


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """The target tokens that a drafter can propose.

    target_ids: int64 [U], ascending and distinct; row u of the drafter's lm_head stands for target_ids[u].
    target_vocab_size: V, rows of the target's embedding.
    """

    target_ids: Ids
    target_vocab_size: int

    def __post_init__(self) -> None:
        ids = self.target_ids
        if ids.ndim != 1 or ids.dtype != np.int64 or not len(ids):
            raise VocabError(f"a draft vocabulary is int64 [U], found {ids.dtype} {list(ids.shape)}.")
        steps = np.diff(ids)
        if (steps <= 0).any():
            at = int(np.flatnonzero(steps <= 0)[0])
            raise VocabError(
                f"the draft vocabulary's target ids must ascend without a repeat, but {ids[at + 1]} follows {ids[at]} "
                f"at row {at + 1}: sort them, and move the rows of lm_head with them."
            )
        if ids[0] < 0 or ids[-1] >= self.target_vocab_size:
            raise VocabError(
                f"the draft vocabulary names the target ids {ids[0]} to {ids[-1]}, but the target has "
                f"{self.target_vocab_size:,} tokens: is it another target's?"
            )

    def __len__(self) -> int:
        return len(self.target_ids)

    @property
    def d2t(self) -> Ids:
        """Offsets int64 [U] as SGLang reads them: target id = row + d2t[row]."""
        return self.target_ids - np.arange(len(self))

    @property
    def t2d(self) -> NDArray[np.bool_]:
        """Which target tokens are in it, bool [V]."""
        found = np.zeros(self.target_vocab_size, dtype=np.bool_)
        found[self.target_ids] = True
        return found

    @property
    def rows(self) -> Ids:
        """The row of each target token, int64 [V]; -1 where it has none."""
        found = np.full(self.target_vocab_size, -1, dtype=np.int64)
        found[self.target_ids] = np.arange(len(self))
        return found

    @property
    def hash(self) -> str:
        """sha256 over the ascending target ids as little-endian int64, then the target's vocabulary size."""
        digest = hashlib.sha256(self.target_ids.astype("<i8").tobytes())
        digest.update(np.array([self.target_vocab_size], dtype="<i8").tobytes())
        return digest.hexdigest()

    def coverage(self, counts: Ids) -> float:
        """Share of counted tokens that it has. `counts` [V]: how often each target token occurs."""
        total = int(counts.sum())
        return float(counts[self.target_ids].sum() / total) if total else 1.0

    @classmethod
    def from_counts(cls, counts: Ids, size: int, forced: Iterable[int] = ()) -> DraftVocab:
        """The `size` most frequent tokens of `counts` [V], ties by the lower id, with the `forced` ones always in.

        Raises VocabError.
        """
        wanted = np.unique(np.fromiter(forced, dtype=np.int64))
        if len(wanted) and (wanted[0] < 0 or wanted[-1] >= len(counts)):
            raise VocabError(f"tokens up to {wanted[-1]} are forced in, but the target has {len(counts):,}.")
        if not len(wanted) <= size <= len(counts) or size < 1:
            raise VocabError(
                f"a draft vocabulary of {size:,} tokens cannot be made: {len(wanted)} are forced in and the target "
                f"has {len(counts):,}."
            )
        ranked = np.lexsort((np.arange(len(counts)), -counts))
        others = ranked[~np.isin(ranked, wanted)][: size - len(wanted)]
        return cls(np.sort(np.concatenate([wanted, others])).astype(np.int64), len(counts))

    @classmethod
    def from_ids(cls, ids: Ids, target_vocab_size: int) -> tuple[DraftVocab, Ids]:
        """Distinct target ids [U] in any order, and which of them each row is: target_ids = ids[order], int64 [U].

        Rows of an lm_head that lie in the order of `ids` are moved by the same `order`. Raises VocabError.
        """
        order = np.argsort(ids, kind="stable").astype(np.int64)
        return cls(ids[order], target_vocab_size), order

    @classmethod
    def from_tensors(cls, d2t: Ids, t2d: NDArray[np.bool_] | None, target_vocab_size: int) -> DraftVocab:
        """A drafter folder's map: offsets [U], and membership [V] where it has one. Raises VocabError."""
        vocab = cls(d2t.astype(np.int64) + np.arange(len(d2t)), target_vocab_size)
        if t2d is not None and not np.array_equal(vocab.t2d, t2d.astype(np.bool_)):
            raise VocabError(
                f"d2t names {len(d2t):,} target tokens and t2d {int(t2d.sum()):,}, and they are not the same ones: "
                "the two belong to different vocabularies."
            )
        return vocab

    def save(self, file: Path) -> None:
        """Write d2t and t2d as safetensors, beside `file` first and then renamed. Raises VocabError."""
        parts = [array_part("d2t", self.d2t), array_part("t2d", self.t2d)]
        try:
            write_parts(file, parts, {"vocab_hash": self.hash})
        except OSError as error:
            raise VocabError(
                f"{file} cannot be written ({error}): give a file in a folder that exists and has room."
            ) from None

    @classmethod
    def load(cls, file: Path) -> DraftVocab:
        """Read what `save` wrote. Raises VocabError."""
        try:
            if not file.exists():
                raise VocabError(f"{file} does not exist: make it with `python -m drafter vocab`.")
            tensors = map_tensors(file, ("d2t", "t2d"))
            d2t, t2d = tensors["d2t"], tensors["t2d"]
            if d2t.dtype not in (np.int64, np.int32) or d2t.ndim != 1 or t2d.dtype != np.bool_ or t2d.ndim != 1:
                raise VocabError(
                    f"{file} is not a draft vocabulary: d2t is {d2t.dtype} {list(d2t.shape)} and t2d {t2d.dtype} "
                    f"{list(t2d.shape)}, expected integers [U] and booleans [V]: make it again."
                )
            return cls.from_tensors(d2t, np.array(t2d), len(t2d))
        except (OSError, TensorFileError, KeyError) as error:
            raise VocabError(f"{file} is not a draft vocabulary ({error}): make it again.") from None
