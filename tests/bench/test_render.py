"""What a person reads: the same figures as in the report, on a page and on a terminal."""

import io
from typing import Any

import pytest
from rich.console import Console

from bench.render import failures, grids, heading, markdown, print_report


def variant(name: str, **changed: Any) -> dict[str, Any]:
    return {
        "status": "ok",
        "drafter": name,
        "dtype": "float32",
        "temperature": 0.0,
        "max_tokens": 64,
        "concurrency": 2,
        "thinking": "default",
        "loop_share": 0.25,
        "tokens_per_second": 20.0,
        "ttft_ms_p50": 123.456,
        "tpot_ms_p50": 7.891,
        "itl_ms_p99": 50.05,
        "categories": {"math": {}, "prose": {}},
        "requests": [{}, {}],
        **changed,
    }


@pytest.fixture
def report() -> dict[str, Any]:
    return {
        "created": "2026-01-01T00:00:00+00:00",
        "simulated": False,
        "provenance": {
            "target": {"served_name": "small"},
            "machine": {"processor": "CPU", "cores": 2, "gpus": []},
            "engine_version": "0.5.23",
            "command": "python x",
            "profile_sha256": "1",
            "prompts_sha256": "2",
            "baseline": "none",
        },
        "variants": [
            variant("none"),
            variant(
                "a|b [red]",
                tokens_per_second=35.0,
                draft_tokens=4,
                acceptance_length=2.3456,
                acceptance_length_no_loops=2.1,
                full_acc=[0.7, 0.5, 0.0],
                cond_acc=[0.7, 0.714, None],
                flatness=1.02,
                greedy_equal={"equal": 1, "total": 2},
                categories={"math": {"acceptance_length": 3.0}, "prose": {}},
            ),
            {"status": "failed", "drafter": "broken", "error": "it died.\n  last line"},
        ],
    }


def test_the_rows(report: dict[str, Any]):
    acceptance, speed, categories = grids(report)
    assert acceptance.rows == (
        ("none", "-", "-", "-", "-", "-", "-", "25%", "baseline"),
        ("a|b [red]", "4", "2.346", "2.100", "0.70 0.50 0.00", "0.70 0.71 -", "1.02", "25%", "1 of 2"),
    )
    assert speed.title == "Speed at concurrency 2"
    assert speed.columns[2] == "ratio to none"
    assert speed.rows == (
        ("none", "20.0", "1.00", "123.5", "7.89", "50.0", "-", "-", "-"),
        ("a|b [red]", "35.0", "1.75", "123.5", "7.89", "50.0", "-", "-", "-"),
    )
    assert categories.columns == ("drafter", "math", "prose")
    assert categories.rows == (("a|b [red]", "3.00", "-"),)


def test_intervals_and_differences(report: dict[str, Any]):
    report["variants"][1]["acceptance_length_ci95"] = [2.25, 2.44449]
    compared = {"a": "x", "b": "y", "delta_acceptance_length": -0.1234, "ci95": [-0.2, 0.05], "p_adjusted": 0.0312}
    report["comparisons"] = [compared | {"speedup": 0.987}]
    acceptance, _, differences, _ = grids(report)
    assert acceptance.rows[1][2] == "2.346 (2.250 to 2.444)"
    assert differences.rows == (("y against x", "-0.123", "-0.200 to +0.050", "0.031", "x0.99"),)


def test_several_loads_are_told_apart(report: dict[str, Any]):
    """Each is held against the baseline at its own load, thinking included."""
    report["variants"] = [
        variant("none", concurrency=1, thinking="off", decode_step_ms=20.0),
        variant("none", concurrency=8, thinking="off", tokens_per_second=100.0),
        variant("none", concurrency=8, thinking="on", tokens_per_second=50.0),
        variant(
            "new", concurrency=1, thinking="off", tokens_per_second=40.0, acceptance_length=2.0, verify_step_ms=30.0
        ),
        variant("new", concurrency=8, thinking="off", tokens_per_second=90.0, acceptance_length=2.0),
        variant("new", concurrency=8, thinking="on", tokens_per_second=75.0, acceptance_length=2.0),
        variant("new", concurrency=64, thinking="on", tokens_per_second=75.0, acceptance_length=2.0),
    ]
    _, speed, categories = grids(report)
    assert speed.title == "Speed"
    names = [row[0] for row in speed.rows[3:]]
    assert names == [
        f"new, at {load}" for load in ("1, thinking off", "8, thinking off", "8, thinking on", "64, thinking on")
    ]
    assert [row[2] for row in speed.rows[3:]] == ["2.00", "0.90", "1.50", "-"]
    assert (speed.rows[0][6], speed.rows[3][6]) == ("20.00", "30.00")
    assert [row[0] for row in categories.rows] == names


