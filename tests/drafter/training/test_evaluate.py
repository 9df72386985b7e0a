"""The walk against the slow reference: propose over whole texts, then step through each answer."""

import dataclasses

import numpy as np
import pytest
import torch

from drafter.data.shards import Document, open_shards
from drafter.training.errors import TrainingError
from drafter.training.evaluate import evaluate
from drafter.training.model import load_drafter
from drafter.training.target import load_target
from tests.drafter.training.shard_folder import write_shards
from tests.tiny.eagle import acceptance_length, load, walk

NAMES = ["mha_perfect", "mha_noised_a", "mha_noised_b"]


def reference_histogram(slow, document: Document, steps: int) -> list[int]:
    text = document.input_ids.tolist()
    marked = np.flatnonzero(document.loss_mask)
    aux, tokens = torch.from_numpy(document.aux_hidden)[None, :-1], torch.tensor([text[1:]])
    guesses = slow.propose(aux, tokens, steps)[0].tolist()
    return walk(text, guesses, int(marked[0]), int(marked[-1]) + 1)


@pytest.fixture
def shards(tmp_path, llama, answered):
    return open_shards(write_shards(tmp_path / "shards", answered, llama))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize("batch_tokens", [1, 2048])
def test_walks_equal_the_reference(llama, answered, shards, monkeypatch, name, steps, batch_tokens):
    monkeypatch.setattr("drafter.training.evaluate.BATCH_TOKENS", batch_tokens)
    embed = load_target(llama.target).embed_VH
    slow = load(llama.drafters[name], embed)
    wanted = [reference_histogram(slow, document, steps) for document in answered]
    found = evaluate(load_drafter(llama.drafters[name], embed), shards, steps)
    assert [walk.histogram for walk in found.walks] == wanted
    total = [sum(column) for column in zip(*wanted, strict=True)]
    summary = found.summary()
    assert summary["histogram"] == total
    assert summary["acceptance_length"] == pytest.approx(acceptance_length(total))
    assert summary["acceptance_length"] == pytest.approx(1 + sum(summary["full_acc"]))
    assert len(summary["documents"]) == len(answered)


def test_the_oracle_feeds_true_features_and_tokens(llama, answered, shards):
    """By brute force: at each verify step a text of its own, later steps fed with fc of the target's features."""
    embed = load_target(llama.target).embed_VH
    slow, steps = load(llama.drafters["mha_noised_b"], embed), 3
    for document, found in zip(
        answered, evaluate(load_drafter(llama.drafters["mha_noised_b"], embed), shards, steps, True).walks, strict=True
    ):
        text, marked = document.input_ids.tolist(), np.flatnonzero(document.loss_mask)
        fused = slow.fuse(torch.from_numpy(document.aux_hidden)[None])
        histogram, last, stop = [0] * (steps + 1), int(marked[0]), int(marked[-1]) + 1
        while last < stop - 1:
            kept, earlier, row = 0, [], last - 1
            for k in range(steps):
                fed = torch.tensor([text[1 + k : last + 1 + k]])
                _, logits = slow.step(fused[:, k : row + 1 + k], fed, earlier)
                if int(slow.target_ids_U[logits[0, row].argmax()]) != text[last + 1 + k]:
                    break
                kept += 1
            histogram[kept] += 1
            last += kept + 1
        assert found.histogram == histogram


def test_a_worse_roll_out_shows_against_the_oracle(llama, shards):
    """A drafter whose own features are turned round is as good at the first guess and bad after; the oracle is not."""
    model = load_drafter(llama.drafters["mha_perfect"], load_target(llama.target).embed_VH)
    later = model.later
    model.later = lambda hidden, tokens, memory: later(-hidden, tokens, memory)
    broken, oracle = (evaluate(model, shards, 3, hidden).summary() for hidden in (False, True))
    assert broken["full_acc"][0] > 0.9
    assert broken["flatness"] < 0.9 * oracle["flatness"]


def moved(array: np.ndarray) -> np.ndarray:
    return np.roll(array, 1, axis=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: {"aux_hidden": np.roll(d.aux_hidden, 64, axis=1)},
        lambda d: {"aux_hidden": moved(d.aux_hidden)},
        lambda d: {"input_ids": moved(d.input_ids)},
        lambda d: {"loss_mask": moved(d.loss_mask)},
    ],
    ids=["layer order", "features one late", "tokens one late", "mask one late"],
)
def test_each_fault_changes_the_walk(tmp_path, llama, answered, shards, change):
    faulty = [dataclasses.replace(document, **change(document)) for document in answered]
    model = load_drafter(llama.drafters["mha_noised_a"], load_target(llama.target).embed_VH)
    wrong = evaluate(model, open_shards(write_shards(tmp_path / "wrong", faulty, llama)), 3)
    assert [w.histogram for w in wrong.walks] != [w.histogram for w in evaluate(model, shards, 3).walks]


def with_mask(document: Document, *marked: int) -> Document:
    mask = np.zeros(len(document.input_ids), dtype=bool)
    mask[list(marked)] = True
    return dataclasses.replace(document, loss_mask=mask)


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        ((), "no token is marked"),
        ((3, 4, 9, 10), "more than one answer"),
        ((0, 1, 2), "no prompt"),
        ((5,), "one token"),
        ((-4, -3), "2 tokens after its answer but 3 draft steps need 3"),
    ],
)
def test_what_cannot_be_walked(tmp_path, llama, answered, marked, message):
    folder = write_shards(tmp_path / "s", [with_mask(answered[0], *marked)], llama)
    model = load_drafter(llama.drafters["mha_perfect"], load_target(llama.target).embed_VH)
    with pytest.raises(TrainingError, match=message):
        evaluate(model, open_shards(folder), 3)
