"""The bootstrap against loops, against theory, and on drafters that differ by a known amount."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.stats import (
    Counts,
    StatsError,
    acceptance_length,
    difference,
    holm,
    looks_confidence,
    mean_difference,
    prompts_needed,
    resample,
    speed_ratio,
    strata_of,
)

CATEGORIES = [name for name in ("writing", "math", "coding", "stem") for _ in range(20)]


def answers(random: np.random.Generator, rates: np.ndarray, steps: int = 40, drafts: int = 3) -> Counts:
    """What a drafter did with prompts at which each draft is accepted with these chances, [P]."""
    accepted = np.zeros(len(rates))
    for _ in range(steps):
        alive = np.ones(len(rates), dtype=bool)
        for _ in range(drafts):
            alive &= random.random(len(rates)) < rates
            accepted += alive
    return Counts(accepted, np.full(len(rates), float(steps)))


def hardness(random: np.random.Generator, prompts: int = len(CATEGORIES)) -> np.ndarray:
    """Chances that differ from prompt to prompt far more than drafters do."""
    return random.beta(5, 5, prompts)


def test_the_ratio_of_sums_is_the_value() -> None:
    found = acceptance_length(Counts(np.array([10.0, 0.0]), np.array([10.0, 30.0])), ["a", "a"])
    assert found.value == 1.25
    assert found.low <= found.value <= found.high


def test_each_category_keeps_its_number_of_prompts() -> None:
    categories = ["a"] * 6 + ["b"] * 5 + ["c"] * 7
    drawn = resample(categories, 500, 7)
    assert drawn.shape == (500, 18)
    for name in "abc":
        members = [at for at, each in enumerate(categories) if each == name]
        assert np.allclose(drawn[:, members].sum(axis=1), len(members))
    assert drawn[:, 0].std() > 0.5
    assert np.array_equal(drawn, resample(categories, 500, 7))
    assert not np.array_equal(drawn, resample(categories, 500, 8))


@given(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=60))
def test_no_prompt_is_drawn_alone(categories: list[str]) -> None:
    strata = strata_of(categories)
    assert sorted(place for some in strata for place in some) == list(range(len(categories)))
    sizes = {name: categories.count(name) for name in categories}
    for some in strata:
        names = {categories[place] for place in some}
        assert len(some) >= 5 or len(strata) == 1 or len(some) == min(map(len, strata))
        assert len(names) == 1 or min(sizes[name] for name in names) < 5
    assert sum(len(some) < 5 for some in strata) <= 1
    assert (resample(categories, 200, 1).std(axis=0) > 0).all(), "a prompt that is always drawn once hides its variance"


@pytest.mark.parametrize("size", [5, 10, 40])
def test_strata_show_all_of_their_variance(size: int) -> None:
    """The error of a mean over strata is the one by the textbook, sum of n_h s_h^2 over n^2, at any size of stratum."""
    random = np.random.default_rng(11)
    names = [str(place // size) for place in range(4 * size)]
    scores = random.normal(0, 1, 4 * size) + np.repeat([0, 5, 10, 20], size)
    found = mean_difference(np.zeros(4 * size), scores, names, resamplings=20_000)
    variances = scores.reshape(4, size).var(axis=1, ddof=1)
    assert found.error == pytest.approx(np.sqrt((size * variances).sum()) / (4 * size), rel=0.02)


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_small_categories_do_not_make_everything_certain(size: int) -> None:
    """Equal drafters on 16 prompts in categories of any size are rarely called different."""
    random = np.random.default_rng(6)
    names = [str(place // size) for place in range(16)]
    called = 0
    for trial in range(300):
        rates = hardness(random, 16)
        called += difference(answers(random, rates), answers(random, rates), names, seed=trial, resamplings=400).called
    assert called <= 0.13 * 300, f"{called} of 300"


def test_the_figures_are_those_of_a_loop() -> None:
    random = np.random.default_rng(1)
    rates = hardness(random, 12)
    a, b, categories = answers(random, rates), answers(random, rates), ["x"] * 5 + ["y"] * 7
    draws = resample(categories, 300, 5)
    lengths = []
    for row in draws:
        one = []
        for counts in (a, b):
            accepted = steps = 0.0
            for prompt, times in enumerate(row):
                accepted += times * counts.accepted[prompt]
                steps += times * counts.steps[prompt]
            one.append(1 + accepted / steps)
        lengths.append(one[1] - one[0])
    found = difference(a, b, categories, seed=5, resamplings=300)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(lengths, [0.025, 0.975])))
    assert found.error == pytest.approx(np.std(lengths, ddof=1))
    fewer = min(sum(each <= 0 for each in lengths), sum(each >= 0 for each in lengths))
    assert found.p == min(1.0, 2 * (fewer + 1) / 301)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(2)
    held = 0
    for trial in range(300):
        rates = hardness(random)
        found = acceptance_length(answers(random, rates), CATEGORIES, seed=trial, resamplings=400)
        held += found.low <= 1 + float(np.mean(5 / 10 + 5 * 6 / 110 + 5 * 6 * 7 / 1320)) <= found.high
    assert 270 <= held <= 297  # 95 % of 300 is 285; the percentile interval is a little short at 80 prompts


def test_the_same_drafter_twice_is_rarely_called_different() -> None:
    random = np.random.default_rng(3)
    called = 0
    for trial in range(1_000):
        rates = hardness(random)
        called += difference(
            answers(random, rates), answers(random, rates), CATEGORIES, seed=trial, resamplings=400
        ).called
    assert 20 <= called <= 80


def test_pairing_tells_apart_what_the_prompts_hide() -> None:
    random = np.random.default_rng(4)
    rates = hardness(random)
    a, b = answers(random, rates, 400), answers(random, np.clip(rates + 0.04, 0, 1), 400)
    paired = difference(a, b, CATEGORIES)
    alone = acceptance_length(a, CATEGORIES)
    assert paired.called and paired.low > 0 and paired.p < 0.01
    assert paired.error < 0.4 * alone.error
    assert not difference(b, a, CATEGORIES).low > 0


def test_the_prompts_that_it_asks_for_are_enough() -> None:
    """A true difference of 0.05, measured on as many prompts as were asked for after a pilot, is mostly called."""
    random = np.random.default_rng(5)
    truth = 0.05

    def pair(prompts: int) -> tuple[Counts, Counts, list[str]]:
        rates = hardness(random, prompts)
        slope = 1 + 2 * rates + 3 * rates**2  # of the expected length in the rate
        return answers(random, rates), answers(random, np.clip(rates + truth / slope, 0, 1)), ["x"] * prompts

    a, b, names = pair(80)
    needed = prompts_needed(difference(a, b, names), 80, truth)
    assert 80 < needed < 3_000
    called = sum(difference(*pair(needed), seed=trial, resamplings=400).low > 0 for trial in range(100))
    assert called >= 70  # 80 are expected, from one pilot's error


def test_speed_is_a_ratio_of_two_ratios_of_sums() -> None:
    random = np.random.default_rng(8)
    a, b = (Counts(random.uniform(50, 200, 20), random.uniform(1, 4, 20)) for _ in range(2))
    names = ["x"] * 20
    found = speed_ratio(a, b, names, seed=3, resamplings=300)
    ratios = []
    for row in resample(names, 300, 3):
        rates = [sum(row * each.accepted) / sum(row * each.steps) for each in (a, b)]
        ratios.append(rates[1] / rates[0])
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(ratios, [0.025, 0.975])))
    assert found.value == pytest.approx((b.accepted.sum() / b.steps.sum()) / (a.accepted.sum() / a.steps.sum()))


def test_scores_are_compared_prompt_by_prompt() -> None:
    random = np.random.default_rng(9)
    a = random.normal(-3, 2, 40)
    b = a + random.normal(0.3, 0.1, 40)
    found = mean_difference(a, b, ["x"] * 40, seed=2, resamplings=500)
    by_hand = [sum(row * (b - a)) / 40 for row in resample(["x"] * 40, 500, 2)]
    assert found.value == pytest.approx(float((b - a).mean()))
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(by_hand, [0.025, 0.975])))
    assert found.called and found.p < 0.01


def test_several_looks_together_are_wrong_as_rarely_as_one() -> None:
    """Equal drafters, looked at after each of four parts: in 5 % of runs at most is any look called."""
    random = np.random.default_rng(10)
    confidence, called = looks_confidence(4), 0
    assert confidence == pytest.approx(0.9875)
    for trial in range(200):
        rates = hardness(random)
        a, b = answers(random, rates), answers(random, rates)
        called += any(
            difference(
                Counts(a.accepted[:size], a.steps[:size]),
                Counts(b.accepted[:size], b.steps[:size]),
                CATEGORIES[:size],
                seed=trial,
                resamplings=1_000,
                confidence=confidence,
            ).called
            for size in (20, 40, 60, 80)
        )
    assert called <= 18, f"{called} of 200"  # 10 are allowed for, and a short interval at 20 prompts adds some


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), max_size=6))
def test_holm(p_values: dict[str, float]) -> None:
    adjusted = holm(p_values)
    ranked = sorted(p_values.values())
    for name, p in p_values.items():
        by_hand = max(
            (min(1.0, (len(ranked) - place) * each) for place, each in enumerate(ranked) if each <= p), default=1.0
        )
        assert adjusted[name] >= p
        assert adjusted[name] <= by_hand + 1e-12


def test_holm_by_hand() -> None:
    assert holm({"a": 0.04, "b": 0.01, "c": 0.03}) == pytest.approx({"a": 0.06, "b": 0.03, "c": 0.06})


@pytest.mark.parametrize(
    ("accepted", "steps", "categories", "reason"),
    [
        ([1.0], [2.0, 3.0], ["a", "a"], "no row a prompt"),
        ([], [], [], "no row a prompt"),
        ([0.0, 0.0], [0.0, 0.0], ["a", "a"], "no verify step"),
        ([1.0, -1.0], [2.0, 3.0], ["a", "a"], "no verify step"),
        ([1.0, 1.0], [2.0, 3.0], ["a"], "2 prompts were counted but 1 categories"),
        ([1.0], [2.0], ["a"], "one prompt says nothing"),
    ],
)
def test_what_nothing_can_be_said_of(
    accepted: list[float], steps: list[float], categories: list[str], reason: str
) -> None:
    with pytest.raises(StatsError, match=reason):
        acceptance_length(Counts(np.array(accepted), np.array(steps)), categories)


@pytest.mark.parametrize(("wanted", "power"), [(0.0, 0.8), (-0.1, 0.8), (0.05, 0.0), (0.05, 1.0)])
def test_a_power_that_cannot_be_asked_for(wanted: float, power: float) -> None:
    found = difference(Counts(np.ones(4), np.ones(4)), Counts(np.ones(4), np.ones(4)), ["a"] * 4)
    with pytest.raises(StatsError, match="cannot be asked for"):
        prompts_needed(found, 4, wanted, power)


def test_the_interval_by_brute_force() -> None:
    """The same intervals from prompts drawn one by one, up to the noise of the draws."""
    random = np.random.default_rng(5)
    categories = ["a"] * 12 + ["b"] * 7 + ["c", "d", "e"]
    size = len(categories)
    a, b = (Counts(random.integers(0, 90, size).astype(float), np.full(size, 40.0)) for _ in range(2))
    strata = [range(12), range(12, 22)]  # the three categories of one prompt go with the next smallest
    drawn = []
    for _ in range(6_000):
        sums = np.zeros(4)
        for members in strata:
            places, count = list(members), len(members)
            for place in random.choice(places, count - 1):
                sums += np.array([a.accepted[place], a.steps[place], b.accepted[place], b.steps[place]]) * (
                    count / (count - 1)
                )
        drawn.append(sums[2] / sums[3] - sums[0] / sums[1])
    found = difference(a, b, categories)
    assert found.value == pytest.approx(b.accepted.sum() / b.steps.sum() - a.accepted.sum() / a.steps.sum())
    assert [found.low, found.high] == pytest.approx(
        np.quantile(drawn, [0.025, 0.975]).tolist(), abs=0.06 * found.error * 2
    )
    assert found.error == pytest.approx(float(np.std(drawn)), rel=0.05)


@given(st.dictionaries(st.text(), st.floats(0, 1), min_size=1, max_size=8))
def test_holm_by_its_definition(p_values: dict[str, float]) -> None:
    """An adjusted p is the smallest level at which stepping down rejects its hypothesis."""
    ordered = sorted(p_values, key=lambda name: p_values[name])
    for name, adjusted in holm(p_values).items():
        steps = ordered[: ordered.index(name) + 1]
        level = max((len(ordered) - place) * p_values[each] for place, each in enumerate(steps))
        assert adjusted == pytest.approx(min(1.0, level))


def test_nothing_is_found_with_fewer_than_two_prompts() -> None:
    same = Counts(np.full(8, 3.0), np.full(8, 4.0))
    assert prompts_needed(difference(same, same, ["a"] * 8), 8) == 2
