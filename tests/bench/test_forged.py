"""A report that was edited by hand: what contradicts itself is refused, whatever cannot be is no traceback."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import gate
from bench.accept_len import main
from bench.page import write_pages
from drafter.report import ReportError, read_report
from tests.bench.fake_engine import FakeEngine, Script
from tests.bench.made_up_report import made_up

Report = dict[str, Any]


@pytest.fixture(scope="module")
def kept() -> dict[str, str]:
    return {}


@pytest.fixture
def measured(
    kept: dict[str, str], engine: type[FakeEngine], profile_file: Path, prompt_file: Path, tmp_path: Path
) -> Report:
    """A report of the fake engine, as the bench writes it, that the gate promotes; measured once, for all to edit."""
    if not kept:
        kept["report"] = json.dumps(measure(engine, profile_file, prompt_file, tmp_path))
    return json.loads(kept["report"])  # type: ignore[no-any-return]


def measure(engine: type[FakeEngine], profile_file: Path, prompt_file: Path, tmp_path: Path) -> Report:
    engine.scripts["none"].delay_s = 0.002
    engine.scripts["good"] = Script(steps=(3, 2, 0), changed=("blue",), delay_s=0.002)
    shared = ["--profile", str(profile_file), "--prompts", str(prompt_file), "--max-tokens", "40", "--repeats", "2"]
    assert main([*shared, "--drafter", "good", "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    for variant in report["variants"]:  # the fake engine's command line names its drafter
        variant["flags"] = ["python", "--tp", "1"]
    return report  # type: ignore[no-any-return]


def judged(report: Report, tmp_path: Path) -> int:
    (tmp_path / "edited.json").write_text(json.dumps(report))
    (tmp_path / "policy.toml").write_text('drafter = "good"\nmin_greedy_equal = 0.7\nmin_speedup = 0.5\n')
    return gate.main([str(tmp_path / "edited.json"), "--policy", str(tmp_path / "policy.toml")])


def test_what_was_measured_is_judged(measured: Report, tmp_path: Path):
    assert judged(measured, tmp_path) == 0


def times(key: str, factor: float, drafter: int = 1) -> Callable[[Report], None]:
    def edit(report: Report) -> None:
        report["variants"][drafter][key] *= factor

    return edit


def of(key: str, value: Any) -> Callable[[Report], None]:
    def edit(report: Report) -> None:
        report["variants"][1][key] = value

    return edit


def every(key: str, field: str, change: Callable[[Any], Any], drafter: int = 1) -> Callable[[Report], None]:
    """Changes a field of each request, or of each block."""

    def edit(report: Report) -> None:
        for row in report["variants"][drafter][key]:
            row[field] = change(row[field])

    return edit


def faster_throughout(report: Report) -> None:
    every("blocks", "seconds", lambda seconds: seconds / 8)(report)
    times("tokens_per_second", 8)(report)


def twice(report: Report) -> None:
    report["variants"].append(report["variants"][1])


def another_baseline(report: Report) -> None:
    for key in ("greedy_equal", "speedup", "loses"):
        report["variants"][1].pop(key, None)
    report["variants"][0] = {**report["variants"][1], "drafter": "none"}


EDITS: dict[str, tuple[Callable[[Report], None], str]] = {
    "its speed": (times("tokens_per_second", 3), "'tokens_per_second' is "),
    "the baseline's speed": (times("tokens_per_second", 0.3, drafter=0), "'tokens_per_second' is "),
    "the time of its blocks": (every("blocks", "seconds", lambda seconds: seconds / 3), "'tokens_per_second' is "),
    "the tokens of its blocks": (every("blocks", "tokens", lambda tokens: tokens * 3), "'tokens of pass 0' is "),
    "the tokens of its requests": (every("requests", "tokens", lambda tokens: tokens * 3), "'tokens of pass 0' is "),
    "its speed and its blocks": (faster_throughout, "its requests took "),
    "no blocks": (lambda report: report["variants"][1].pop("blocks"), "has no 'blocks'"),
    "its histograms": (every("requests", "histogram", lambda counts: [0, *counts]), "'acceptance_length' is "),
    "its acceptance length": (times("acceptance_length", 1.1), "'acceptance_length' is "),
    "its rates": (of("full_acc", [0.9, 0.9, 0.9]), "'full_acc[0]' is 0.9"),
    "fewer rates": (of("full_acc", [10 / 14]), "'full_acc' has 1 positions"),
    "its conditional rates": (of("cond_acc", [0.9, 0.9, 0.9]), "'cond_acc[0]' is 0.9"),
    "its flatness": (of("flatness", 1.0), "'flatness' is 1.0"),
    "its loops": (of("loop_share", 0.5), "'loop_share' is 0.5"),
    "an answer that loops": (
        lambda report: report["variants"][1]["requests"][0].update(looping=True),
        "'loop_share' is 0.0",
    ),
    "a category": (
        lambda report: report["variants"][1]["categories"]["cold"].update(acceptance_length=3.9),
        "categories['cold']: 'acceptance_length' is 3.9",
    ),
    "equal answers": (
        of("greedy_equal", {"equal": 8, "total": 8, "near_ties": 0, "differences": []}),
        "'greedy_equal.equal' is 8",
    ),
    "the hashes of answers": (every("requests", "output_sha256", lambda sha256: "0" * 64), "'greedy_equal.equal' is 6"),
    "a difference less": (
        lambda report: report["variants"][1]["greedy_equal"]["differences"].pop(),
        "'greedy_equal.differences' is 1",
    ),
    "answers left out": (lambda report: report["variants"][1]["requests"].pop(), "but its requests give "),
    "a variant twice": (twice, "holds 'good' twice"),
    "a baseline that speculates": (another_baseline, "the variant 'none' speculated"),
    "sampling": (
        of(
            "sampling",
            {
                "differs": False,
                "p_value": 1e-5,
                "error_rate": 0.001,
                "samples": 9,
                "reference_samples": 9,
                "prompts": 1,
            },
        ),
        "'sampling.differs' is False",
    ),
    "its speed-up": (times("speedup", 1.1), "'speedup' is "),
    "that it loses": (
        lambda report: report["variants"][1].update(speedup_ci95=[1.1, 1.2], loses=True),
        "'loses' is True",
    ),
    "that it wins": (
        lambda report: report["variants"][1].update(speedup_ci95=[0.9, 1.2], loses=False),
        "'loses' is False",
    ),
    "its step's cost": (times("step_cost", 0.9), "'step_cost' is "),
    "a comparison": (
        lambda report: report["comparisons"].append(
            {"a": "good", "b": "good", "delta_acceptance_length": 0.1, "ci95": [0, 1], "p_adjusted": 0, "speedup": 1}
        ),
        "comparisons[0]: 'delta_acceptance_length' is 0.1",
    ),
    "a comparison of nobody": (
        lambda report: report["comparisons"].append(
            {"a": "none", "b": "good", "delta_acceptance_length": 0.1, "ci95": [0, 1], "p_adjusted": 0, "speedup": 1}
        ),
        "comparisons[0]: 'none' has no acceptance length there",
    ),
    "simulated": (lambda report: report.update(simulated=True), "was simulated"),
    "weights without a hash": (
        of("flags", ["python", "--tp", "1", "--speculative-draft-model-path", "/gone"]),
        "has no 'drafter_sha256'",
    ),
}


@pytest.mark.parametrize("what", EDITS)
def test_what_was_edited_is_refused(measured: Report, tmp_path: Path, what: str, capsys: Any):
    edit, reason = EDITS[what]
    if what == "weights without a hash":
        measured["variants"][1].pop("drafter_sha256")
    edit(measured)
    capsys.readouterr()
    assert judged(measured, tmp_path) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and reason in shown.err and shown.err.count("\n") == 1


def test_weights_that_are_not_here_hold(measured: Report, tmp_path: Path, capsys: Any):
    measured["variants"][1]["flags"] += ["--speculative-draft-model-path", str(tmp_path / "gone")]
    assert judged(measured, tmp_path) == 3
    assert "is not here, so whether it has changed since cannot be seen" in capsys.readouterr().out


HOSTILE = (
    None, True, 0, -1, -1.5, 1e308, 10**400, "", "x", "<script>", "\ud800", "\x00", [], {}, [None], ["a", "b"], [1],
    {"a": 1}, [[]], [1.0, 0.5, 2.0], KeyError,
)  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value, of lists the first two."""
    yield at
    children = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for name, each in children:
        yield from places(each, (*at, name))


