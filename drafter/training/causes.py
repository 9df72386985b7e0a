"""Why a walk over captured features is not what was served: each suspected fault is undone, and the walk taken again.

What reproduces the served profile (full_acc of every draft step) names the fault. Faults that cannot be undone are
looked for in the features themselves. T tokens, H hidden, A = n_aux H, M rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafter.acceptance import add_histograms, full_acc
from drafter.checkpoint.fit import rotary
from drafter.checkpoint.formats import inputs_of
from drafter.checkpoint.subject import read_target
from drafter.data.shards import Document
from drafter.data.tensorfile import to_float32
from drafter.training.agreement import Agreement, Answer, length, walk_answers
from drafter.training.attention import Layout
from drafter.training.batch import to_torch
from drafter.training.model import Eagle3
from drafter.training.recompute import NotRecomputed, all_inputs
from drafter.training.rotary import rotary_of
from drafter.training.target import Target

NORMED_SPREAD = 0.02  # of rows' weighted sizes: after a norm they are one; before it they differ by far more
SAME_STATES = 0.01  # share of the square that may differ between two computations of one layer's states
RECOMPUTED = 24  # answers that other layers are computed for
FOLDS = 4  # the map is learnt from the answers of the others


@dataclass(frozen=True)
class Tried:
    """A suspected fault: `cause` in a sentence, the walk without it, and what was served on the same answers.

    distance: from the served profile. partly: the walk can undo only a part of the fault. anywhere: it undoes every
    fault of the shards, whichever that is.
    """

    name: str
    cause: str
    walked: float
    served: float
    distance: float
    partly: bool = False
    anywhere: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """Faults seen in the features themselves, faults tried (best first), and why others were not tried."""

    agreement: Agreement
    seen: list[str]
    tried: list[Tried]
    untried: list[str]

    def explaining(self) -> list[Tried]:
        """What brings the walk to the served length, and at least half of the way to its profile; best first.

        What undoes any fault counts where nothing else does.
        """
        agreement = self.agreement
        as_is = distance(agreement.walked, agreement.served(agreement.answers))
        found = [
            each
            for each in self.tried
            if each.distance <= as_is / 2 and (each.partly or abs(each.walked - each.served) <= agreement.furthest)
        ]
        whole = [each for each in found if not each.partly] or found
        return [each for each in whole if not each.anywhere] or whole

    def sentence(self) -> str:
        """Likely causes in order, and what else was tried."""
        explaining = [] if self.seen else self.explaining()
        causes = [f"{each.cause} (so walked it reaches {each.walked:.3f})" for each in explaining]
        others = [f"{each.name} {each.walked:.3f}" for each in self.tried if each not in explaining]
        said = f"Likely cause: {'; or '.join(self.seen + causes) or 'none of those that were tried'}."
        said += f" Also tried: {', '.join(others)}." if others else ""
        return said + (f" Not tried: {'; '.join(self.untried)}." if self.untried else "")


def distance(walked: Sequence[int], served: Sequence[int]) -> float:
    """Sum over draft steps of the difference in full_acc: no less than the difference in acceptance length."""
    pairs = zip(full_acc(walked), full_acc(served), strict=True)
    return sum(abs(a - b) for a, b in pairs)


def diagnose(model: Eagle3, target: Target, layer_ids: list[int], agreement: Agreement) -> Diagnosis:
    """Try every suspected fault on the answers of a walk that is not what was served."""
    tried: list[Tried] = []
    untried: list[str] = []

    def add(name: str, cause: str, answers: Sequence[Answer], walked: list[int], **kind: bool) -> None:
        served = agreement.served(answers)
        tried.append(Tried(name, cause, length(walked), length(served), distance(walked, served), **kind))

    def walk(name: str, cause: str, answers: Sequence[Answer], **kind: bool) -> None:
        add(name, cause, answers, walk_answers(model, answers, agreement.report.num_steps), **kind)

    for shift, word in ((1, "early"), (-1, "late")):
        answers = _with_features(agreement.answers, partial(np.roll, shift=shift, axis=0))
        cause = f"positions: the captured features lie one position too {word} beside their tokens; capture again"
        walk(f"positions {word}", cause, answers)

    cause = (
        "d2t: the drafter's rows stand for other tokens than its map says, as the text shows; give lm_head its own map "
        "back (`python -m drafter remap --rows-vocab`)"
    )
    folds = [agreement.answers[fold::FOLDS] for fold in range(min(FOLDS, len(agreement.answers)))]
    histograms: list[list[int]] = []
    for fold in folds:
        others = [answer for each in folds if each is not fold for answer in each]
        with _swapped(model, target_ids_U=learnt_map(model, others)):
            histograms.append(walk_answers(model, fold, agreement.report.num_steps))
    add("d2t", cause, agreement.answers, add_histograms(histograms), partly=True)

    ours, theirs = rotary(model.config), rotary(target.config)
    if ours != theirs:
        keys = {"rope_theta": theirs[0], "rope_scaling": theirs[1], "rope_parameters": None}
        with _swapped(model, rotary=rotary_of(model.config | keys)):
            cause = f"rope: the drafter was trained with its target's rope (theta {theirs[0]:g}), not its config's"
            walk("rope", cause, agreement.answers)

    count, hidden = len(layer_ids), len(target.norm_H)
    if count > 1:
        answers = _with_features(agreement.answers, lambda aux: _blocks(aux, hidden)[:, ::-1].reshape(aux.shape))
        cause = "order of layers: the captured layers lie the other way round in a row; capture again"
        walk("order of layers", cause, answers)

    for weight, what in ((None, "a plain norm"), (target.norm_H.float().numpy(), "the target's final norm")):
        answers = _with_features(agreement.answers, partial(_normed, hidden=hidden, weight_H=weight))
        cause = f"norm: the drafter was served with states after {what}, those captured are before it; capture again"
        walk(f"{what}", cause, answers)

    try:
        _try_layers(target, layer_ids, agreement, walk)
    except NotRecomputed as refused:
        untried.append(
            f"layers by one ({refused}): serve the drafter with the ids one lower and one higher, and compare"
        )
    seen = [
        f"norm: the captured states of layer {layer} are after a norm, and an engine feeds those before it; capture "
        "again"
        for layer, normed in zip(layer_ids, _after_a_norm(agreement.answers, count, hidden), strict=True)
        if normed
    ]
    return Diagnosis(agreement, seen, sorted(tried, key=lambda each: each.distance), untried)


def learnt_map(model: Eagle3, answers: Sequence[Answer]) -> Tensor:
    """Which token each row of lm_head stands for by the text: int64 [U], the map's own where the text says nothing.

    A row's token is the one that most often stood where the row was the drafter's first guess.
    """
    seen: dict[int, Counter[int]] = {}
    with torch.no_grad():
        for answer in answers:
            tokens_T = to_torch(answer.document.input_ids).long()
            query_T = torch.zeros(len(tokens_T), dtype=torch.bool)
            query_T[answer.start - 1 : answer.stop - 2] = True
            layout = Layout.of([len(tokens_T)], query_T)
            aux_TA = to_torch(answer.document.aux_hidden).float()
            hidden_RH, _ = model.first(aux_TA, tokens_T.roll(-1), layout)
            rows = model.logits(hidden_RH).argmax(-1).tolist()
            for row, position in zip(rows, layout.query_R.tolist(), strict=True):
                seen.setdefault(row, Counter())[int(tokens_T[position + 2])] += 1
    ids_U = model.target_ids_U.clone()
    for row, tokens in seen.items():
        ids_U[row] = tokens.most_common(1)[0][0]
    return ids_U


def _try_layers(target: Target, layer_ids: list[int], agreement: Agreement, walk: Callable[..., None]) -> None:
    """Walk with the named layers computed anew, and with every one a layer lower and higher. Raises NotRecomputed."""
    answers = agreement.answers[:: max(1, len(agreement.answers) // RECOMPUTED)][:RECOMPUTED]
    states = all_inputs(target.path, [answer.document.input_ids for answer in answers])
    captured = inputs_of(layer_ids, read_target(target.path))
    assert captured is not None
    for shift, name in ((0, "these layers anew"), (-1, "layers one lower"), (1, "layers one higher")):
        wanted = [layer + shift for layer in captured]
        if min(wanted) < 0 or max(wanted) >= len(states[0]):
            continue
        moved = [
            _replaced(answer, np.concatenate([each[layer] for layer in wanted], axis=-1))
            for answer, each in zip(answers, states, strict=True)
        ]
        ids = [layer + shift for layer in layer_ids]
        if shift:
            cause = (
                f"layers: the drafter was served with {name} than those captured ({ids} in the place of {layer_ids}); "
                "capture with its own ids, in the convention of its target"
            )
        else:
            cause = (
                f"layers: the shards hold other states than those of {layer_ids}{_nearest(answers, states, captured)}"
            )
        walk(name, cause, moved, anywhere=not shift)


def _nearest(answers: Sequence[Answer], states: Sequence[np.ndarray], captured: list[int]) -> str:
    """Which layers the captured states really are, where they are any of those that were computed anew."""
    aux_MA = np.concatenate([to_float32(np.asarray(each.document.aux_hidden)) for each in answers])
    layers_LMH = np.concatenate(states, axis=1)
    shifts = []
    for block_MH, claimed in zip(np.split(aux_MA, len(captured), axis=-1), captured, strict=True):
        missed_L = ((layers_LMH - block_MH) ** 2).sum((1, 2)) / (layers_LMH**2).sum((1, 2))
        shifts.append(int(missed_L.argmin()) - claimed if missed_L.min() < SAME_STATES else None)
    if len(set(shifts)) == 1 and shifts[0]:
        word = "lower" if shifts[0] < 0 else "higher"
        return f": they are those of layers {abs(shifts[0])} {word}; capture again with the ids that the drafter has"
    return "; capture again"


def _after_a_norm(answers: Sequence[Answer], count: int, hidden: int) -> Iterator[bool]:
    """Whether each captured layer's states are after an RMS norm: then some weighting makes all rows of one size.

    By least squares over a_h in sum_h a_h x_h^2 = 1, judged on rows that it was not fitted to.
    """
    rows_MA = np.concatenate([to_float32(np.asarray(each.document.aux_hidden)[1:]) for each in answers])
    enough = len(rows_MA) >= 4 * hidden
    for block_MH in np.split(rows_MA, count, axis=-1):
        if not enough:
            yield False
            continue
        square_MH = block_MH.astype(np.float64) ** 2
        a_H, *_ = np.linalg.lstsq(square_MH[::2], np.ones(len(square_MH[::2])), rcond=None)
        yield bool(np.std(square_MH[1::2] @ a_H) < NORMED_SPREAD)


def _with_features(answers: Sequence[Answer], change: Callable[[np.ndarray], np.ndarray]) -> list[Answer]:
    return [_replaced(each, change(to_float32(np.asarray(each.document.aux_hidden)))) for each in answers]


def _replaced(answer: Answer, aux_TA: np.ndarray) -> Answer:
    document: Document = replace(answer.document, aux_hidden=np.ascontiguousarray(aux_TA, np.float32))
    return replace(answer, document=document)


def _blocks(aux_TA: np.ndarray, hidden: int) -> np.ndarray:
    return aux_TA.reshape(len(aux_TA), -1, hidden)


def _normed(aux_TA: np.ndarray, hidden: int, weight_H: np.ndarray | None) -> np.ndarray:
    x = _blocks(aux_TA, hidden)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    normed: np.ndarray = (x if weight_H is None else x * weight_H).reshape(aux_TA.shape)
    return normed


@contextmanager
def _swapped(model: Eagle3, **attributes: Any) -> Iterator[None]:
    """Other values of a model's attributes for a while."""
    before = {name: getattr(model, name) for name in attributes}
    for name, value in attributes.items():
        setattr(model, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(model, name, value)
