"""What the rows of tokens that a drafter never had start as: the verifier's, moved as far as the two heads differ.

A drafter's head is trained in its own space. Where it began as the verifier's (or is it), a copied row fits; where it
was trained from random numbers, the verifier's row is in another basis, and the rows that both have say which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from drafter.checkpoint.rows import Rows
from drafter.checkpoint.vocab import Ids, VocabError

INITS = ("verifier", "scaled", "ridge")
# A copied row counts for what it points at. Below this the bases differ more than a scale can mend.
ALIKE = 0.8
UNRELATED = 0.1  # what rows of different tokens have: a head in another basis, or a map that is not its own
SAME_NORM = 0.1  # norms this near to the verifier's need no scale
RIDGE = 1e-4  # of the mean square of the verifier's shared rows

Init = Callable[[Ids], np.ndarray]  # target ids [R] -> rows float32 [R, H]
Progress = Callable[[int], object]  # gets bytes that were read


class HeadError(VocabError):
    """Rows that cannot be made as asked: what was found and what to do."""


@dataclass(frozen=True)
class Likeness:
    """How the two heads compare on the tokens of both, rows paired.

    mean_cosine, norm_ratio (the median of ||drafter's row|| / ||verifier's||): None where there is nothing to compare,
    or the two differ in width.
    """

    shared: int
    mean_cosine: float | None
    norm_ratio: float | None
    recommended: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def likeness(head: Rows, rows: Ids, verifier: Rows, ids: Ids, progress: Progress = int) -> Likeness:
    """Compare row `rows[i]` of the drafter's head with row `ids[i]` of the verifier's, all of them."""
    if head.width != verifier.width or not len(rows):
        return Likeness(len(rows), None, None, "ridge" if len(rows) else "verifier")
    cosines, ratios = [], []
    for mine_RH, theirs_RH in _pairs(head, rows, verifier, ids, progress):
        norms_R, targets_R = (np.sqrt(np.einsum("rh,rh->r", x, x)) for x in (mine_RH, theirs_RH))
        dots_R = np.einsum("rh,rh->r", mine_RH, theirs_RH)
        known_R = (norms_R != 0) & (targets_R != 0)  # a NaN is known, and is told below
        with np.errstate(invalid="ignore"):
            cosines.append((dots_R[known_R] / norms_R[known_R] / targets_R[known_R]).astype(np.float64))
        ratios.append((norms_R[known_R] / targets_R[known_R]).astype(np.float64))
    cosine_R, ratio_R = np.concatenate(cosines), np.concatenate(ratios)
    if not len(cosine_R):
        return Likeness(len(rows), None, None, "verifier")
    cosine, ratio = float(cosine_R.mean()), float(np.median(ratio_R))
    if not np.isfinite(cosine):
        raise HeadError(
            f"{head.span.file}: {head.span.name} or the verifier's head holds numbers that are not finite: the file is "
            "damaged, copy it again."
        )
    return Likeness(len(rows), cosine, ratio, _recommend(cosine, ratio))


def _recommend(cosine: float, ratio: float) -> str:
    if cosine < ALIKE:
        return "ridge"
    return "verifier" if abs(ratio - 1) <= SAME_NORM else "scaled"


def describe(found: Likeness) -> str:
    """The likeness in one sentence, with the recommendation."""
    if found.mean_cosine is None:
        reason = "they differ in width" if found.shared else "they share no token"
        return f"the drafter's head and the verifier's cannot be compared ({reason}): --init {found.recommended}"
    said = (
        f"mean cosine {found.mean_cosine:.3f} between the drafter's head and the verifier's on {found.shared:,} shared "
        f"rows, norms x{found.norm_ratio:.3f}: --init {found.recommended} is recommended"
    )
    if abs(found.mean_cosine) < UNRELATED:
        said += (
            ". Rows of other tokens look like this: if lm_head began as the verifier's, the map is not the one that it "
            "was trained under, which --rows-vocab names"
        )
    return said


def make_init(
    kind: str, head: Rows, rows: Ids, verifier: Rows, ids: Ids, found: Likeness, progress: Progress = int
) -> Init:
    """How to make rows for new target ids. `rows`, `ids`: the shared ones, as in `likeness`. Raises HeadError."""
    assert kind in INITS, kind
    if kind == "ridge":
        if not len(rows):
            raise HeadError("--init ridge learns from rows that both heads have, and they share none: --init verifier.")
        basis_WH = _change_of_basis(head, rows, verifier, ids, progress)
        return lambda new: _finite(verifier, verifier.read_float32(new) @ basis_WH)
    if head.width != verifier.width:
        raise HeadError(
            f"the verifier's rows are {verifier.width} wide and the drafter's {head.width}: --init ridge fits the one "
            "to the other, a copy cannot."
        )
    if kind == "verifier":
        return lambda new: _finite(verifier, verifier.read_float32(new))
    if found.norm_ratio is None:
        raise HeadError("--init scaled matches the norms of shared rows, and there are none: use --init verifier.")
    scale = np.float32(found.norm_ratio)
    return lambda new: _finite(verifier, verifier.read_float32(new) * scale)


def _change_of_basis(head: Rows, rows: Ids, verifier: Rows, ids: Ids, progress: Progress) -> np.ndarray:
    """A, float32 [W, H], which minimises |verifier[ids] A - head[rows]|^2 + ridge |A|^2.

    Holds about 40 W^2 bytes (2 GB at Kimi's width).
    """
    square_WW = np.zeros((verifier.width, verifier.width))
    cross_WH = np.zeros((verifier.width, head.width))
    for mine_RH, theirs_RW in _pairs(head, rows, verifier, ids, progress):
        square_WW += theirs_RW.T @ theirs_RW
        cross_WH += theirs_RW.T @ mine_RH
    diagonal = np.einsum("ww->w", square_WW)
    diagonal += RIDGE * diagonal.mean() + np.finfo(np.float32).tiny
    try:
        basis_WH: np.ndarray = np.linalg.solve(square_WW, cross_WH).astype(np.float32)
    except np.linalg.LinAlgError as error:
        raise HeadError(f"the change of basis cannot be solved ({error}): use --init scaled.") from None
    return basis_WH


def _pairs(
    head: Rows, rows: Ids, verifier: Rows, ids: Ids, progress: Progress
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(drafter's rows, verifier's rows) of the same tokens, float32, some at a time."""
    step = min(head.chunk, verifier.chunk)
    for begin in range(0, len(rows), step):
        part = slice(begin, begin + step)
        yield head.read_float32(rows[part]), verifier.read_float32(ids[part])
        progress(len(rows[part]) * (head.row_bytes + verifier.row_bytes))


def _finite(verifier: Rows, made_RH: np.ndarray) -> np.ndarray:
    if not np.isfinite(made_RH).all():
        raise HeadError(
            f"{verifier.span.file}: {verifier.span.name} gives rows that are not finite: the file is damaged, copy it "
            "again."
        )
    return made_RH
