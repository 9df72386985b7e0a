"""Before a drafter is trained on: does training see what serving saw?

The drafter, as it was served, is walked over the captured features. Where that is not the acceptance length that its
report says, the features, the map or the rope are not those of serving, and training on them would unlearn the drafter.
causes.py says which. T tokens of a document.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafter import acceptance
from drafter.data.shards import Document, ShardFolder
from drafter.report import ids_sha256, read_report
from drafter.training.errors import TrainingError
from drafter.training.evaluate import walk_batch
from drafter.training.model import Eagle3

FURTHEST = 0.15  # acceptance lengths that are further apart than this are not of the same features
PAIRED = 0.05  # the same over the very answers that were served, where nothing but rounding is between them
ANSWERS, TOKENS = 96, 30_000  # walked at most: minutes of a processor for a drafter of Kimi's width
FEWEST_STEPS = 60  # verify steps below which answers in common are too few to compare by themselves
BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Served:
    """What a report says of a drafter: histogram of its verify steps, and of each answer by the hash of its tokens.

    drafter_sha256: of the folder that this is of now; `changed`: it was another when it was served, by the same name.
    """

    drafter_sha256: str
    changed: bool
    num_steps: int
    histogram: list[int]
    by_answer: dict[str, list[int]]


@dataclass(frozen=True)
class Answer:
    """A document and the stretch [start, stop) of it that is walked; at least num_steps tokens follow it.

    served: the histogram that the engine counted over it; None where it did not serve this answer.
    """

    document: Document
    start: int
    stop: int
    served: list[int] | None = None


@dataclass(frozen=True)
class Agreement:
    """A walk beside the report: over answers that were served themselves where `paired`, else over others."""

    report: Served
    answers: list[Answer]
    walked: list[int]

    @property
    def paired(self) -> bool:
        return self.answers[0].served is not None

    @property
    def lengths(self) -> tuple[float, float]:
        """Acceptance lengths, walked and served."""
        return length(self.walked), length(self.served(self.answers))

    @property
    def furthest(self) -> float:
        """How far apart the two may be."""
        return PAIRED if self.paired else FURTHEST

    @property
    def holds(self) -> bool:
        walked, served = self.lengths
        return abs(walked - served) <= self.furthest

    def served(self, answers: Sequence[Answer]) -> list[int]:
        """The served histogram of these answers, or of the whole report where they were not served."""
        own = [answer.served for answer in answers if answer.served is not None]
        found = acceptance.add_histograms(own or [self.report.histogram])
        return found + [0] * (self.report.num_steps + 1 - len(found))  # the engine leaves out what never happened


def length(histogram: Sequence[int]) -> float:
    """The acceptance length of a histogram that has a step."""
    found = acceptance.acceptance_length(histogram)
    assert found is not None
    return found


def read_served(file: Path, folders: Mapping[str, Path]) -> Served:
    """The figures of one of these drafters (by sha256) in a report of bench/accept_len.py, at its lowest load.

    One that was changed since is known by its name. Raises ReportError, or TrainingError where the report measured
    other drafters, or not greedily.
    """
    variants = [each for each in read_report(file)["variants"] if each["status"] == "ok" and "steps" in each]
    names = {folder.absolute().name: sha256 for sha256, folder in folders.items()}
    ours = [each for each in variants if each.get("drafter_sha256") in folders]
    changed = not ours
    ours = ours or [each for each in variants if Path(each["drafter"]).name in names]
    if not ours:
        found = ", ".join(f"{each['drafter']} ({each.get('drafter_sha256', '')[:12]})" for each in variants) or "none"
        known = " or ".join(f"{name} ({sha256[:12]})" for name, sha256 in names.items())
        raise TrainingError(
            f"{file} measured {found}, not the drafter {known}: give the report of this drafter, served as it is "
            "(`python bench/accept_len.py --drafter`)."
        )
    chosen = min(ours, key=lambda each: each["concurrency"])
    if chosen["temperature"] != 0:
        raise TrainingError(
            f"{file} was measured at temperature {chosen['temperature']}, and a walk is greedy: measure at 0."
        )
    steps: int = chosen["steps"]
    by_answer: dict[str, list[int]] = {}
    for request in chosen["requests"]:
        by_answer.setdefault(request["output_sha256"], request["histogram"])  # a repeat of an answer says nothing new
    histogram = acceptance.add_histograms(request["histogram"] for request in chosen["requests"])
    sha256 = names[Path(chosen["drafter"]).name] if changed else chosen["drafter_sha256"]
    return Served(sha256, changed, steps, histogram, by_answer)


def answers_of(shards: ShardFolder, indices: Iterable[int], max_length: int, report: Served) -> list[Answer]:
    """Answers to walk, at most ANSWERS of TOKENS: those that were served themselves, where there are enough of them.

    Else the longest answer of each of `indices`, without its last tokens where nothing follows it.
    """
    whole = (whole_answer(shards.document(index), report.num_steps, max_length) for index in range(len(shards)))
    paired = _few(_served(answer, report) for answer in whole if answer)
    if sum(sum(answer.served or ()) for answer in paired) >= FEWEST_STEPS:
        return paired
    return _few(longest_answer(shards.document(index), report.num_steps, max_length) for index in indices)


def _few(answers: Iterable[Answer | None]) -> list[Answer]:
    found, tokens = [], 0
    for answer in answers:
        if answer is not None:
            found.append(answer)
            tokens += len(answer.document.input_ids)
        if len(found) == ANSWERS or tokens >= TOKENS:
            break
    return found


def _served(answer: Answer, report: Served) -> Answer | None:
    """The answer with the histogram that the engine counted over it; None where it did not serve it."""
    ids = answer.document.input_ids[answer.start : answer.stop].tolist()
    served = report.by_answer.get(ids_sha256(ids))
    return None if served is None else replace(answer, served=served)


def whole_answer(document: Document, num_steps: int, max_length: int) -> Answer | None:
    """The one answer of a document that was generated on past its end, as `evaluate` takes it; None for another one."""
    marked = np.flatnonzero(document.loss_mask)
    if len(marked) < 2 or not marked[0] or marked[-1] - marked[0] + 1 != len(marked):
        return None
    start, stop = int(marked[0]), int(marked[-1]) + 1
    return Answer(document, start, stop) if stop + num_steps <= len(document.input_ids) <= max_length else None


def longest_answer(document: Document, num_steps: int, max_length: int) -> Answer | None:
    """The longest generated stretch, the tokens that follow a walk taken from its own end; None where none is left."""
    mask = document.loss_mask[:max_length].copy()
    mask[0] = False
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    stretches = [(int(start), int(stop) - num_steps) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    start, stop = max(stretches, key=lambda each: each[1] - each[0], default=(0, 0))
    if stop - start < 2:
        return None
    end = stop + num_steps
    cut = Document(
        input_ids=document.input_ids[:end],
        loss_mask=document.loss_mask[:end],
        aux_hidden=document.aux_hidden[:end],
        final_hidden=document.final_hidden[:end],
        name=document.name,
    )
    return Answer(cut, start, stop)


def walk_answers(model: Eagle3, answers: Sequence[Answer], num_steps: int) -> list[int]:
    """The histogram of a walk over these answers, in fp32."""
    histograms: list[list[int]] = []
    waiting: list[tuple[Document, tuple[int, int]]] = []
    with torch.no_grad():
        for number, answer in enumerate(answers):
            waiting.append((answer.document, (answer.start, answer.stop)))
            full = sum(len(document.input_ids) for document, _ in waiting) >= BATCH_TOKENS
            if full or number == len(answers) - 1:
                found = walk_batch(model, waiting, num_steps, False, torch.float32)
                histograms += [walk.histogram for walk in found]
                waiting = []
    return acceptance.add_histograms(histograms)


def compare(model: Eagle3, shards: ShardFolder, indices: Iterable[int], max_length: int, report: Served) -> Agreement:
    """Walk `model` over the captured features of `indices` (or of the answers that were served) beside its report.

    Raises TrainingError where there is nothing to walk.
    """
    answers = answers_of(shards, indices, max_length, report)
    if not answers:
        raise TrainingError(
            f"{shards.path} has no answer of {report.num_steps + 2} tokens or more to walk: capture longer ones, or "
            "leave --probe out."
        )
    return Agreement(report, answers, walk_answers(model, answers, report.num_steps))


def facts(agreement: Agreement) -> dict[str, Any]:
    """For the manifest of the drafter that is trained."""
    walked, served = agreement.lengths
    return {
        "walked": round(walked, 4),
        "served": round(served, 4),
        "answers": len(agreement.answers),
        "paired": agreement.paired,
    }
