"""A report as tables: Markdown for a file, rich for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drafter.report import Report

NOT_DEFINED = "-"
SIMULATED = "SIMULATED: the engine was told how many tokens to accept. These figures are no evidence about any drafter."


@dataclass(frozen=True)
class Grid:
    """One table: a title, column headings, and rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def grids(report: Report) -> list[Grid]:
    """The tables of a report: one row for each variant, then acceptance length by category."""
    ok = [variant for variant in report["variants"] if variant["status"] == "ok"]
    if not ok:
        return []
    tables = [_summary(report, ok), _speed(report, ok)]
    if report.get("comparisons"):
        tables.append(_differences(report["comparisons"]))
    categories = list(dict.fromkeys(name for variant in ok for name in variant["categories"]))
    speculating = [variant for variant in ok if "acceptance_length" in variant]
    if speculating and len(categories) > 1:
        rows = tuple(
            (
                variant["drafter"],
                *(
                    _number(variant["categories"].get(category, {}).get("acceptance_length"), 2)
                    for category in categories
                ),
            )
            for variant in speculating
        )
        tables.append(Grid("Acceptance length by category", ("drafter", *categories), rows))
    return tables


def _summary(report: Report, variants: Sequence[Mapping[str, Any]]) -> Grid:
    columns = (
        "drafter",
        "draft tokens",
        "acceptance length",
        "without loops",
        "accepted up to position",
        "accepted if reached",
        "flatness",
        "loops",
        "greedy equal",
    )
    rows = []
    for variant in variants:
        rows.append(
            (
                variant["drafter"],
                str(variant.get("draft_tokens", NOT_DEFINED)),
                _with_interval(variant),
                _number(variant.get("acceptance_length_no_loops"), 3),
                _series(variant.get("full_acc")),
                _series(variant.get("cond_acc")),
                _number(variant.get("flatness"), 2),
                f"{variant['loop_share']:.0%}",
                _equal(report, variant),
            )
        )
    return Grid("Acceptance", columns, tuple(rows))


def _differences(comparisons: Sequence[Mapping[str, Any]]) -> Grid:
    rows = tuple(
        (
            f"{each['b']} against {each['a']}",
            f"{each['delta_acceptance_length']:+.3f}",
            f"{each['ci95'][0]:+.3f} to {each['ci95'][1]:+.3f}",
            f"{each['p_adjusted']:.3f}",
            f"x{each['speedup']:.2f}",
        )
        for each in comparisons
    )
    columns = ("acceptance length of", "difference", "95 % interval", "p, adjusted", "tokens/s")
    return Grid("Differences, prompt by prompt", columns, rows)


def _speed(report: Report, variants: Sequence[Mapping[str, Any]]) -> Grid:
    named = {variant["drafter"]: variant["tokens_per_second"] for variant in variants}
    baseline = report["provenance"].get("baseline")
    base = named.get(baseline)
    columns = ("drafter", "tokens/s", f"ratio to {baseline}", "TTFT p50 ms", "TPOT p50 ms", "ITL p99 ms")
    rows = tuple(
        (
            variant["drafter"],
            _number(variant["tokens_per_second"], 1),
            _number(variant["tokens_per_second"] / base if base else None, 2),
            _number(variant.get("ttft_ms_p50"), 1),
            _number(variant.get("tpot_ms_p50"), 2),
            _number(variant.get("itl_ms_p99"), 1),
        )
        for variant in variants
    )
    return Grid(f"Speed at concurrency {variants[0]['concurrency']}", columns, rows)


def heading(report: Report) -> str:
    """What was measured, in one line."""
    where = report["provenance"]
    machine, target = where["machine"], where["target"].get("served_name", "?")
    devices = ", ".join(machine.get("gpus") or [f"{machine.get('processor')}, {machine.get('cores')} cores"])
    ok = [variant for variant in report["variants"] if variant["status"] == "ok"]
    asked = (
        f"; {len(ok[0]['requests'])} answers each of at most {ok[0]['max_tokens']} tokens, "
        f"temperature {ok[0]['temperature']:g}, {ok[0]['dtype']}"
        if ok
        else ""
    )
    engine = f"SGLang {where['engine_version']}" if "engine_version" in where else "no engine came up"
    return f"{target} on {devices}; {engine}{asked}; {report['created']}"


def failures(report: Report) -> list[tuple[str, str]]:
    """(drafter, error) of each variant that failed."""
    return [(v["drafter"], v["error"]) for v in report["variants"] if v["status"] == "failed"]


def markdown(report: Report) -> str:
    """The report as a Markdown page."""
    parts = ["# Acceptance report", heading(report)]
    if report["simulated"]:
        parts.append(f"**{SIMULATED}**")
    for grid in grids(report):
        lines = [_row(grid.columns), "|" + "---|" * len(grid.columns), *map(_row, grid.rows)]
        parts += [f"## {grid.title}", "\n".join(lines)]
    for name, error in failures(report):
        fenced = "\n".join(f"    {line}" for line in error.splitlines())
        parts += [f"## Failed: {_cell(name)}", fenced]
    where = report["provenance"]
    hashes = [
        f"{name} sha256 `{where[f'{name}_sha256']}`" for name in ("profile", "prompts") if f"{name}_sha256" in where
    ]
    parts.append(f"`{where['command']}`\n\n{', '.join(hashes)}")
    return "\n\n".join(parts) + "\n"


def print_report(report: Report, console: Console) -> None:
    """Print the report: tables on a terminal, Markdown into a pipe or file."""
    if not console.is_terminal:
        console.file.write(markdown(report))
        return
    console.print(escape(heading(report)))
    if report["simulated"]:
        console.print(SIMULATED, style="bold red")
    for grid in grids(report):
        table = Table(title=grid.title, title_justify="left")
        for index, name in enumerate(grid.columns):
            table.add_column(escape(name), justify="right" if index else "left")
        for row in grid.rows:
            table.add_row(*map(escape, row))
        console.print(table)
    for name, error in failures(report):
        console.print(f"[bold red]{escape(name)} failed:[/] {escape(error)}")


def _equal(report: Report, variant: Mapping[str, Any]) -> str:
    if "greedy_equal" not in variant:
        return "baseline" if variant["drafter"] == report["provenance"].get("baseline") else NOT_DEFINED
    return f"{variant['greedy_equal']['equal']} of {variant['greedy_equal']['total']}"


def _with_interval(variant: Mapping[str, Any]) -> str:
    value = _number(variant.get("acceptance_length"), 3)
    if "acceptance_length_ci95" not in variant:
        return value
    low, high = variant["acceptance_length_ci95"]
    return f"{value} ({low:.3f} to {high:.3f})"


def _number(value: float | None, digits: int) -> str:
    return NOT_DEFINED if value is None else f"{value:.{digits}f}"


def _series(values: Sequence[float | None] | None) -> str:
    return " ".join(_number(value, 2) for value in values) if values else NOT_DEFINED


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
