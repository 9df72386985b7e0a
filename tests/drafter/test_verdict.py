"""`python -m drafter verdict` from the outside: what it decides, why, and by which exit code."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from drafter.__main__ import main
from tests.drafter.logs import CASE, CURVE, Curve, ours, products, specforge, speculators

RISING = [(100 * n, (0.1 * n, 0.1 * n, 0.1 * n)) for n in range(1, 7)]
SETTLED = [*RISING, *((600 + 100 * n, (0.6, 0.6, 0.6)) for n in range(1, 4))]


def written(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.write_text(text)
    return str(file)


def judged(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, object]]:
    code = main(["verdict", *args, "--json"])
    return code, json.loads(capsys.readouterr().out)


def shifted(curve: Curve, by: float) -> list[tuple[int, Sequence[float]]]:
    return [(step, [max(0.0, rate - by) for rate in rates]) for step, rates in curve]


def test_the_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = written(tmp_path, "finetune.log", CASE)
    for baseline in ("0.747", written(tmp_path, "scratch.json", json.dumps({"full_acc_0": 0.747}))):
        assert main(["verdict", log, "--baseline", baseline]) == 4
        shown = capsys.readouterr().out
        assert "implied acceptance length 1.39 (a mean over positions), flatness 0.09" in shown
        stop, first, second, third = (
            shown.index(text)
            for text in ("stop: flatness 0.09", "1. a foreign initialisation", "2. a roll-out defect", "3. too little")
        )
        assert stop < first < second < third
        assert "(first position 0.380 against 0.747)" in shown
        assert "python -m drafter evaluate --drafter DRAFTER" in shown and "--num-steps 4 --oracle-hidden" in shown
        assert "left out: line 3: the record is cut off after \"'cond_acc_3_epoch': 0.0136831\"" in shown


@pytest.mark.parametrize(
    ("curve", "baseline", "code", "reason"),
    [
        (RISING, None, 3, "still moving"),
        (RISING[:1], None, 3, "one evaluation is no curve"),
        (SETTLED, None, 0, "it has settled"),
        (RISING, RISING, 0, "no worse than the baseline"),
        (SETTLED, [(step, [min(1.0, 1.3 * r) for r in rates]) for step, rates in SETTLED], 4, "gap is not closing"),
        (RISING, [(step, [0.75 - 0.1 / n] * 3) for n, (step, _) in enumerate(RISING, 1)], 3, "still moving"),
        ([*SETTLED, *((900 + n, (0.3, 0.3, 0.3)) for n in range(1, 5))], None, 4, "it has fallen from 2.18"),
        (shifted(SETTLED, 0.1), [(50, (0.9, 0.9, 0.9))], 4, "the baseline reaches 3.44"),
        ([(100 * n, (0.01, 0.01, 0.01)) for n in range(6)], None, 4, "it has learnt nothing"),
        ([(100, (0.5, 0.1, 0.1))], None, 4, "flatness 0.20"),
        ([(0, (0.5, 0.1, 0.1))], None, 3, "one evaluation is no curve"),
        ([(100, (0.05, 0.001, 0.001))], None, 3, "one evaluation is no curve"),
        ([(s, (a, a / 2, a / 2)) for s, (a, *_) in SETTLED], None, 3, "later positions are not sound yet"),
    ],
)
def test_what_is_decided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], curve: Curve, baseline: Curve | None, code: int, reason: str
) -> None:
    args = [written(tmp_path, "a.jsonl", ours(curve))]
    if baseline:
        args += ["--baseline", written(tmp_path, "b.jsonl", ours(baseline))]
    got, found = judged(capsys, *args)
    assert (got, found["decision"]) == (code, {0: "promote", 3: "continue", 4: "stop"}[code])
    assert any(reason in each for each in found["reasons"]), found["reasons"]  # type: ignore[attr-defined]


def test_steps_that_are_not_trained_yet_are_no_defect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ours([(100, (0.5, 0.05, 0.05))])
    assert judged(capsys, written(tmp_path, "a.jsonl", text))[0] == 4
    text = text.replace('"ttt_steps": 3', '"ttt_steps": 1')
    assert judged(capsys, written(tmp_path, "a.jsonl", text))[0] == 3


def test_a_loss_that_is_not_finite_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = json.dumps({"train": {"loss": float("nan"), "full_acc_0": 0.0}, "global_step": 410})
    code, found = judged(capsys, written(tmp_path, "a.jsonl", ours(SETTLED[:3]) + line + "\n"))
    assert code == 4 and "loss is nan at step 410" in found["reasons"][0]  # type: ignore[index]


def test_curves_are_compared_at_equal_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The baseline's value at the run's steps, interpolated; none outside its range."""
    run = written(tmp_path, "run.log", speculators([(150, (0.5,)), (250, (0.5,)), (400, (0.5,))]))
    _, found = judged(capsys, run, "--baseline", written(tmp_path, "base.jsonl", ours(CURVE)))
    lengths = {step: products(cond)[0] for step, cond in CURVE}
    pairs = found["at_equal_places"]
    assert isinstance(pairs, list) and [pair["place"] for pair in pairs] == [150, 250]
    assert pairs[0]["baseline"] == pytest.approx(1 + (lengths[100] + lengths[200]) / 2)
    assert pairs[1]["baseline"] == pytest.approx(1 + (lengths[200] + lengths[300]) / 2)
    assert pairs[0]["run"] == 1.5


