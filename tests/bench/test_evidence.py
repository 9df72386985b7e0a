"""Intervals and comparisons from the requests of a report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.evidence import all_clear, comparisons, counted, has_interval, interval, probe_line, speed_of
from bench.stats import looks_confidence


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


def test_pairs_are_of_one_load_and_holm_is_over_its_pairs_alone() -> None:
    random = np.random.default_rng(4)
    prompts = [f"{letter}{n}" for letter in "ab" for n in range(8)]

    def noisy(name: str) -> dict[str, Any]:
        return variant(name, {prompt: [[int(n) for n in random.integers(1, 9, 3)]] for prompt in prompts})

    low, high = [noisy(name) for name in "xyz"], [{**noisy(name), "concurrency": 8} for name in "xyz"]
    found = comparisons([*low, *high])
    assert [(row["a"], row["b"], row["concurrency"]) for row in found] == [
        (a, b, count) for count in (4, 8) for a, b in (("x", "y"), ("x", "z"), ("y", "z"))
    ]
    assert found[:3] == comparisons(low) and found[3:] == comparisons(high)
    twice = comparisons(low, looks_confidence(2))
    for wide, narrow in zip(twice, found, strict=False):
        assert wide["ci95"][0] <= narrow["ci95"][0] and narrow["ci95"][1] <= wide["ci95"][1]
        assert wide["p_adjusted"] >= narrow["p_adjusted"]


def test_all_is_clear_when_every_pair_is() -> None:
    prompts = [f"{letter}{n}" for letter in "ab" for n in range(12)]
    good = variant("good", {prompt: [[2, 8]] for prompt in prompts})
    same = variant("same", {prompt: [[2, 8]] for prompt in prompts})
    poor = variant("poor", {prompt: [[6 + n % 3, 4 - n % 3]] for n, prompt in enumerate(prompts)})
    assert all_clear([good, poor], 0.95)
    assert not all_clear([good, same, poor], 0.95)
    assert not all_clear([good, poor, {**good, "concurrency": 8}, {**same, "concurrency": 8}], 0.95)
    assert not all_clear([good], 0.95), "nothing to compare is not clear"


def timed(name: str, speed: float, seconds: list[float], **more: Any) -> dict[str, Any]:
    found = variant(name, {f"a{n}": [[1, 1]] for n in range(len(seconds))}, speed)
    for request, each in zip(found["requests"], seconds, strict=True):
        request["seconds"] = each
    return {**found, **more}


def test_whether_it_loses_is_said_where_it_is_clear() -> None:
    base = timed("none", 10.0, [1.0] * 12)
    del base["acceptance_length"]
    for speed, seconds, loses, words in (
        (20.0, [0.5] * 12, False, "it pays"),
        (5.0, [2.0] * 12, True, "it loses"),
        (10.4, [0.3, 1.6] * 6, None, "which of them is faster is not clear"),
    ):
        mine = timed("new", speed, seconds)
        mine |= speed_of(mine, base)
        assert mine.get("loses") is loses and mine["speedup"] == pytest.approx(speed / 10)
        assert mine["speedup_ci95"][0] <= mine["speedup"] <= mine["speedup_ci95"][1]
        line = probe_line(mine, base)
        assert words in line and f"{speed:.1f} tokens/s against 10.0 of none" in line
    # As clear by its prompts as before, but the second pass says the opposite: the machine was not the same.
    passes = [{"repeat": 0, "tokens": 40, "seconds": 1.0}, {"repeat": 1, "tokens": 9, "seconds": 1.0}]
    shaky = timed("new", 20.0, [0.5] * 12, blocks=passes)
    same = {**base, "blocks": [{"repeat": n, "tokens": 10, "seconds": 1.0} for n in (0, 1)]}
    assert speed_of(shaky, same) == {"speedup": 2.0, "speedup_ci95": [pytest.approx(0.9), pytest.approx(4.0)]}
    alone = timed("new", 5.0, [1.0])
    assert speed_of(alone, timed("none", 10.0, [1.0])) == {"speedup": 0.5}, "one prompt has no interval"
    mine |= speed_of(mine, {**base, "acceptance_length": 2.0}) | {"loses": True, "foreign_vocabulary": True}
    assert "it is slower" in probe_line(mine, {**base, "acceptance_length": 2.0})
    assert "its draft vocabulary was chosen elsewhere" in probe_line(mine, base)
