"""The statistics on what real drafters did: who is better, when nobody is, and how many prompts it takes to tell.

A trial draws prompts with replacement.
"""

from __future__ import annotations

import numpy as np
import pytest

from bench.stats import Counts, difference, prompts_needed
from drafter.acceptance import accepted_tokens, verify_steps
from tests.bench.recorded import FILE, read_recorded

RECORDED = read_recorded()
PROMPTS = list(RECORDED.categories)
A, B = RECORDED.greedy
category_of = np.array([RECORDED.categories[prompt] for prompt in PROMPTS])


def table(histograms: dict[str, list[list[int]]]) -> np.ndarray:
    """[prompt, answer, (accepted, steps)]."""
    rows = [[(accepted_tokens(each), verify_steps(each)) for each in histograms[prompt]] for prompt in PROMPTS]
    return np.array(rows, dtype=float)


SAMPLED = {name: table(histograms) for name, histograms in RECORDED.sampled.items()}
GREEDY = {name: table(histograms)[:, 0] for name, histograms in RECORDED.greedy.items()}
ANSWERS = 4


def counts(rows: np.ndarray) -> Counts:
    return Counts(rows[:, 0], rows[:, 1])


def drawn(random: np.random.Generator, size: int) -> np.ndarray:
    """Places of `size` prompts, each category in its share."""
    return np.concatenate(
        [
            random.choice(np.flatnonzero(category_of == name), round(size * float((category_of == name).mean())))
            for name in sorted(set(category_of.tolist()))
        ]
    )


def truth(name: str) -> float:
    return counts(GREEDY[name]).acceptance_length


def test_the_recording_is_small_and_whole() -> None:
    assert FILE.stat().st_size < 300_000
    assert len(PROMPTS) == 80 and set(RECORDED.sampled) == set(RECORDED.greedy)
    for name in (A, B):
        assert SAMPLED[name].shape == (80, ANSWERS, 2) and GREEDY[name].shape == (80, 2)
        assert len({tuple(row) for row in GREEDY[name].tolist()}) > 40, "prompts differ"
        alike = (SAMPLED[name] == SAMPLED[name][:, :1]).all(axis=(1, 2))
        assert alike.mean() < 0.1, "answers to one prompt differ"
    assert 0.05 < truth(A) - truth(B) < 0.2


def test_two_drafters_are_ordered_rightly_in_19_of_20() -> None:
    random, right = np.random.default_rng(1), 0
    for _ in range(20):
        places = drawn(random, len(PROMPTS))
        found = difference(counts(GREEDY[B][places]), counts(GREEDY[A][places]), category_of[places].tolist())
        right += found.value > 0
    assert right >= 19, f"{right} of 20"


@pytest.mark.parametrize("name", [A, B])
def test_a_drafter_against_itself_is_called_different_in_8_percent_at_most(name: str) -> None:
    random, called = np.random.default_rng(2), 0
    for trial in range(1_000):
        places = drawn(random, len(PROMPTS))
        first = random.integers(ANSWERS, size=len(places))
        second = (first + random.integers(1, ANSWERS, size=len(places))) % ANSWERS  # another answer to the same prompt
        pair = (counts(SAMPLED[name][places, answers]) for answers in (first, second))
        called += difference(*pair, category_of[places].tolist(), seed=trial, resamplings=500).called
    assert called <= 80, f"{called} of 1,000"
    assert called >= 15, f"{called} of 1,000: an interval that is never wrong is too wide to find anything"


@pytest.mark.parametrize("name", [A, B])
def test_a_difference_of_005_is_found_at_the_size_asked_for(name: str) -> None:
    """A drafter's drawn answers against others of its own with 0.05 accepted tokens more in every step."""

    def trial(random: np.random.Generator, size: int) -> tuple[Counts, Counts, list[str]]:
        places = drawn(random, size)
        first = random.integers(ANSWERS, size=len(places))
        second = (first + random.integers(1, ANSWERS, size=len(places))) % ANSWERS
        better = SAMPLED[name][places, second] @ np.array([[1.0, 0.0], [0.05, 1.0]])
        return counts(SAMPLED[name][places, first]), counts(better), category_of[places].tolist()

    random = np.random.default_rng(3)
    pilots = [prompts_needed(difference(*trial(random, 80), seed=n, resamplings=500), 80) for n in range(5)]
    needed = int(np.median(pilots))
    assert 40 < needed < 5_000
    called = sum(difference(*trial(random, needed), seed=n, resamplings=500).low > 0 for n in range(200))
    assert called >= 150, f"{called} of 200 with {needed} prompts"  # 160 are expected
