"""The one definition of acceptance length, against step-by-step brute force."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter import acceptance

# A request as the engine sees it: how many draft tokens each verify step accepted.
STEPS = st.lists(st.integers(0, 7), max_size=40)
REQUESTS = st.lists(STEPS, max_size=8)


def histogram_of_steps(steps: list[int]) -> list[int]:
    """Exactly as the engine counts: the list grows to the largest step seen."""
    histogram: list[int] = []
    for accepted in steps:
        while len(histogram) <= accepted:
            histogram.append(0)
        histogram[accepted] += 1
    return histogram


def test_a_histogram_worked_out_by_hand():
    # 10 steps: 4 accepted nothing, 3 one token, 2 two, 1 three. 3 + 4 + 3 = 10 accepted tokens.
    histogram = [4, 3, 2, 1]
    assert acceptance.verify_steps(histogram) == 10
    assert acceptance.accepted_tokens(histogram) == 10
    assert acceptance.acceptance_length(histogram) == 2.0
    assert acceptance.full_acc(histogram) == [0.6, 0.3, 0.1]
    assert acceptance.cond_acc(histogram) == [0.6, 0.5, pytest.approx(1 / 3)]
    assert acceptance.flatness(histogram) == pytest.approx(0.5 / 0.6)


@given(REQUESTS)
def test_acceptance_length_is_a_ratio_of_sums_over_all_steps(requests: list[list[int]]):
    steps = [accepted for request in requests for accepted in request]
    summed = acceptance.add_histograms(map(histogram_of_steps, requests))
    assert acceptance.verify_steps(summed) == len(steps)
    assert acceptance.accepted_tokens(summed) == sum(steps)
    expected = float(1 + Fraction(sum(steps), len(steps))) if steps else None
    assert acceptance.acceptance_length(summed) == pytest.approx(expected)


@given(REQUESTS)
def test_rates_by_position_are_shares_of_steps(requests: list[list[int]]):
    steps = [accepted for request in requests for accepted in request]
    summed = acceptance.add_histograms(map(histogram_of_steps, requests))
    positions = range(max(steps)) if steps else range(0)
    full = [sum(accepted > k for accepted in steps) / len(steps) for k in positions]
    assert acceptance.full_acc(summed) == pytest.approx(full)
    conditional = []
    for k in positions:
        reached = [accepted for accepted in steps if accepted >= k]
        conditional.append(sum(accepted > k for accepted in reached) / len(reached))
    assert acceptance.cond_acc(summed) == pytest.approx(conditional)


@given(STEPS.filter(bool))
def test_acceptance_length_is_one_plus_the_rates(steps: list[int]):
    histogram = histogram_of_steps(steps)
    assert acceptance.acceptance_length(histogram) == pytest.approx(1 + sum(acceptance.full_acc(histogram)))


@given(STEPS.filter(bool))
def test_full_rates_are_the_running_product_of_conditional_ones(steps: list[int]):
    histogram = histogram_of_steps(steps)
    product = 1.0
    for full, conditional in zip(acceptance.full_acc(histogram), acceptance.cond_acc(histogram), strict=True):
        assert conditional is not None
        product *= conditional
        assert full == pytest.approx(product)


@given(STEPS, st.integers(0, 5))
def test_positions_that_were_offered_and_never_accepted_change_nothing_else(steps: list[int], more: int):
    histogram = histogram_of_steps(steps)
    padded = histogram + [0] * more
    assert acceptance.acceptance_length(padded) == acceptance.acceptance_length(histogram)
    full = acceptance.full_acc(histogram)
    assert acceptance.full_acc(padded)[: len(full)] == full
    assert not any(acceptance.full_acc(padded)[len(full) :])


def test_a_mean_of_ratios_would_differ():
    short, long = [0, 0, 0, 1], [30]
    pooled = acceptance.acceptance_length(acceptance.add_histograms([short, long]))
    of_each = [acceptance.acceptance_length(short), acceptance.acceptance_length(long)]
    assert of_each == [4.0, 1.0]
    assert pooled == pytest.approx(1 + 3 / 31)


def test_nothing_is_defined_without_a_step():
    for empty in ([], [0], [0, 0, 0]):
        assert acceptance.acceptance_length(empty) is None
        assert acceptance.full_acc(empty) == []
        assert acceptance.cond_acc(empty) == []
        assert acceptance.flatness(empty) is None


def test_a_position_that_no_step_reached_has_no_rate():
    assert acceptance.cond_acc([5, 0, 0]) == [0.0, None]
    assert acceptance.flatness([5, 0, 0]) is None
    assert acceptance.flatness([5, 1]) is None
    assert acceptance.cond_acc([0, 4, 0, 0]) == [1.0, 0.0, None]
    assert acceptance.flatness([0, 4, 0, 0]) == 0.0


@pytest.mark.parametrize("wrong", [[1, -1], [1.0], [True], ["3"], [None]])
def test_what_is_not_a_count_is_refused(wrong: list[object]):
    with pytest.raises(ValueError, match="expected a count"):
        acceptance.check_histogram(wrong)  # type: ignore[arg-type]


def loops_by_brute_force(ids: list[int]) -> bool:
    if len(ids) < 32:
        return False
    seen: list[list[int]] = []
    total = 0
    for start in range(len(ids)):
        gram = ids[start : start + 4]
        if len(gram) < 4:
            continue
        total += 1
        if gram not in seen:
            seen.append(gram)
    return Fraction(len(seen), total) < Fraction(7, 10)


@given(st.lists(st.integers(0, 3), max_size=120))
def test_looping_is_the_share_of_distinct_four_grams(ids: list[int]):
    assert acceptance.is_looping(ids) == loops_by_brute_force(ids)


@given(st.integers(32, 400), st.data())
def test_looping_is_exact_at_the_border(length: int, data: st.DataObject):
    # `distinct` different tokens, then the last one for ever: the number of distinct 4-grams is known.
    distinct = data.draw(st.integers(1, length))
    ids = [*range(distinct), *([distinct - 1] * (length - distinct))]
    assert acceptance.is_looping(ids) == loops_by_brute_force(ids)


def test_short_answers_never_loop():
    assert not acceptance.is_looping([7] * 31)
    assert acceptance.is_looping([7] * 32)


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 5), st.integers(0, 40))
def test_what_comes_before_a_loop_does_not_loop(start: list[int], period: int, times: int):
    ids = [*start, *(list(range(100, 100 + period)) * times)]
    kept = list(acceptance.before_loop(ids))
    assert kept == ids[: len(kept)]
    assert not acceptance.is_looping(kept)
    if len(kept) < len(ids):
        assert any(acceptance.is_looping(ids[at : at + 64]) for at in range(len(ids))) or acceptance.is_looping(ids)


def test_an_answer_is_cut_where_it_begins_to_repeat_itself():
    assert acceptance.before_loop([*range(50), *([90, 91, 92] * 40)]) == [*range(50), 90, 91, 92]
    assert acceptance.before_loop(list(range(300))) == list(range(300))


def details(histogram: list[int], **changed: object) -> dict[str, object]:
    honest = {
        "spec_correct_drafts_histogram": histogram,
        "spec_verify_ct": sum(histogram),
        "spec_num_correct_drafts": sum(i * steps for i, steps in enumerate(histogram)),
        "spec_num_proposed_drafts": 3 * sum(histogram),
        "spec_accept_length": 99.0,  # another definition of the word: must not be read
    }
    return {**honest, **changed}


@given(STEPS)
def test_details_give_their_histogram(steps: list[int]):
    histogram = histogram_of_steps(steps)
    assert acceptance.histogram_of_details(details(histogram)) == histogram


@given(st.lists(STEPS, max_size=4))
def test_details_of_several_answers_are_summed(answers: list[list[int]]):
    given_details = [details(histogram_of_steps(steps)) for steps in answers]
    steps = [accepted for answer in answers for accepted in answer]
    assert acceptance.histogram_of_details(given_details) == histogram_of_steps(steps)


@pytest.mark.parametrize("name", ["spec_verify_ct", "spec_num_correct_drafts"])
@pytest.mark.parametrize("off_by", [-1, 1])
def test_an_engine_that_contradicts_itself_is_refused(name: str, off_by: int):
    honest = details([4, 3, 2, 1])
    lying = {**honest, name: honest[name] + off_by}  # type: ignore[operator]
    with pytest.raises(ValueError, match=rf"says {name} {lying[name]}"):
        acceptance.histogram_of_details(lying)


@pytest.mark.parametrize("name", ["spec_verify_ct", "spec_num_correct_drafts", "spec_correct_drafts_histogram"])
def test_details_without_a_field_are_a_clear_error(name: str):
    missing = {key: value for key, value in details([4, 3]).items() if key != name}
    with pytest.raises(ValueError, match=f"have no {name}"):
        acceptance.histogram_of_details(missing)
