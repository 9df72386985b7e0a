"""The documents of capture shards as training takes them: checked, split, labelled by the target, put into batches.

T tokens of a document, H hidden, V target vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from drafter.data.shards import Document, ShardFolder
from drafter.training.batch import Batch, to_torch
from drafter.training.errors import TrainingError
from drafter.training.ranks import Ranks
from drafter.training.target import Target, best_tokens

WINDOW = 16  # batches' worth of documents that are sorted by length together
BF16_EXPONENT = 0x7F80


class Documents:
    """Documents that can be learnt from; `train` and `held` are their numbers in the shards.

    `agreement` is the share of generated tokens that are the target's own greedy choice by its final hidden states:
    near 1 for greedy answers; far below what the temperature explains, the states are not after the final norm.

    Documents are cut at `max_length` tokens. A document with an answer too short to draft in (fewer than two tokens,
    or cut away) is left out and counted in `left_out`.
    """

    def __init__(
        self,
        shards: ShardFolder,
        target: Target,
        held_share: float,
        max_length: int,
        cache: Path,
        ranks: Ranks | None = None,
    ) -> None:
        """Reads every document once, or the labels that an earlier run left in the folder `cache`.

        Hidden states are read by document, when they are asked for, through a memory map. The labels are made on the
        device of `ranks` (default: the CPU), by each of them for its part of the documents.
        Raises TrainingError naming the document: no generated token, or a hidden state that is not finite; and where
        the split leaves either side empty.
        """
        self.shards = shards
        self.max_length = max_length
        lengths = [len(shards.document(index).input_ids) for index in range(len(shards))]
        self._start = np.cumsum([0, *lengths])
        self.ranks = ranks or Ranks(torch.device("cpu"))
        self._best = self._label(target, cache)
        self.train: list[int] = []
        self.held: list[int] = []
        self.left_out = 0
        agreed = generated = 0
        for index in range(len(shards)):
            document = shards.document(index)
            mask = document.loss_mask[:max_length]
            best = self._best[self._start[index] :][: len(mask) - 1]
            agreed += int((best == document.input_ids[1 : len(mask)])[mask[1:]].sum())
            generated += int(mask[1:].sum())
            if not (mask[1:-1] & mask[2:]).any():
                self.left_out += 1
                continue
            (self.held if split_fraction(document) < held_share else self.train).append(index)
        self.agreement = agreed / max(generated, 1)
        if not self.train or not self.held:
            raise TrainingError(
                f"{shards.path}: of {len(shards)} documents {len(self.train)} are for training, {len(self.held)} held "
                f"out and {self.left_out} too short to use: capture more, or change the held-out share {held_share}."
            )

    def _label(self, target: Target, cache: Path) -> np.ndarray:
        """The target's greedy choice after every position of every document, int32 [all tokens]."""
        key = hashlib.sha256(self.shards.data_hash.encode() + target.head_VH.view(torch.uint8).numpy().tobytes())
        file = cache / f"teacher-{key.hexdigest()[:12]}.npy"
        ranks, found = self.ranks, _labels(file, int(self._start[-1]))
        if not ranks.any(found is None):
            assert found is not None
            return found
        best, head_VH = np.zeros(self._start[-1], np.int32), target.head_VH.to(ranks.device)
        mine = range(ranks.rank, len(self.shards), ranks.world)
        quiet = None if ranks.leads else True
        for index in tqdm(mine, "reading the target's choices", disable=quiet, unit="document"):
            document = self.shards.document(index)
            check_document(document, self.shards.path)
            final_TH = to_torch(document.final_hidden).to(ranks.device)
            best[self._start[index] : self._start[index + 1]] = best_tokens(final_TH, head_VH).cpu().numpy()
        best[:] = ranks.sum(torch.from_numpy(best)).numpy()
        if not ranks.leads:
            return best
        cache.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(".tmp")
        with beside.open("wb") as stream:
            np.save(stream, best)
        beside.replace(file)
        return best

    def tokens(self, indices: Iterable[int]) -> int:
        """Tokens of these documents."""
        return sum(self.length(index) for index in indices)

    def length(self, index: int) -> int:
        """Tokens of one document, after the cut."""
        return min(int(self._start[index + 1] - self._start[index]), self.max_length)

    def batch(self, indices: list[int], hidden: bool = True) -> Batch:
        """These documents, packed; without `hidden` no hidden state is read, and they have no width."""
        cut, best = [], []
        width = None if hidden else 0
        for index in indices:
            whole, length = self.shards.document(index), self.length(index)
            cut.append(
                Document(
                    input_ids=whole.input_ids[:length],
                    loss_mask=whole.loss_mask[:length],
                    aux_hidden=whole.aux_hidden[:length, :width],
                    final_hidden=whole.final_hidden[:length, :width],
                    name=whole.name,
                )
            )
            best.append(torch.from_numpy(self._best[self._start[index] :][:length].astype(np.int64)))
        return Batch.of(cut, best)

    def epoch(self, indices: list[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
        """The batches of an epoch, a function of (seed, epoch) alone.

        Shuffled, sorted by length within windows so that little is padded, packed to at most `batch_tokens` (a longer
        document goes alone), and the batches shuffled again.
        """
        random = np.random.default_rng([seed, epoch])
        order = [indices[int(i)] for i in random.permutation(len(indices))]
        window = max(1, WINDOW * batch_tokens * len(order) // max(1, self.tokens(order)))
        batches: list[list[int]] = []
        for start in range(0, len(order), window):
            room = 0
            for index in sorted(order[start : start + window], key=self.length):
                room -= self.length(index)
                if room < 0:
                    batches.append([])
                    room = batch_tokens - self.length(index)
                batches[-1].append(index)
        return [batches[int(i)] for i in random.permutation(len(batches))]


def _labels(file: Path, count: int) -> np.ndarray | None:
    """The labels that an earlier run left, int32 [count]; None where there are none, or something else."""
    try:
        found: np.ndarray = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    return found if found.dtype == np.int32 and found.shape == (count,) else None


def split_fraction(document: Document) -> float:
    """A number in [0, 1) that depends on the prompt alone, so that answers to one prompt stay on one side of a split.

    A document without a prompt is judged by its whole text.
    """
    start = int(np.argmax(document.loss_mask))
    ids = document.input_ids[:start] if start else document.input_ids
    digest = hashlib.sha256(np.ascontiguousarray(ids, "<i4").tobytes()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def check_document(document: Document, folder: Path) -> None:
    """Raises TrainingError where the document has no generated token or a hidden state that is not finite."""
    if not document.loss_mask.any():
        raise TrainingError(
            f"{folder}, document {document.name}: no token is marked as generated, so nothing can be learnt from it: "
            "capture it again with its answer, or leave it out."
        )
    for name, hidden in (("aux_hidden", document.aux_hidden), ("final_hidden", document.final_hidden)):
        if hidden.dtype == np.uint16:
            finite = (hidden & BF16_EXPONENT) != BF16_EXPONENT
        else:
            finite = np.isfinite(hidden)
        if not finite.all():
            position = int(np.argmin(finite.all(-1)))
            raise TrainingError(
                f"{folder}, document {document.name}: {name} at position {position} is NaN or infinite: the engine "
                "computed it so. Capture it again, or leave it out."
            )
