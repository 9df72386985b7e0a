"""The figures of a variant against brute force over its requests, and the shape of the report they make."""

import math
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.figures import figures
from bench.load import Block, Sampling, request_body
from bench.lossless import Pair, greedy_equal
from bench.schedule import Unit, in_order, parts_of, rounds
from bench.stream import Answer, placed_steps
from drafter.data.prompts import Prompt

SECONDS = st.floats(0.001, 100.0)


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    steps = draw(st.lists(st.integers(0, 3), max_size=30))
    histogram = [steps.count(accepted) for accepted in range(max(steps) + 1)] if steps else []
    length = 1 + len(steps) + sum(steps)
    ids = tuple(range(length)) if draw(st.booleans()) else (5,) * length
    ttft = draw(SECONDS)
    return Answer(
        prompt_id=draw(st.text(max_size=3)),
        category=draw(st.sampled_from("abc")),
        tokens=length,
        seconds=ttft + draw(SECONDS),
        ttft_s=ttft,
        gaps_s=tuple(draw(st.lists(SECONDS, max_size=5))),
        histogram=tuple(histogram),
        output_ids=ids,
    )


BLOCKS = st.lists(
    st.builds(Block, st.lists(answers(), min_size=1, max_size=6).map(tuple), SECONDS), min_size=1, max_size=3
)


def steps_of(chosen: list[Answer]) -> list[int]:
    return [accepted for answer in chosen for accepted, count in enumerate(answer.histogram) for _ in range(count)]


