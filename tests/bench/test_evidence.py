"""Intervals and comparisons from the requests of a report."""

from __future__ import annotations

from typing import Any

import pytest

from bench.evidence import comparisons, counted, has_interval, interval


def variant(name: str, histograms: dict[str, list[list[int]]], speed: float = 10.0) -> dict[str, Any]:
    """`histograms`: those of each prompt's answers; a prompt's category is its first letter."""
    requests = [
        {"prompt_id": prompt, "category": prompt[0], "histogram": histogram, "tokens": 8, "seconds": 8 / speed}
        for prompt, some in histograms.items()
        for histogram in some
    ]
    spoke = any(sum(histogram) for _, some in histograms.items() for histogram in some)
    return {
        "drafter": name,
        "requests": requests,
        "tokens_per_second": speed,
        "concurrency": 4,
        "thinking": "default",
        **({"acceptance_length": 1.0} if spoke else {}),
    }


def test_answers_of_one_prompt_are_one_row() -> None:
    counts, prompts, categories = counted(variant("x", {"a1": [[2, 1], [0, 0, 3]], "b1": [[4]]}))
    assert (prompts, categories) == (["a1", "b1"], ["a", "b"])
    assert counts.accepted.tolist() == [7, 0]
    assert counts.steps.tolist() == [6, 4]


@pytest.mark.parametrize(
    ("histograms", "expected"),
    [({"a1": [[1, 1]], "a2": [[2]]}, True), ({"a1": [[1, 1], [2]]}, False), ({"a1": [[]], "a2": [[]]}, False)],
)
def test_who_has_an_interval(histograms: dict[str, list[list[int]]], expected: bool) -> None:
    assert has_interval(variant("x", histograms)) is expected


def test_the_interval_lies_about_the_figure() -> None:
    low, high = interval(variant("x", {f"a{n}": [[n, 10 - n]] for n in range(11)}))
    assert 1 < low < 1.5 < high < 2


def test_every_two_that_speculated_on_the_same_prompts() -> None:
    prompts = [f"{letter}{n}" for letter in "ab" for n in range(12)]
    good = variant("good", {prompt: [[2, 8]] for prompt in prompts}, 20.0)
    same = variant("same", {prompt: [[2, 8]] for prompt in prompts}, 15.0)
    poor = variant("poor", {prompt: [[6 + n % 3, 4 - n % 3]] for n, prompt in enumerate(prompts)})
    other = variant("other", {prompt: [[2, 8]] for prompt in prompts[1:]})
    none = variant("none", {prompt: [[]] for prompt in prompts})
    found = {(each["a"], each["b"]): each for each in comparisons([none, good, same, poor, other])}
    assert found.keys() == {("good", "same"), ("good", "poor"), ("same", "poor")}
    worse = found["good", "poor"]
    assert worse["delta_acceptance_length"] == pytest.approx(-0.5)
    assert worse["ci95"][0] < -0.5 < worse["ci95"][1] < -0.4
    assert worse["p_adjusted"] < 0.01 and worse["speedup"] == 0.5
    assert found["good", "same"]["ci95"] == [0, 0] and found["good", "same"]["p_adjusted"] == 1