def test_no_edit_is_a_traceback(tmp_path: Path):
    """Every value of a report in turn replaced by some that do not belong there: refused in words, or judged and
    shown."""
    whole = made_up(("none", "old", "ngram"), loads=(4,))
    for variant in whole["variants"][:3]:
        seconds = 30 * 128 / variant["tokens_per_second"]
        variant["blocks"] = [{"repeat": 0, "part": 0, "seconds": seconds, "tokens": 30 * 128}]
        for request in variant["requests"]:
            request["seconds"] = seconds / 10
    whole["variants"][1]["ngram"] = {"external_corpus_path": "/gone", "external_corpus_sha256": "0" * 64}
    policy = gate.Policy(drafter="old", incumbent="ngram", min_acceptance_length=1.2, must_not_lose="all")
    file, dice, judged = tmp_path / "report.json", random.Random(1), 0
    for *parents, last in (place for place in places(whole) if place):
        for value in dice.sample(HOSTILE, 3):
            edited = copy.deepcopy(whole)
            table: Any = edited
            for name in parents:
                table = table[name]
            if value is KeyError:
                del table[last]
            else:
                table[last] = value
            file.write_text(json.dumps(edited))
            try:
                report = read_report(file)
                write_pages(report, tmp_path)
                gate.judge(report, policy)
                judged += 1
            except (ReportError, gate.PolicyError):
                pass
            except Exception as error:
                raise AssertionError(f"{[*parents, last]} = {value!r}") from error
    assert judged > 20
