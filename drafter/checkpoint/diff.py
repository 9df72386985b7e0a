"""Two draft vocabularies side by side: what a drafter of one would mean if it were served, or trained, with the other.

A row that stays where it is and gets another token is wrong without a word, so the first figure is how many positions
mean the same token in both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drafter.checkpoint.maps import ReadMap, agreed_size
from drafter.checkpoint.specials import COSTS, Special, missing
from drafter.checkpoint.vocab import Ids, VocabError

MOST_TOKENS = 1 << 24  # of a target; a greater id is a typing error


@dataclass(frozen=True)
class Diff:
    """What `diff` finds. Positions are rows in the files' own order; coverage is None without counts.

    missing_specials_a, missing_specials_b are None where the target's special tokens are not known.
    """

    a: ReadMap
    b: ReadMap
    target_vocab_size: int | None
    identical_positions: int
    shared: int
    coverage_a: float | None
    coverage_b: float | None
    missing_specials_a: list[Special] | None
    missing_specials_b: list[Special] | None

    @property
    def only_in_a(self) -> int:
        return len(self.a.target_ids) - self.shared

    @property
    def only_in_b(self) -> int:
        return len(self.b.target_ids) - self.shared

    @property
    def same(self) -> bool:
        """Whether every row means the same token in both."""
        return self.identical_positions == len(self.a.target_ids) == len(self.b.target_ids)

    def as_json(self) -> dict[str, Any]:
        """The object that `diff --json` prints."""
        sides = {"a": (self.a, self.missing_specials_a), "b": (self.b, self.missing_specials_b)}
        found: dict[str, Any] = {
            "identical_positions": self.identical_positions,
            "shared": self.shared,
            "only_in_a": self.only_in_a,
            "only_in_b": self.only_in_b,
            "coverage_a": self.coverage_a,
            "coverage_b": self.coverage_b,
            "target_vocab_size": self.target_vocab_size,
        }
        for side, (read, lacking) in sides.items():
            found |= {
                f"missing_specials_{side}": None if lacking is None else [special.as_json() for special in lacking],
                f"size_{side}": len(read.target_ids),
                f"ascending_{side}": read.ascending,
                f"reading_{side}": read.reading,
                f"evidence_{side}": list(read.evidence),
                f"vocab_hash_{side}": read.sorted(self.target_vocab_size)[0].hash if self.target_vocab_size else None,
            }
        return found


def compare(a: ReadMap, b: ReadMap, counts: Ids | None = None, specials: Sequence[Special] | None = None) -> Diff:
    """`counts` [V]: how often each target token occurs. Raises VocabError where the two are of different targets."""
    size = agreed_size(
        a.source,
        {str(a.source): a.target_vocab_size, str(b.source): b.target_vocab_size},
    )
    if size is None and counts is not None:
        size = len(counts)
    ids_a, ids_b = both = a.target_ids, b.target_ids
    rows = min(len(ids_a), len(ids_b))
    covered = [None if counts is None else _coverage(read, counts) for read in (a, b)]
    lacking = [None if specials is None else missing(specials, ids) for ids in both]
    return Diff(
        a,
        b,
        size,
        identical_positions=int((ids_a[:rows] == ids_b[:rows]).sum()),
        shared=len(np.intersect1d(ids_a, ids_b, assume_unique=True)),
        coverage_a=covered[0],
        coverage_b=covered[1],
        missing_specials_a=lacking[0],
        missing_specials_b=lacking[1],
    )


def _coverage(read: ReadMap, counts: Ids) -> float:
    if read.target_ids.max() >= len(counts):
        raise VocabError(
            f"{read.source} names the target id {read.target_ids.max()}, the counts end before {len(counts):,}: are "
            "they another target's?"
        )
    return read.sorted(len(counts))[0].coverage(counts)


def describe(found: Diff) -> str:
    """The comparison in words, a line a fact."""
    a, b = found.a, found.b
    rows = {name: len(read.target_ids) for name, read in (("A", a), ("B", b))}
    size = f" of {found.target_vocab_size:,}" if found.target_vocab_size else ""
    lines = [
        f"{name}  {read.source}: {rows[name]:,}{size} tokens, read as {read.reading} ({'; '.join(read.evidence)})"
        + ("" if read.ascending else ", not in ascending order")
        for name, read in (("A", a), ("B", b))
    ]
    lines += [
        f"{found.identical_positions:,} of {min(rows.values()):,} positions mean the same token in both",
        f"{found.shared:,} tokens are in both, {found.only_in_a:,} in A alone, {found.only_in_b:,} in B alone",
    ]
    for name, share in (("A", found.coverage_a), ("B", found.coverage_b)):
        if share is not None:
            lines.append(f"{name} covers {share:.2%} of the counted tokens: no first position is accepted more often")
    lines.append(_verdict(found))
    for name, lacking in (("A", found.missing_specials_a), ("B", found.missing_specials_b)):
        lines += _lacking(name, lacking)
    return "\n".join(lines)


def _verdict(found: Diff) -> str:
    if found.same:
        return "They are the same map: a drafter of one can be trained and served with the other as it is."
    if found.only_in_a == found.only_in_b == 0:
        return (
            "They hold the same tokens in another order: a drafter of one is wrong with the map of the other until "
            "`python -m drafter remap` moves its rows; none has to be made."
        )
    return (
        f"A drafter of A served or trained with B's map would mean another token at all but "
        f"{found.identical_positions:,} positions, without an error. `python -m drafter remap` keeps "
        f"{found.shared:,} of its rows and makes {found.only_in_b:,}."
    )


def _lacking(name: str, lacking: list[Special] | None) -> list[str]:
    if lacking is None:
        return [f"{name}: give --target, a folder with tokenizer.json, to see which special tokens it lacks"]
    if not lacking:
        return [f"{name} lacks no special token"]
    kinds = {kind: [each for each in lacking if each.kind == kind] for kind in COSTS}
    return [
        f"{name} lacks {', '.join(f'{each.token} ({each.id})' for each in those)}: {COSTS[kind]}"
        for kind, those in kinds.items()
        if those
    ]


@dataclass(frozen=True)
class _Pairs:
    """A JSON object in which a name may occur twice."""

    of: list[tuple[str, Any]]


def read_counts(file: Path, size: int | None) -> Ids:
    """Token counts, int64 [V]: a JSON list by id, a JSON object `{id: count}`, or lines `id count`.

    An id that occurs twice is counted twice. `size` is V; None takes what the file has. Raises VocabError.
    """
    try:
        text = file.read_text("utf-8")
        if file.suffix == ".json":
            found = json.loads(text, object_pairs_hook=_Pairs)
            pairs = [(int(token), n) for token, n in found.of] if isinstance(found, _Pairs) else list(enumerate(found))
        else:
            pairs = [(int(token), int(n)) for token, n in (line.split() for line in text.splitlines() if line.strip())]
        if any(type(n) is not int for _, n in pairs):
            raise ValueError("a count is no whole number")
        ids, counts = (np.array([pair[at] for pair in pairs], dtype=np.int64) for at in (0, 1))
        length = size if size is not None else int(ids.max()) + 1
        if ids.min() < 0 or counts.min() < 0 or length > MOST_TOKENS:
            raise ValueError(f"ids from {ids.min()} to {ids.max()}, counts from {counts.min()}")
    except (OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        raise VocabError(
            f"{file} holds no token counts ({error!s:.100}): expected a JSON list by id, a JSON object of counts, or "
            "lines of `id count`; conversations are counted where they are named .jsonl."
        ) from None
    if ids.max() >= length:
        raise VocabError(f"{file} counts the token {ids.max()} of a target with {length:,}: was it another target's?")
    total = np.zeros(length, np.int64)
    np.add.at(total, ids, counts)
    if not total.any():
        raise VocabError(f"{file} counts no token: expected how often each occurs.")
    return total