def test_what_the_bench_has_decided_itself_is_shown(report: dict[str, Any]):
    new = report["variants"][1]
    new |= {"speedup": 1.7, "speedup_ci95": [1.5, 1.9], "step_cost": 1.38, "foreign_vocabulary": True, "loses": False}
    new["greedy_equal"] = {"equal": 1, "total": 2, "near_ties": 1}
    new["sampling"] = {"differs": True, "p_value": 0.00012}
    new["by_answer_position"] = [
        {"from": 0, "to": 32, "acceptance_length": 2.5},
        {"from": 32, "to": 64, "acceptance_length": 2.0},
    ]
    acceptance, speed, *_, places = grids(report)
    assert acceptance.columns[-1] == "sampling"
    assert acceptance.rows[1][0].endswith("(foreign vocabulary)")
    assert acceptance.rows[1][-2:] == ("1 of 2 (1 near tie)", "differs (p 0.000)")
    assert (speed.rows[1][2], *speed.rows[1][-2:]) == ("1.70 (1.50 to 1.90)", "1.38", "yes")
    assert places.columns == ("drafter", "0-31", "32-63") and places.rows[0][1:] == ("2.50", "2.00")
    for change, said in (({"loses": True}, "no"), ({}, "unclear")):
        del new["loses"]
        new |= change
        assert grids(report)[1].rows[1][-1] == said
        new["loses"] = False


def test_a_verdict_comes_first(report: dict[str, Any]):
    report["verdict"] = {"decision": "reject", "reasons": ["slower", "a|b"]}
    lines = markdown(report).split("\n\n")
    assert lines[2] == "**Verdict: reject.** slower; a\\|b"


def test_there_is_no_ratio_without_the_baseline(report: dict[str, Any]):
    report["variants"][0] = {"status": "failed", "drafter": "none", "error": "x"}
    assert grids(report)[1].rows[0][:3] == ("a|b [red]", "35.0", "-")


def test_one_category_or_no_drafter_needs_no_table_by_category(report: dict[str, Any]):
    del report["variants"][1]
    assert [grid.title for grid in grids(report)] == ["Acceptance", "Speed at concurrency 2"]


def test_the_heading_names_the_machine(report: dict[str, Any]):
    assert heading(report) == (
        "small on CPU, 2 cores; SGLang 0.5.23; 2 answers each of at most 64 tokens, temperature 0, float32; "
        "2026-01-01T00:00:00+00:00"
    )
    report["provenance"]["machine"]["gpus"] = ["GPU A", "GPU A"]
    assert heading(report).startswith("small on GPU A, GPU A; SGLang")


def test_markdown_tables_are_whole(report: dict[str, Any]):
    page = markdown(report)
    assert "| a\\|b [red] | 4 | 2.346 |" in page
    for block in page.split("\n\n"):
        if block.startswith("|"):
            widths = {line.replace("\\|", "").count("|") for line in block.splitlines()}
            assert len(widths) == 1
    assert failures(report) == [("broken", "it died.\n  last line")]
    assert "## Failed: broken\n\n    it died.\n      last line" in page
    assert "SIMULATED" not in page


def test_a_simulation_is_shouted(report: dict[str, Any]):
    report["simulated"] = True
    assert "SIMULATED" in markdown(report)


def test_a_terminal_shows_every_cell_as_it_is(report: dict[str, Any]):
    stream = io.StringIO()
    print_report(report, Console(file=stream, force_terminal=True, width=200, color_system=None))
    shown = stream.getvalue()
    for grid in grids(report):
        for cell in (cell for row in grid.rows for cell in row):
            assert cell in shown
    assert "broken failed: it died." in shown


def test_a_pipe_gets_markdown(report: dict[str, Any]):
    stream = io.StringIO()
    print_report(report, Console(file=stream))
    assert stream.getvalue() == markdown(report)


def test_a_report_where_all_failed(report: dict[str, Any]):
    report["variants"] = report["variants"][2:]
    del report["provenance"]["engine_version"]
    assert grids(report) == []
    assert "no engine came up" in markdown(report)
