"""The figures of a variant against brute force over its requests, and the shape of the report they make."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.figures import figures
from bench.load import Block, Sampling, request_body
from bench.lossless import Pair, greedy_equal
from bench.stream import Answer

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


def test_a_body_does_not_share_the_prompt():
    message = {"role": "user", "content": "x"}
    body = request_body("m", (message,), Sampling(max_tokens=5, seed=7), place=3)
    body["messages"][0]["content"] = "changed"
    assert message["content"] == "x"
    assert body["seed"] == 10
