"""What an engine would accept: greedy answers walked step by step, with the drafter's own guesses fed back.

Documents are a prompt, the target's greedy answer (the loss mask) and what plain decoding wrote after it with the end
token ignored: the last verify step counts in full, as an engine counts it. T packed tokens, R query rows, K steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from drafter import acceptance
from drafter.data.shards import Document, ShardFolder
from drafter.training.attention import Layout
from drafter.training.batch import to_torch
from drafter.training.documents import check_document
from drafter.training.errors import TrainingError
from drafter.training.model import Eagle3

BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Walk:
    """One document's verify steps, and how many of its answer's tokens the drafter cannot say."""

    name: str
    histogram: list[int]
    tokens: int
    out_of_vocabulary: int
    looping: bool


@dataclass
class Evaluation:
    """All documents' walks."""

    num_steps: int
    walks: list[Walk] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Figures over all documents by drafter/acceptance.py, and those of each."""
        total = acceptance.add_histograms(walk.histogram for walk in self.walks)
        plain = acceptance.add_histograms(walk.histogram for walk in self.walks if not walk.looping)
        return {
            "num_steps": self.num_steps,
            **figures(total),
            "acceptance_length_no_loops": acceptance.acceptance_length(plain),
            "loop_share": sum(walk.looping for walk in self.walks) / len(self.walks),
            "oov_rate": sum(walk.out_of_vocabulary for walk in self.walks) / sum(walk.tokens for walk in self.walks),
            "documents": [
                {"name": walk.name, "tokens": walk.tokens, "looping": walk.looping, **figures(walk.histogram)}
                for walk in self.walks
            ],
        }


def figures(histogram: list[int]) -> dict[str, Any]:
    """The histogram and everything that is derived from it."""
    return {
        "histogram": histogram,
        "acceptance_length": acceptance.acceptance_length(histogram),
        "full_acc": acceptance.full_acc(histogram),
        "cond_acc": acceptance.cond_acc(histogram),
        "flatness": acceptance.flatness(histogram),
    }


def evaluate(
    model: Eagle3,
    shards: ShardFolder,
    num_steps: int,
    oracle_hidden: bool = False,
    dtype: torch.dtype = torch.float32,
    limit: int | None = None,
) -> Evaluation:
    """Walk every document, or the first `limit`, with `num_steps` draft steps.

    `oracle_hidden` gives each later step the target's own features and the true tokens, in place of the drafter's
    output and guesses: what a drafter with a perfect roll-out would reach. Where that is far better than the plain
    figure the roll-out is at fault; where it is as low, the first step is.
    Raises TrainingError for a document that cannot be walked.
    """
    found, tokens, count = Evaluation(num_steps), 0, min(len(shards), limit or len(shards))
    waiting: list[tuple[Document, tuple[int, int]]] = []
    with torch.no_grad(), tqdm(total=count, desc="walk", unit="answer", disable=None) as bar:
        for index in range(count):
            document = shards.document(index)
            waiting.append((document, answer_span(document, num_steps, shards.path)))
            tokens += len(document.input_ids)
            if tokens >= BATCH_TOKENS:
                found.walks += walk_batch(model, waiting, num_steps, oracle_hidden, dtype)
                bar.update(len(waiting))
                waiting, tokens = [], 0
        if waiting:
            found.walks += walk_batch(model, waiting, num_steps, oracle_hidden, dtype)
            bar.update(len(waiting))
    if not found.walks:
        raise TrainingError("there is no document to walk: capture some greedy answers first.")
    return found


def answer_span(document: Document, num_steps: int, folder: Path) -> tuple[int, int]:
    """Positions [start, stop) of the answer. Raises TrainingError where the document cannot be walked."""
    check_document(document, folder)
    marked = np.flatnonzero(document.loss_mask)
    start, stop, length = int(marked[0]), int(marked[-1]) + 1, len(document.input_ids)
    problem = None
    if stop - start != len(marked):
        problem = "has more than one answer: evaluate takes a prompt and one greedy answer"
    elif start == 0:
        problem = "has no prompt: an engine drafts only after a prefill"
    elif stop - start < 2:
        problem = "has an answer of one token, which prefill writes: nothing is drafted"
    elif length < stop + num_steps:
        problem = (
            f"has {length - stop} tokens after its answer but {num_steps} draft steps need {num_steps}: generate on "
            "past the end, with the end token ignored, and capture that too"
        )
    if problem:
        raise TrainingError(f"{folder}, document {document.name} {problem}.")
    return start, stop


def propose(
    model: Eagle3, aux_TA: Tensor, tokens_T: Tensor, layout: Layout, num_steps: int, dtype: torch.dtype
) -> Tensor:
    """Greedy guesses from every query row, int64 target ids [R, K]; row i is fed with feature i and token i + 1."""
    fed_R = tokens_T.roll(-1)
    guesses: list[Tensor] = []
    for k in range(num_steps):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            if k == 0:
                hidden_RH, memory = model.first(aux_TA.to(dtype), fed_R, layout)
            else:
                hidden_RH = model.later(hidden_RH, fed_R, memory)
            fed_R = model.target_ids_U[model.logits(hidden_RH).max(-1).indices]
        guesses.append(fed_R)
    return torch.stack(guesses, dim=-1)


def walk(text: list[int], guesses: list[list[int]], start: int, stop: int) -> list[int]:
    """Histogram of a walk over the answer text[start:stop]; `guesses[j]` was made after text[start + j].

    Prefill writes text[start]. Each step keeps the guesses that equal the text and adds the target's own token.
    """
    steps = len(guesses[0])
    histogram = [0] * (steps + 1)
    last = start
    while last < stop - 1:
        kept = 0
        while kept < steps and guesses[last - start][kept] == text[last + 1 + kept]:
            kept += 1
        histogram[kept] += 1
        last += kept + 1
    return histogram


def walk_batch(
    model: Eagle3,
    documents: list[tuple[Document, tuple[int, int]]],
    num_steps: int,
    oracle_hidden: bool,
    dtype: torch.dtype,
) -> list[Walk]:
    """Walk documents of one answer each, [start, stop), packed together; each reaches `num_steps` tokens past it."""
    lengths = [len(document.input_ids) for document, _ in documents]
    offsets = np.cumsum([0, *lengths])
    ahead = num_steps - 1 if oracle_hidden else 0  # an oracle's step k is the first step of the row k further on
    query_T = torch.zeros(int(offsets[-1]), dtype=torch.bool)
    for offset, (_, (start, stop)) in zip(offsets, documents, strict=False):
        query_T[offset + start - 1 : offset + stop - 2 + ahead] = True
    guess_RK = propose(
        model,
        torch.cat([to_torch(document.aux_hidden) for document, _ in documents]),
        torch.cat([to_torch(document.input_ids) for document, _ in documents]).long(),
        Layout.of(lengths, query_T),
        1 if oracle_hidden else num_steps,
        dtype,
    )
    walks, at = [], 0
    for document, (start, stop) in documents:
        text, rows = document.input_ids.tolist(), stop - start - 1
        guesses = guess_RK[at : at + rows + ahead]
        if oracle_hidden:
            guesses = guesses[:, 0].unfold(0, num_steps, 1)
        answer = document.input_ids[start:stop]
        walks.append(
            Walk(
                name=document.name,
                histogram=walk(text, guesses.tolist(), start, stop),
                tokens=stop - start,
                out_of_vocabulary=int((~model.vocab.t2d[answer]).sum()),
                looping=acceptance.is_looping(answer.tolist()),
            )
        )
        at += rows + ahead
    return walks
