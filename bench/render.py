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
HASHES = {"profile_sha256": "profile", "prompts_sha256": "prompts"}
PLACES = {
    "by_answer_position": "Acceptance length by position in the answer",
    "by_context_length": "Acceptance length by context length",
}
SIMULATED = "SIMULATED: the engine was told how many tokens to accept. These figures are no evidence about any drafter."


@dataclass(frozen=True)
class Grid:
    """One table: a title, column headings, and rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def grids(report: Report) -> list[Grid]:
    """The tables of a report: one row for each variant, then differences, categories and places."""
    ok = [variant for variant in report["variants"] if variant["status"] == "ok"]
    if not ok:
        return []
    tables = [_summary(report, ok), _speed(report, ok)]
    if report.get("comparisons"):
        tables.append(_differences(report, report["comparisons"]))
    speculating = [variant for variant in ok if "acceptance_length" in variant]
    categories = list(dict.fromkeys(name for variant in ok for name in variant["categories"]))
    if speculating and len(categories) > 1:
        rows = tuple(
            (
                label(report, variant),
                *(
                    _number(variant["categories"].get(category, {}).get("acceptance_length"), 2)
                    for category in categories
                ),
            )
            for variant in speculating
        )
        tables.append(Grid("Acceptance length by category", ("drafter", *categories), rows))
    for key, title in PLACES.items():
        placed = [variant for variant in speculating if variant.get(key)]
        if placed:
            tables.append(_by_place(report, placed, key, title))
    return tables


def several_loads(report: Report) -> tuple[bool, bool]:
    """Whether the variants differ in concurrency, and whether in thinking."""
    ok = [variant for variant in report["variants"] if variant["status"] == "ok"]
    return len({each["concurrency"] for each in ok}) > 1, len({each["thinking"] for each in ok}) > 1


def label(report: Report, variant: Mapping[str, Any], load: bool = True) -> str:
    """A variant's drafter and, where the report holds several, its load (`load`: also how many requests at a time)."""
    concurrency, thinking = several_loads(report)
    words: list[str] = [variant.get("drafter") or f"{variant['b']} against {variant['a']}"]
    if concurrency and load and "concurrency" in variant:
        words.append(f"at {variant['concurrency']}")
    if thinking and "thinking" in variant:
        words.append(f"thinking {variant['thinking']}")
    return ", ".join(words)


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
        *(["sampling"] if any("sampling" in variant for variant in variants) else []),
    )
    rows = []
    for variant in variants:
        row = (
            label(report, variant) + (" (foreign vocabulary)" if variant.get("foreign_vocabulary") else ""),
            str(variant.get("draft_tokens", NOT_DEFINED)),
            _with_interval(variant, "acceptance_length", 3),
            _number(variant.get("acceptance_length_no_loops"), 3),
            _series(variant.get("full_acc")),
            _series(variant.get("cond_acc")),
            _number(variant.get("flatness"), 2),
            f"{variant['loop_share']:.0%}",
            _equal(report, variant),
            _sampling(variant),
        )
        rows.append(row[: len(columns)])
    return Grid("Acceptance", columns, tuple(rows))


def _differences(report: Report, comparisons: Sequence[Mapping[str, Any]]) -> Grid:
    needed = any("prompts_needed" in each for each in comparisons)
    rows = tuple(
        (
            label(report, each),
            f"{each['delta_acceptance_length']:+.3f}",
            f"{each['ci95'][0]:+.3f} to {each['ci95'][1]:+.3f}",
            f"{each['p_adjusted']:.3f}",
            f"x{_with_interval(each, 'speedup', 2)}",
            *([str(each.get("prompts_needed", NOT_DEFINED))] if needed else []),
        )
        for each in comparisons
    )
    columns = (
        "acceptance length of",
        "difference",
        "95 % interval",
        "p, adjusted",
        "tokens/s",
        *(["prompts to find 0.05"] if needed else []),
    )
    return Grid("Differences, prompt by prompt", columns, rows)


def _speed(report: Report, variants: Sequence[Mapping[str, Any]]) -> Grid:
    concurrency, _ = several_loads(report)
    columns = (
        "drafter",
        "tokens/s",
        f"ratio to {report['provenance'].get('baseline')}",
        "TTFT p50 ms",
        "TPOT p50 ms",
        "ITL p99 ms",
        "step ms",
        "break-even",
        "pays",
    )
    rows = tuple(
        (
            label(report, variant),
            _number(variant["tokens_per_second"], 1),
            _ratio(report, variant),
            _number(variant.get("ttft_ms_p50"), 1),
            _number(variant.get("tpot_ms_p50"), 2),
            _number(variant.get("itl_ms_p99"), 1),
            _number(variant.get("verify_step_ms", variant.get("decode_step_ms")), 2),
            _number(variant.get("step_cost"), 2),
            pays(variant),
        )
        for variant in variants
    )
    title = "Speed" if concurrency else f"Speed at concurrency {variants[0]['concurrency']}"
    return Grid(title, columns, rows)


