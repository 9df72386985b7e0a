"""The verb: what it prints, what it writes, and how it answers what cannot be meant."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from drafter import roofline
from drafter.__main__ import main
from drafter.costs import to_document, write_costs
from drafter.public_points import points
from drafter.report import write_report
from drafter.speedup import Costs
from drafter.speedup_cli import parse_acceptance
from tests.bench.made_up_report import made_up

COSTS = Costs({1: 10.0, 8: 10.0}, {1: {1: 11.0, 2: 12.0}, 8: {1: 20.0, 2: 25.0}}, "measured: small")


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    file = tmp_path / "costs.json"
    write_costs(to_document(COSTS, simulated=True, provenance={}), file)
    return file


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["speedup", *map(str, words)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_every_public_point_and_its_error_is_printed(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "--machine", "8xb200")
    assert code == 0
    for point in points():
        assert f"{point.error:+5.0%}   {point.name}" in out
    assert out.count("median error") == 2 and "not counted: its source does not give the machine" in out


def test_the_json_form_holds_the_same(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "--machine", "8xrtx-pro-6000", "--json")
    found = json.loads(out)
    assert code == 0 and len(found["points"]["list"]) == len(points())
    (prediction,) = found["predictions"]
    row = prediction["batches"][0]
    assert sum(row["decode_parts_ms"].values()) == pytest.approx(row["decode_ms"])
    assert prediction["cheaper_allreduce"]["allreduce"] == "pcie-ipc"
    assert prediction["cheaper_allreduce"]["batches"][0]["decode_ratio"] > 2


def test_measured_costs_and_the_adaptive_config(capsys: pytest.CaptureFixture[str], tmp_path: Path, costs: Path):
    out_file = tmp_path / "adaptive.json"
    code, out, _ = run(capsys, "--costs", costs, "--acceptance", "0.6,0.4", "--adaptive-config", out_file)
    assert code == 0 and "stops paying at 8 requests" in out and "one of [0, 2]" in out
    assert json.loads(out_file.read_text()) == {"1": {"candidate_steps": [2]}, "8": {"candidate_steps": [0]}}
    code, out, _ = run(capsys, "--costs", costs, "--acceptance", "0.6,0.4", "--json")
    rows = json.loads(out)["predictions"][0]["batches"]
    assert rows[0]["speedup"] == {"1": pytest.approx(1.6 / 1.1), "2": pytest.approx(2.0 / 1.2)}
    assert (rows[1]["best_steps"], rows[1]["best_speedup"]) == (0, 1.0)


@pytest.fixture
def report(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    made = made_up(drafters=("none", "ngram", "old"), loads=(1, 8))
    write_report(made, tmp_path / "report.json")
    return tmp_path / "report.json", made


def test_acceptance_and_costs_of_a_report(capsys: pytest.CaptureFixture[str], report: tuple[Path, dict[str, Any]]):
    """The acceptance of its drafter, the step times of all: then the speed-up is the one that the report has."""
    file, made = report
    code, out, _ = run(capsys, "--report", file, "--variant", "old", "--costs", file, "--json")
    assert code == 0
    found = json.loads(out)
    olds = {each["concurrency"]: each for each in made["variants"] if each["drafter"] == "old"}
    assert found["acceptance"] == olds[1]["full_acc"]
    for row in found["predictions"][0]["batches"]:
        cost = olds[row["batch"]]["step_cost"]
        assert row["break_even"] == {"3": pytest.approx(cost)}
        assert row["speedup"]["3"] == pytest.approx(olds[1]["acceptance_length"] / cost)


def test_the_categories_of_a_report_widen_the_choice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, report: tuple[Path, dict[str, Any]]
):
    file, made = report
    costs = tmp_path / "tight.json"
    old = next(each for each in made["variants"] if each["drafter"] == "old")
    lengths = [old["categories"][name]["acceptance_length"] for name in old["categories"]]
    between = (min(lengths) + old["acceptance_length"]) / 2  # pays on the whole, and not in the worst category
    tight = Costs({1: 10.0}, {1: {3: 10.0 * between}}, "made up")
    write_costs(to_document(tight, simulated=True, provenance={}), costs)
    words = ("--report", file, "--variant", "old", "--costs", costs, "--adaptive-config", tmp_path / "adaptive.json")
    assert run(capsys, *words)[0] == 0
    entry = json.loads((tmp_path / "adaptive.json").read_text())["1"]
    assert entry["candidate_steps"] == [0, 3]
    assert entry["down_hysteresis"] == pytest.approx(between - 1 - 0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "choose one by --variant"),
        (("--variant", "new"), "no drafter 'new'"),
        (("--variant", "none"), "no drafter 'none'"),
    ],
)
def test_a_drafter_that_the_report_does_not_have(
    capsys: pytest.CaptureFixture[str], report: tuple[Path, dict[str, Any]], words: tuple[str, ...], says: str
):
    code, _, err = run(capsys, "--report", report[0], *words)
    assert code == 1 and says in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--acceptance", "0.5,0.6"), "never rise"),
        (("--acceptance", "1.5"), "between 0 and 1"),
        (("--acceptance", "many"), r"write 2\.8@3, or"),
        (("--acceptance", "5@3"), "between 1 and 4"),
        (("--adaptive-config", "x.json"), "needs --costs"),
        (("--costs", "no.json"), "check the path"),
        (("--report", "no.json"), "check the path"),
        (("--report", "r", "--acceptance", "2.8@3"), "give one"),
    ],
)
def test_what_cannot_be_meant(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str):
    code, out, err = run(capsys, *words)
    assert code == 1 and out == ""
    assert err.startswith("speedup: ") and len(err.splitlines()) == 1
    assert re.search(says, err)


def test_even_acceptance_goes_on_and_a_list_does_not():
    even = parse_acceptance("2.8@3")
    assert len(even) == 7 and 1 + sum(even[:3]) == pytest.approx(2.8)
    assert parse_acceptance("0.65,0.42,0.27") == [0.65, 0.42, 0.27]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--machine", "8xb200", "--model", "llama-3.1-8b"], "'kimi-eagle3-mla' does not fit llama-3.1-8b: it is for"),
        (["--machine", "1xh100", "--model", "llama-3.1-8b", "--drafter", "kimi-mtp"], "does not fit llama-3.1-8b"),
        (["--machine", "8xb200", "--drafter", "llama-8b-eagle3"], "does not fit kimi-k2.5-nvfp4: it is for llama"),
        (["--context", "-5"], "--context is -5, expected a number of tokens"),
        (["--context", "0"], "--context is 0, expected a number of tokens"),
        (["--context", "nan"], "--context is nan, expected a number of tokens"),
        (["--context", "inf"], "--context is inf, expected a number of tokens"),
        (["--acceptance", ""], "--acceptance '': could not convert"),
        (["--acceptance", "2.8@1000000000"], "1000000000 draft steps are more than any engine takes"),
        (["--variant", "new"], "--variant names a drafter of a report: give --report"),
        (["--costs", "costs.json", "--machine", "8xb200", "--context", "9"], "--machine, --context: of a machine on"),
    ],
)
def test_flags_that_cannot_be_meant(args: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speedup", *args]) != 0
    shown = capsys.readouterr()
    assert shown.out == "" and reason in shown.err and shown.err.count("\n") == 1


def test_every_drafter_fits_some_model_or_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    table = roofline.data()
    for drafter in table["drafters"]:
        codes = [
            main(["speedup", "--machine", "8xb200", "--model", model, "--drafter", drafter, "--json"])
            for model in table["models"]
        ]
        shown = capsys.readouterr()
        assert 0 in codes and shown.err.count("\n") == len(codes) - codes.count(0)
