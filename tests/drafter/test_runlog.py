"""Logs of every trainer: the same curve out of each, and no cut of one that crashes or goes untold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.runlog import RunLogError, parse_run, read_run
from tests.drafter.logs import CASE, CURVE, FORMS, products, speculators

EXACT = 1e-9


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_curve(form: str) -> None:
    found = parse_run(FORMS[form], form)
    assert not found.left_out
    assert found.evaluated and len(found.judged) == len(CURVE)
    tolerance = EXACT if form not in ("flat", "eagle") else 6e-3
    for point, (step, cond) in zip(found.judged, CURVE, strict=True):
        assert point.survival == pytest.approx(products(cond), abs=tolerance)
        assert point.accept_len_positions == pytest.approx(1 + sum(products(cond)), abs=3 * tolerance)
        assert point.flatness == pytest.approx(cond[1] / cond[0], rel=0.02)
        assert point.step == (step if form != "eagle" else None)
        assert point.is_marginal == (form in ("specforge", "eagle"))


def test_the_case() -> None:
    (point,) = parse_run(CASE, "case").points
    assert point.full[0] == 0.3800190306513927 and point.cond[3] == 0.0136831
    full = 0.3800190306513927
    expected = 1 + full * (1 + 0.03483982407936639 * (1 + 0.02521324353551839 * (1 + 0.0136831)))
    assert point.accept_len_positions == pytest.approx(expected)
    assert point.flatness == pytest.approx(0.03483982407936639 / full)


@settings(max_examples=150, deadline=None)
@given(form=st.sampled_from(list(FORMS)), share=st.floats(0, 1))
def test_any_end_that_is_cut_off_is_told(form: str, share: float) -> None:
    text = FORMS[form]
    whole, cut = parse_run(text, form), text[: int(share * len(text))]
    try:
        found = parse_run(cut, form)
    except RunLogError as refused:
        assert "holds no acceptance rates" in str(refused)
        return
    assert len(found.points) <= len(whole.points)
    *before, last = found.points
    assert before == list(whole.points[: len(before)])
    same = whole.points[len(before)]
    if last != same:
        # Of lines for one position each, those of a first epoch do not say how many there will be.
        assert found.left_out or (form == "eagle" and not before and cut.endswith("\n"))
        for kind in ("full", "cond", "marginal"):
            for rate, true in zip(getattr(last, kind), getattr(same, kind), strict=False):
                assert rate is None or rate == pytest.approx(true, rel=1e-2)


@settings(max_examples=150, deadline=None)
@given(form=st.sampled_from(list(FORMS)), ends=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_a_piece_that_is_missing_leaves_the_rest(form: str, ends: tuple[float, float]) -> None:
    text = FORMS[form]
    start, stop = sorted(int(end * len(text)) for end in ends)
    whole = parse_run(text, form)
    try:
        found = parse_run(text[:start] + text[stop:], form)
    except RunLogError:
        return
    assert len(found.points) <= len(whole.points) + 1
    for point in found.points:
        for rate in (*point.full, *point.cond, *point.marginal):
            assert rate is None or 0 <= rate <= 1


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="{}[]'\":,=0.1 \\\n_aceflurtvn", max_size=200))
def test_no_text_at_all_crashes(text: str) -> None:
    for form in (text, CASE + text, text + CASE):
        try:
            parse_run(form, "x")
        except RunLogError as refused:
            assert "\n" not in str(refused)


def test_the_beginning_may_be_missing() -> None:
    text = "81, 'full_acc_0_epoch': 0.5, 'cond_acc_0_epoch': 0.5, 'cond_acc_1_epoch': 0.4}, 'epoch': 3}\n"
    found = parse_run(text, "x")
    assert found.points[0].survival == [0.5, 0.2] and found.points[0].section == "val"
    assert found.left_out


def test_bars_and_other_lines_between_the_parts_of_a_record() -> None:
    text = (
        "[speculators.metrics] {'val': {'full_acc_0_epoch': 0.5,\n"
        "Epoch 3:  12%|#1        | 30/250 [00:24<02:59,  1.22it/s]\n"
        "  'cond_acc_1_epoch': 0.25}, 'epoch': 3}\n"
        "[speculators.metrics] {'val': {'full_acc_0_epoch': 0.6,\n"
        "[17:20:02] WARNING  the disk is nearly full\n"
        "[speculators.metrics] {'val': {'full_acc_0_epoch': 0.7, 'cond_acc_1_epoch': 0.5}, 'epoch': 5}\n"
    )
    found = parse_run(text, "x")
    assert [point.survival for point in found.points] == [[0.5, 0.125], [0.6], [0.7, 0.35]]
    assert any("line 4" in each and "cut off" in each for each in found.left_out)


@pytest.mark.parametrize("value", ["1.5", "-0.1", "nan", "True"])
def test_what_is_no_share_is_left_out(value: str) -> None:
    found = parse_run(f"{{'val': {{'full_acc_0_epoch': 0.5, 'full_acc_1_epoch': {value}}}}}", "x")
    assert found.points[0].survival == [0.5] and "full_acc_1_epoch" in found.left_out[0]


def test_code_is_never_run(tmp_path: Path) -> None:
    there = tmp_path / "made"
    text = f"{{'val': {{'full_acc_0_epoch': 0.5, 'x': __import__('pathlib').Path({str(there)!r}).touch()}}}}\n"
    assert parse_run(text, "x").points[0].survival == [0.5]
    assert not there.exists()


def test_a_run_that_went_back_is_told_once() -> None:
    lines = [{"val": {"full_acc_0_epoch": 0.1 * n}, "global_step": step} for n, step in enumerate((0, 10, 20, 10, 20))]
    found = parse_run("\n".join(map(json.dumps, lines)), "x")
    assert [(point.step, point.survival[0]) for point in found.points] == [
        (0, 0.0),
        (10, pytest.approx(0.3)),
        (20, 0.4),
    ]
    assert "went back from step 20 to 10" in found.left_out[0]


def test_ranks_that_say_the_same_count_once() -> None:
    line = "{'val': {'full_acc_0_epoch': 0.5}, 'epoch': 1}\n"
    assert len(parse_run(4 * line, "x").points) == 1


def test_training_records_stand_in_where_nothing_is_evaluated() -> None:
    lines = [{"train": {"full_acc_0": (n % 2) / 2}, "global_step": n} for n in range(100)]
    found = parse_run("\n".join(map(json.dumps, lines)), "x")
    assert not found.evaluated and len(found.judged) == 20
    assert [point.survival[0] for point in found.judged[::2]] == pytest.approx([0.2] * 10)


@pytest.mark.parametrize("found", [{"histogram": [1, 2]}, {"variants": []}])
def test_what_counts_verify_steps_is_refused(tmp_path: Path, found: dict[str, object]) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(found))
    with pytest.raises(RunLogError, match="counts verify steps"):
        read_run(file)


def test_a_long_log_takes_no_time() -> None:
    noise = "{ not a record\n" * 20_000 + "{'half': 1,\n" * 2_000
    assert len(parse_run(noise + speculators(), "x").judged) == len(CURVE)