def pays(variant: Mapping[str, Any]) -> str:
    """Whether a variant is faster than the baseline: yes, no, unclear (its interval holds 1), or not to be told."""
    if "loses" in variant:
        return "no" if variant["loses"] else "yes"
    return "unclear" if "speedup_ci95" in variant else NOT_DEFINED


def speedup_of(report: Report, variant: Mapping[str, Any]) -> float | None:
    """Tokens/s over the baseline's at the same load; None where the baseline was not measured there."""
    if "speedup" in variant:
        return float(variant["speedup"])
    for other in report["variants"]:
        if (
            other["status"] == "ok"
            and other["drafter"] == report["provenance"].get("baseline")
            and (other["concurrency"], other["thinking"]) == (variant["concurrency"], variant["thinking"])
        ):
            return float(variant["tokens_per_second"] / other["tokens_per_second"])
    return None


def _by_place(report: Report, variants: Sequence[Mapping[str, Any]], key: str, title: str) -> Grid:
    """Acceptance length in buckets of tokens."""
    buckets = sorted({(bucket["from"], bucket["to"]) for variant in variants for bucket in variant[key]})
    rows = []
    for variant in variants:
        found = {(bucket["from"], bucket["to"]): bucket["acceptance_length"] for bucket in variant[key]}
        rows.append((label(report, variant), *(_number(found.get(bucket), 2) for bucket in buckets)))
    return Grid(title, ("drafter", *(bucket_name(low, high) for low, high in buckets)), tuple(rows))


def bucket_name(low: int, high: int) -> str:
    """A bucket of tokens, from `low` up to but not including `high`, as a person counts: both ends in it."""
    return f"{low}-{high - 1}" if high > low + 1 else str(low)


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
    if "verdict" in report:
        verdict = report["verdict"]
        parts.append(f"**Verdict: {verdict['decision']}.** " + "; ".join(map(_cell, verdict["reasons"])))
    for grid in grids(report):
        lines = [_row(grid.columns), "|" + "---|" * len(grid.columns), *map(_row, grid.rows)]
        parts += [f"## {grid.title}", "\n".join(lines)]
    for name, error in failures(report):
        fenced = "\n".join(f"    {line}" for line in error.splitlines())
        parts += [f"## Failed: {_cell(name)}", fenced]
    where = report["provenance"]
    hashes = [f"{name} sha256 `{where[key]}`" for key, name in HASHES.items() if key in where]
    parts.append(f"`{where['command']}`\n\n" + ", ".join(hashes))
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


def _ratio(report: Report, variant: Mapping[str, Any]) -> str:
    text = _number(speedup_of(report, variant), 2)
    if "speedup_ci95" not in variant:
        return text
    low, high = variant["speedup_ci95"]
    return f"{text} ({low:.2f} to {high:.2f})"


def _equal(report: Report, variant: Mapping[str, Any]) -> str:
    if "greedy_equal" not in variant:
        return "baseline" if variant["drafter"] == report["provenance"].get("baseline") else NOT_DEFINED
    equal = variant["greedy_equal"]
    count = equal.get("near_ties", 0)
    ties = f" ({count} near {'tie' if count == 1 else 'ties'})" if count else ""
    return f"{equal['equal']} of {equal['total']}{ties}"


def _sampling(variant: Mapping[str, Any]) -> str:
    if "sampling" not in variant:
        return NOT_DEFINED
    found = variant["sampling"]
    return f"{'differs' if found['differs'] else 'no difference found'} (p {found['p_value']:.3f})"


def _with_interval(table: Mapping[str, Any], key: str, digits: int) -> str:
    value = _number(table.get(key), digits)
    if f"{key}_ci95" not in table:
        return value
    low, high = table[f"{key}_ci95"]
    return f"{value} ({low:.{digits}f} to {high:.{digits}f})"


def _number(value: float | None, digits: int) -> str:
    return NOT_DEFINED if value is None else f"{value:.{digits}f}"


def _series(values: Sequence[float | None] | None) -> str:
    return " ".join(_number(value, 2) for value in values) if values else NOT_DEFINED


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    """One line, in which nothing is taken for a cell's end or for HTML."""
    return " ".join(text.splitlines()).replace("|", "\\|").replace("<", "&lt;")