def quantile(values: list[float], share: float) -> float:
    """Linear interpolation between the two nearest ranks."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def check_acceptance(table: dict[str, Any], chosen: list[Answer], positions: int) -> None:
    assert table["answers"] == len(chosen)
    assert table["tokens"] == sum(answer.tokens for answer in chosen)
    loops = [answer for answer in chosen if len(answer.output_ids) >= 32 and len(set(answer.output_ids)) == 1]
    assert table["loop_share"] == len(loops) / len(chosen)
    calm = [answer for answer in chosen if answer not in loops]
    for name, steps in (
        ("acceptance_length", steps_of(chosen)),
        ("acceptance_length_no_loops", steps_of(calm)),
    ):
        if steps:
            assert table[name] == pytest.approx(1 + sum(steps) / len(steps))
        else:
            assert name not in table
    steps = steps_of(chosen)
    if not steps:
        assert "full_acc" not in table and "cond_acc" not in table and "flatness" not in table
        return
    full = [sum(accepted > k for accepted in steps) / len(steps) for k in range(positions)]
    reached = [sum(accepted >= k for accepted in steps) for k in range(positions)]
    conditional = [
        sum(accepted > k for accepted in steps) / count if count else None
        for k, count in zip(range(positions), reached, strict=True)
    ]
    assert table["full_acc"] == pytest.approx(full)
    assert [rate is None for rate in table["cond_acc"]] == [rate is None for rate in conditional]
    assert [rate for rate in table["cond_acc"] if rate is not None] == pytest.approx(
        [rate for rate in conditional if rate is not None]
    )
    if conditional[0] and conditional[1] is not None:
        assert table["flatness"] == pytest.approx(conditional[1] / conditional[0])
    else:
        assert "flatness" not in table


@given(BLOCKS)
def test_figures_by_brute_force(blocks: list[Block]):
    table = figures(blocks, positions=3)
    chosen = [answer for block in blocks for answer in block.answers]
    check_acceptance(table, chosen, 3)
    assert table["tokens_per_second"] == pytest.approx(
        sum(answer.tokens for answer in chosen) / sum(block.seconds for block in blocks)
    )
    assert table["ttft_ms_p50"] == pytest.approx(1000 * quantile([answer.ttft_s for answer in chosen], 0.5))
    per_token = [(a.seconds - a.ttft_s) / (a.tokens - 1) for a in chosen if a.tokens > 1]
    gaps = [gap for answer in chosen for gap in answer.gaps_s]
    for name, values, share in (("tpot_ms_p50", per_token, 0.5), ("itl_ms_p99", gaps, 0.99)):
        if values:
            assert table[name] == pytest.approx(1000 * quantile(values, share))
        else:
            assert name not in table
    assert set(table["categories"]) == {answer.category for answer in chosen}
    for category, part in table["categories"].items():
        check_acceptance(part, [answer for answer in chosen if answer.category == category], 3)


def answer_of(ids: tuple[int, ...], prompt: str = "p") -> Answer:
    return Answer(prompt, "c", len(ids), 1.0, 0.5, (), (), ids)


def test_equality_is_of_whole_answers():
    baseline = [answer_of((1, 2, 3)), answer_of((1, 2, 3)), answer_of((1, 2, 3)), answer_of(())]
    mine = [answer_of((1, 2, 3)), answer_of((1, 2)), answer_of((1, 2, 4)), answer_of(())]
    pairs = [Pair(0, a, b) for a, b in zip(mine, baseline, strict=True)]
    assert greedy_equal(pairs, "default", None, "float32") == {"equal": 2, "total": 4}
    assert greedy_equal([Pair(0, a, a) for a in mine], "default", None, "float32") == {"equal": 4, "total": 4}


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.data())
def test_steps_are_placed_where_each_came_by_itself(steps: list[int], data: st.DataObject):
    """Pieces of a stream in which steps came one by one or together, the last step cut by max_tokens."""
    cut = data.draw(st.integers(0, steps[-1]))
    totals = list(accumulate((accepted + 1 for accepted in steps), initial=1))
    totals[-1] -= cut
    seen = data.draw(st.lists(st.booleans(), min_size=len(totals), max_size=len(totals)))
    shown = [total for total, there in zip(totals, seen, strict=True) if there]
    histogram = [steps.count(accepted) for accepted in range(max(steps) + 1)]
    found = placed_steps(shown, totals[-1], histogram)
    # The prefill's own token and the end are known without a piece.
    assert found == (tuple(steps) if all(seen[1:-1]) else None)


def test_steps_that_contradict_the_histogram_are_not_placed():
    assert placed_steps([1, 3, 5], 5, [0, 2]) == (1, 1)
    assert placed_steps([1, 3, 5], 5, [1, 0, 1]) is None
    assert placed_steps([1, 3, 5], 5, [1, 0, 0, 1]) is None
    assert placed_steps([1, 2], 2, []) is None


@given(BLOCKS)
def test_places_add_up_to_the_whole(blocks: list[Block]):
    steps = [sum(answer.histogram) for block in blocks for answer in block.answers]
    placed = [replace(answer, accepted=tuple(steps_of([answer]))) for block in blocks for answer in block.answers]
    table = figures([Block(tuple(placed), 1.0)], positions=3)
    if not sum(steps):
        assert "placed_share" not in table
        return
    assert table["placed_share"] == 1.0
    for name in ("by_answer_position", "by_context_length"):
        buckets = table[name]
        assert sum(bucket["steps"] for bucket in buckets) == sum(steps)
        weighted = sum(bucket["steps"] * bucket["acceptance_length"] for bucket in buckets)
        assert weighted / sum(steps) == pytest.approx(table["acceptance_length"])
        assert all(low["to"] <= high["from"] for low, high in pairwise(buckets))


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40), st.integers(1, 5))
def test_every_part_has_its_share_of_every_category(categories: list[str], parts: int):
    prompts = [Prompt(str(place), category, ()) for place, category in enumerate(categories)]
    found = parts_of(prompts, parts)
    assert sorted(place for part in found for place in part) == list(range(len(prompts)))
    for category in set(categories):
        shares = [sum(categories[place] == category for place in part) for part in found]
        assert max(shares) - min(shares) <= 1
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize(
    ("interleave", "seconds", "expected"),
    [
        ("on", 900.0, [[0], [1], [2], [3]]),
        ("off", 1.0, [[0, 1, 2, 3]]),
        ("auto", 120.0, [[0], [1], [2], [3]]),
        ("auto", 121.0, [[0, 1], [2, 3]]),
    ],
)
def test_what_is_measured_between_two_starts(interleave: Any, seconds: float, expected: list[list[int]]):
    units = [Unit(repeat, 0) for repeat in range(4)]
    assert [[unit.repeat for unit in some] for some in rounds(units, interleave, seconds)] == expected
    backwards = interleave == "auto" and seconds > 120
    assert in_order(3, 1, interleave, seconds) == ([2, 1, 0] if backwards else [0, 1, 2])
    assert in_order(3, 0, interleave, seconds) == [0, 1, 2]


def test_a_body_does_not_share_the_prompt():
    message = {"role": "user", "content": "x"}
    body = request_body("m", (message,), Sampling(max_tokens=5, seed=7), place=3)
    body["messages"][0]["content"] = "changed"
    assert message["content"] == "x"
    assert body["seed"] == 10
