"""Speed-ups from costs and acceptance against brute force; the adaptive config against SGLang's own reader and rule."""

import itertools
import json
import random
from pathlib import Path

import pytest

from drafter.acceptance import acceptance_length as of_histogram
from drafter.acceptance import full_acc
from drafter.speedup import (
    Costs,
    acceptance_length,
    adaptive_config,
    best_steps,
    even_acceptance,
    rate_of,
    speedup,
    stops_paying,
)


def costs(ratios: dict[int, dict[int, float]], decode: float = 10.0) -> Costs:
    """Costs by the ratio C / T1."""
    return Costs(
        dict.fromkeys(ratios, decode),
        {batch: {k: decode * ratio for k, ratio in row.items()} for batch, row in ratios.items()},
        "made up",
    )


def simulate(rate: float, steps: int, decode_ms: float, cycle_ms: float, tokens: int, seed: int) -> float:
    """Speed with speculation over speed without, by throwing dice for every token."""
    dice = random.Random(seed)
    spent, done = 0.0, 0
    while done < tokens:
        accepted = next((place for place in range(steps) if dice.random() >= rate), steps)
        done += accepted + 1
        spent += cycle_ms
    return done * decode_ms / spent


@pytest.mark.parametrize(
    ("rate", "steps", "cycle_ms"), [(0.7, 3, 14.0), (0.3, 1, 15.0), (0.9, 7, 40.0), (0.0, 2, 12.0)]
)
def test_the_formula_is_what_dice_give(rate: float, steps: int, cycle_ms: float):
    known = costs({1: {steps: cycle_ms / 10}})
    expected = simulate(rate, steps, 10.0, cycle_ms, 200_000, seed=steps)
    assert speedup(known, even_acceptance(rate, steps), 1, steps) == pytest.approx(expected, rel=0.01)


def test_a_shorter_chain_of_the_same_drafter():
    histogram = [20, 10, 5, 65]  # of a chain of three; a chain of k accepts min(accepted, k)
    for steps in range(4):
        cut = [0] * (steps + 1)
        for accepted, count in enumerate(histogram):
            cut[min(accepted, steps)] += count
        assert acceptance_length(full_acc(histogram), steps) == pytest.approx(of_histogram(cut))
    with pytest.raises(ValueError, match="known for 3 draft steps, asked for 4"):
        acceptance_length(full_acc(histogram), 4)


def test_break_even_is_where_the_speed_up_is_one():
    known = costs({4: {3: 1.9}})
    at_break_even = even_acceptance(rate_of(known.ratio(4, 3), 3), 3)
    assert speedup(known, at_break_even, 4, 3) == pytest.approx(1.0)
    assert known.ratio(4, 0) == 1.0


@pytest.mark.parametrize("seed", range(20))
def test_the_best_number_of_steps_is_the_best_of_all(seed: int):
    dice = random.Random(seed)
    known = costs({8: {k: 1 + dice.random() * k for k in range(1, 8)}})
    rates = sorted((dice.random() for _ in range(dice.randint(1, 7))), reverse=True)
    every = {0: 1.0} | {k: (1 + sum(rates[:k])) / known.ratio(8, k) for k in range(1, len(rates) + 1)}
    steps, gain = best_steps(known, rates, 8)
    assert gain == max(every.values()) and every[steps] == gain


def test_the_load_from_which_speculation_loses():
    rates = [0.6, 0.36, 0.2]
    row = {1: {1: 1.1, 3: 1.3}, 8: {1: 1.7, 3: 2.5}, 16: {1: 1.2, 3: 1.8}, 32: {1: 1.7, 3: 3.0}, 64: {1: 1.8, 3: 3.1}}
    assert stops_paying(costs(row), rates) == 32  # at 8 it loses too, but not from there on
    assert stops_paying(costs({1: row[1]}), rates) is None
    assert stops_paying(costs({64: row[64]}), rates) == 64


def test_an_even_rate_is_found_and_an_impossible_one_refused():
    for rate, steps in itertools.product((0.0, 0.25, 0.99, 1.0), (1, 3, 7)):
        length = 1 + sum(even_acceptance(rate, steps))
        assert rate_of(length, steps) == pytest.approx(rate, abs=1e-9)
    with pytest.raises(ValueError, match=r"between 1 and 4, not 4\.2"):
        rate_of(4.2, 3)


@pytest.mark.parametrize("broken", [0.0, -1.0, float("nan"), float("inf")])
def test_broken_costs_are_refused(broken: float):
    with pytest.raises(ValueError, match="measure again"):
        Costs({1: 5.0}, {1: {2: broken}}, "x")
    with pytest.raises(ValueError, match="measure again"):
        Costs({1: broken}, {1: {2: 9.0}}, "x")


def test_costs_at_different_batch_sizes_are_refused():
    with pytest.raises(ValueError, match=r"\[1, 2\], cycles for \[1\]"):
        Costs({1: 5.0, 2: 6.0}, {1: {2: 9.0}}, "x")


ROWS = {
    1: {1: 1.1, 3: 1.3, 5: 1.6},
    4: {1: 1.2, 3: 1.6, 5: 2.2},
    8: {1: 1.3, 3: 2.0, 5: 3.0},
    32: {1: 1.9, 3: 3.3, 5: 5},
}
OVERALL, PROSE, CODE = [0.6, 0.4, 0.25, 0.15, 0.1], [0.25, 0.05, 0.01, 0.0, 0.0], [0.9, 0.8, 0.7, 0.62, 0.55]


def test_the_adaptive_config_holds_the_best_steps_of_each_batch_size():
    config = adaptive_config(costs(ROWS), OVERALL)
    for batch in (1, 4, 8, 32):
        entry = config[str(max(int(key) for key in config if int(key) <= batch))]
        assert entry == {"candidate_steps": [best_steps(costs(ROWS), OVERALL, batch)[0]]}
    assert config["32"] == {"candidate_steps": [0]}


def test_sglang_reads_the_adaptive_config_and_switches_where_both_are_equally_fast(tmp_path: Path):
    """With SGLang's own code: at a little more accepted than the tie it stays, at a little less it moves down."""
    rule = pytest.importorskip("sglang.srt.speculative.adaptive_spec_params", reason="needs SGLang: make install")
    known = costs(ROWS)
    config = adaptive_config(known, OVERALL, [PROSE, CODE])
    file = tmp_path / "adaptive.json"
    file.write_text(json.dumps(config))
    candidates = rule.resolve_candidate_steps_from_config(str(file))
    assert candidates == sorted({steps for entry in config.values() for steps in entry["candidate_steps"]})
    pairs = {int(key): entry["candidate_steps"] for key, entry in config.items() if len(entry["candidate_steps"]) == 2}
    assert any(low == 0 for low, _ in pairs.values()) and any(low > 0 for low, _ in pairs.values())
    for batch, (low, high) in pairs.items():
        tie = min(
            (rate / 10_000 for rate in range(10_001)),
            key=lambda rate: (
                abs(
                    speedup(known, even_acceptance(rate, high), batch, high)
                    - speedup(known, even_acceptance(rate, low), batch, low)
                )
                + (10 if rate == 0 else 0)
            ),
        )
        accepted = sum(even_acceptance(tie, high))
        for offset, expected in ((0.02, high), (-0.02, low)):
            params = rule.AdaptiveSpeculativeParams(high, str(file))
            for _ in range(400):
                if params.get_steps_for_batch(batch) == high:
                    params.on_verify_complete([accepted + offset] * batch, batch)
            assert params.get_steps_for_batch(batch) == expected