def test_marginal_rates_are_called_a_guess(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = written(tmp_path, "specforge.log", specforge([(100, (0.8, 0.7, 0.6))]))
    main(["verdict", log, "--baseline", written(tmp_path, "ours.jsonl", ours())])
    shown = capsys.readouterr().out
    assert "the truth lies between 2.40 and 3.10" in shown  # 0.8 + 0.5 + 0.1, and 0.8 + 0.7 + 0.6
    assert "of two kinds" in shown


def test_a_picture(tmp_path: Path) -> None:
    log, plot = written(tmp_path, "a<&>.jsonl", ours(SETTLED)), tmp_path / "curves.svg"
    main(["verdict", log, "--baseline", written(tmp_path, "b.jsonl", ours(RISING)), "--plot", str(plot)])
    root = ElementTree.parse(plot).getroot()
    lines = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    points = [len(line.attrib["points"].split()) for line in lines]
    assert points[:5] == [9, 6, 9, 9, 9]  # run, baseline, and the run's three positions
    assert "full_acc_2" in "".join(root.itertext())


def test_a_picture_of_one_evaluation(tmp_path: Path) -> None:
    plot = tmp_path / "curves.svg"
    assert main(["verdict", written(tmp_path, "case.log", CASE), "--baseline", "0.747", "--plot", str(plot)]) == 4
    ElementTree.parse(plot)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["nowhere.log"], "nowhere.log: No such file"),
        (["LOG", "--baseline", "nowhere.log"], "nowhere.log: No such file"),
        (["LOG", "--baseline", "74.7"], "74.7 is no share from 0 to 1"),
        (["LOG", "--baseline", ""], "--baseline is empty"),
        (["LOG", "--plot", "curves.png"], "ends in .svg"),
        (["EMPTY"], "holds no acceptance rates"),
        (["FOLDER"], "Is a directory"),
    ],
)
def test_what_cannot_be_judged(
    tmp_path: Path, args: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"LOG": written(tmp_path, "a.jsonl", ours()), "EMPTY": written(tmp_path, "b.log", ""), "FOLDER": tmp_path}
    assert main(["verdict", *(str(names.get(arg, arg)) for arg in args)]) == 1
    shown = capsys.readouterr()
    assert reason in shown.err and shown.err.count("\n") == 1 and not shown.out


@pytest.mark.parametrize("value", ["1" + "0" * 400, "1e999", "-1e999", "NaN", '"x"', "null", "true", "[1]", "{}", "-1"])
@pytest.mark.parametrize("key", ["global_step", "epoch", "tokens", "ttt_steps", "loss_0"])
def test_any_number_beside_the_rates(tmp_path: Path, key: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = f'{{"val": {{"full_acc_0": 0.5, "full_acc_1": 0.4}}, "{key}": {value}}}\n'
    code, found = judged(capsys, written(tmp_path, "a.jsonl", text), "--baseline", "0.6")
    assert code == 3 and found["accept_len_positions"] == 1.9


def test_joint_rates_that_rise_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '{"val": {"full_acc_0": 0.5, "full_acc_1": 0.9, "full_acc_2": 0.3}, "global_step": 4}\n'
    _, found = judged(capsys, written(tmp_path, "a.jsonl", text))
    assert found["accept_len_positions"] == 1.5 and "full_acc_1 0.9 is above 0.5" in found["left_out"][0]  # type: ignore[index]


def test_a_log_of_a_windows_console_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "a.log"
    for coding in ("utf-16", "utf-8-sig"):
        log.write_bytes(ours().replace("\n", "\r\n").encode(coding))
        assert judged(capsys, str(log))[1]["axis"] == "step"


def test_follow_waits_for_a_verdict(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    command = [sys.executable, "-m", "drafter", "verdict", str(log), "--follow", "--every", "0.05", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def grow() -> None:
        text = ours(SETTLED)
        for end in range(0, len(text) + 400, 400):
            log.write_text(text[:end])
            time.sleep(0.02)

    writer = threading.Thread(target=grow)
    writer.start()
    out, err = process.communicate(timeout=60)
    writer.join()
    assert process.returncode == 0 and json.loads(out)["decision"] == "promote"
    assert err.splitlines()[-1].endswith("promote") and "Traceback" not in err
