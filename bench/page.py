"""A report as one HTML page that needs nothing else: pictures, tables, provenance; for a phone, a screen and paper.

`python -m bench.page REPORT` makes report.html, report.md and report.prom of any report.json, as accept_len does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bench.pictures import Mark, Row, Series, curves, rows, swatch
from bench.render import (
    HASHES,
    PLACES,
    SIMULATED,
    Grid,
    bucket_name,
    failures,
    grids,
    heading,
    label,
    markdown,
    several_loads,
    speedup_of,
)
from bench.textfile import textfile
from drafter.costs import CostsError, read_costs
from drafter.report import Report, ReportError, read_report, write_text
from drafter.speedup import Costs, speedup

STYLE = Path(__file__).with_name("page.css")
MEANINGS = {
    "acceptance length": "tokens a verify step gives, the target's own one included; 1 means that the drafter earns "
    "nothing. Bars are 95 % intervals over prompts.",
    "break-even": "the acceptance length at which speculation is as fast as none: a verify step's time over a decode "
    "step's. A drafter pays where its acceptance length lies to the right of the tick.",
    "speed-up": "tokens per second over the baseline's at the same load. It holds for this machine, these loads and "
    "these prompts.",
    "accepted up to position": "the share of verify steps that accept a draft token and all before it.",
    "differences": "prompt by prompt; an interval that holds 0 tells no difference. p is adjusted for the number of "
    "pairs (Holm).",
    "loops": "answers that repeat themselves are easy to guess and flatter every drafter.",
}
EXAMPLES = """\
examples:
  python -m bench.page runs/accept-len-20260101-120000/report.json
  python -m bench.page report.json --costs costs.json --out public/

--costs adds what each number of draft steps would give, from costs that bench.step_cost measured.
exit codes: 0 fine, 1 the report or the costs cannot be read, 2 usage
"""

Variant = Mapping[str, Any]


def page(report: Report, costs: Costs | None = None) -> str:
    """The page. costs: of the same deployment, for pictures over the number of draft steps."""
    styles = _styles(report)
    title = f"Acceptance report: {report['provenance']['target'].get('served_name', '?')}"
    drawn = [picture for draw in PICTURES for picture in draw(report, styles)]
    if costs is not None:
        drawn += _over_steps(report, costs, styles)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(heading(report))}</p>",
        *_banners(report),
        f'<div class="pictures">{"".join(drawn)}</div>',
        *(_table(grid) for grid in grids(report)),
        *(
            f"<section><h2>Failed: {escape(name)}</h2><pre>{escape(error)}</pre></section>"
            for name, error in failures(report)
        ),
        _meanings(),
        _provenance(report),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE.read_text('utf-8')}</style></head>\n"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def write_pages(report: Report, folder: Path, costs: Costs | None = None) -> None:
    """Write report.html, report.md and report.prom, each whole or not at all."""
    write_text(folder / "report.md", markdown(report))
    write_text(folder / "report.html", page(report, costs))
    write_text(folder / "report.prom", textfile(report))


def _measured(report: Report) -> list[Variant]:
    return [variant for variant in report["variants"] if variant["status"] == "ok"]


def _name(report: Report, variant: Variant) -> str:
    """A series: a drafter at all its numbers of requests at a time."""
    return label(report, variant, load=False)


def _styles(report: Report) -> dict[str, int]:
    """A style for each series, the same in every picture."""
    return {name: place for place, name in enumerate(dict.fromkeys(_name(report, each) for each in _measured(report)))}


def _banners(report: Report) -> list[str]:
    found = []
    if report["simulated"]:
        found.append(f'<p class="banner bad" role="alert">{escape(SIMULATED)}</p>')
    if "verdict" in report:
        verdict = report["verdict"]
        kind = {"promote": "good", "reject": "bad"}.get(verdict["decision"], "")
        reasons = "".join(f"<li>{escape(reason)}</li>" for reason in verdict["reasons"])
        decision = f"<strong>Verdict: {escape(verdict['decision'])}</strong>"
        found.append(f'<div class="banner {kind}">{decision}<ul>{reasons}</ul></div>')
    return found


def _figure(title: str, picture: str, legend: Mapping[str, int], note: str = "") -> str:
    """A picture with its title and, where there is more than one series, its legend."""
    entries = "".join(f"<li>{swatch(style)}{escape(name)}</li>" for name, style in legend.items())
    shown = f'<ul class="legend">{entries}</ul>' if len(legend) > 1 else ""
    said = f"<p>{escape(note)}</p>" if note else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{shown}{picture}{said}</figure>"


def _interval(table: Mapping[str, Any], key: str) -> tuple[float | None, float | None]:
    low, high = table.get(f"{key}_ci95", (None, None))
    return low, high


def _speedups(report: Report, styles: Mapping[str, int]) -> list[str]:
    """Tokens/s against the baseline's: over the load where there are several, else drafter by drafter."""
    baseline = report["provenance"].get("baseline")
    compared = [
        (variant, gain)
        for variant in _measured(report)
        if variant["drafter"] != baseline and (gain := speedup_of(report, variant)) is not None
    ]
    if not compared:
        return []
    title = f"Speed-up over {baseline}"
    legend = {name: styles[name] for name in dict.fromkeys(_name(report, variant) for variant, _ in compared)}
    if several_loads(report)[0]:
        loads = sorted({variant["concurrency"] for variant, _ in compared})
        series = [
            Series(
                name,
                style,
                tuple(
                    (loads.index(variant["concurrency"]), gain, *_interval(variant, "speedup"))
                    for variant, gain in sorted(compared, key=lambda pair: pair[0]["concurrency"])
                    if _name(report, variant) == name
                ),
            )
            for name, style in legend.items()
        ]
        picture = curves(
            series,
            what=title,
            x_label="requests at a time",
            x_ticks=[(place, str(load)) for place, load in enumerate(loads)],
            rule=1.0,
        )
    else:
        entries = [
            Row(name, (Mark(name, styles[name], gain, *_interval(variant, "speedup")),))
            for variant, gain in compared
            for name in [_name(report, variant)]
        ]
        picture = rows(entries, what=title, x_label=f"tokens/s over those of {baseline}", rule=1.0, from_zero=True)
        legend = {}
    return [_figure(title, picture, legend, "Dashed: as fast as without. Below it, speculation loses.")]


def _speeds(report: Report, styles: Mapping[str, int]) -> list[str]:
    """Tokens/s over the load, where there are several."""
    if not several_loads(report)[0]:
        return []
    measured = sorted(_measured(report), key=lambda variant: int(variant["concurrency"]))
    loads = sorted({variant["concurrency"] for variant in measured})
    series = [
        Series(
            name,
            style,
            tuple(
                (loads.index(each["concurrency"]), each["tokens_per_second"], None, None)
                for each in measured
                if _name(report, each) == name
            ),
        )
        for name, style in styles.items()
    ]
    ticks = [(place, str(load)) for place, load in enumerate(loads)]
    picture = curves(series, what="Tokens per second", x_label="requests at a time", x_ticks=ticks)
    return [_figure("Tokens per second, all requests together", picture, styles)]


def _break_even(report: Report, styles: Mapping[str, int]) -> list[str]:
    """Acceptance length against the one that would break even, variant by variant."""
    known = [each for each in _measured(report) if "step_cost" in each and "acceptance_length" in each]
    if not known:
        return []
    entries = []
    for variant in known:
        name = _name(report, variant)
        mark = Mark(name, styles[name], variant["acceptance_length"], *_interval(variant, "acceptance_length"))
        entries.append(Row(label(report, variant), (mark,), variant["step_cost"]))
    picture = rows(entries, what="Acceptance length against break-even", x_label="acceptance length; tick: break-even")
    return [_figure("Does it pay?", picture, {}, "Right of its tick, a drafter is worth its verify steps.")]


def _firsts(report: Report) -> list[Variant]:
    """One variant that speculated for each series: at its smallest load."""
    found: dict[str, Variant] = {}
    for variant in sorted(_measured(report), key=lambda each: int(each["concurrency"])):
        if "acceptance_length" in variant:
            found.setdefault(_name(report, variant), variant)
    return list(found.values())


def _positions(report: Report, styles: Mapping[str, int]) -> list[str]:
    """Shares of steps that accept each draft position, and the acceptance length of shorter chains."""
    firsts = [variant for variant in _firsts(report) if variant["full_acc"]]
    if not firsts:
        return []
    longest = max(len(variant["full_acc"]) for variant in firsts)
    ticks = [(float(place), str(place)) for place in range(1, longest + 1)]
    legend = {name: styles[name] for name in (_name(report, variant) for variant in firsts)}
    shares, lengths = [], []
    for variant in firsts:
        name, chances = _name(report, variant), variant["full_acc"]
        sums = [1 + sum(chances[: place + 1]) for place in range(len(chances))]
        shares.append(_plain(name, legend[name], chances))
        lengths.append(_plain(name, legend[name], sums))
    accepted = curves(shares, what="Accepted by position", x_label="draft position", x_ticks=ticks)
    chains = curves(
        lengths, what="Acceptance length over draft steps", x_label="draft steps", x_ticks=ticks, from_zero=False
    )
    return [
        _figure("Verify steps that accept up to a position", accepted, legend),
        _figure("Acceptance length over draft steps", chains, legend, "Of the same drafter with a shorter chain."),
    ]


def _plain(name: str, style: int, values: Sequence[float]) -> Series:
    return Series(name, style, tuple((place + 1.0, value, None, None) for place, value in enumerate(values)))


def _categories(report: Report, styles: Mapping[str, int]) -> list[str]:
    firsts = _firsts(report)
    names = list(dict.fromkeys(name for variant in firsts for name in variant["categories"]))
    entries = []
    for category in names:
        marks = tuple(
            Mark(
                name,
                styles[name],
                found["acceptance_length"],
                *_interval(found, "acceptance_length"),
            )
            for variant in firsts
            if "acceptance_length" in (found := variant["categories"].get(category, {}))
            for name in [_name(report, variant)]
        )
        if marks:
            entries.append(Row(category, marks))
    if len(entries) < 2:
        return []
    legend = {name: styles[name] for name in (_name(report, variant) for variant in firsts)}
    picture = rows(entries, what="Acceptance length by category", x_label="acceptance length")
    return [_figure("Acceptance length by category", picture, legend)]


def _differences(report: Report, styles: Mapping[str, int]) -> list[str]:
    """Paired differences with their intervals."""
    compared = report.get("comparisons", [])
    if not compared:
        return []
    entries = [
        Row(
            label(report, each),
            (
                Mark(
                    f"p {each['p_adjusted']:.3f}",
                    _style_of(each["b"], styles),
                    each["delta_acceptance_length"],
                    *each["ci95"],
                ),
            ),
        )
        for each in compared
    ]
    title = "Differences of acceptance length, prompt by prompt"
    picture = rows(entries, what=title, x_label="difference, with its 95 % interval", rule=0.0)
    return [_figure(title, picture, {}, "Dashed: no difference.")]


def _style_of(drafter: str, styles: Mapping[str, int]) -> int:
    return next((style for name, style in styles.items() if name.split(",")[0] == drafter), 0)


def _places(report: Report, styles: Mapping[str, int]) -> list[str]:
    """Acceptance length by position in the answer and by context length."""
    drawn = []
    for key, title in PLACES.items():
        firsts = [variant for variant in _firsts(report) if variant.get(key)]
        buckets = sorted({(each["from"], each["to"]) for variant in firsts for each in variant[key]})
        if len(buckets) < 2:
            continue
        legend = {name: styles[name] for name in (_name(report, variant) for variant in firsts)}
        series = [
            Series(
                _name(report, variant),
                legend[_name(report, variant)],
                tuple(
                    (buckets.index((each["from"], each["to"])), each["acceptance_length"], None, None)
                    for each in sorted(variant[key], key=lambda bucket: int(bucket["from"]))
                ),
            )
            for variant in firsts
        ]
        ticks = [(float(place), bucket_name(low, high)) for place, (low, high) in enumerate(buckets)]
        picture = curves(series, what=title, x_label="tokens", x_ticks=ticks, from_zero=False)
        drawn.append(_figure(title, picture, legend))
    return drawn


def _over_steps(report: Report, costs: Costs, styles: Mapping[str, int]) -> list[str]:
    """Speed-up over draft steps for each drafter, and break-even, from measured costs."""
    drawn = []
    batches = costs.batches
    shades = {f"{batch} at a time": place for place, batch in enumerate(batches)}
    for variant in (each for each in _firsts(report) if "steps" in each):  # NGRAM has none, and other costs
        chances = variant["full_acc"]
        series = []
        for name, batch in zip(shades, batches, strict=True):
            steps = [each for each in sorted(costs.step_ms[batch]) if each <= len(chances)]
            points = [(float(each), speedup(costs, chances, batch, each), None, None) for each in steps]
            series.append(Series(name, shades[name], tuple(points)))
        if all(len(each.points) > 1 for each in series):
            title = f"Predicted speed-up of {_name(report, variant)} over draft steps"
            ticks = [(x, f"{x:g}") for x in sorted({point[0] for each in series for point in each.points})]
            picture = curves(series, what=title, x_label="draft steps", x_ticks=ticks, rule=1.0)
            drawn.append(_figure(title, picture, shades, "Its acceptance here, with measured costs of a step."))
    steps = sorted(set.intersection(*(set(row) for row in costs.step_ms.values())))
    series = [
        Series(
            f"{each} draft step{'' if each == 1 else 's'}",
            place,
            tuple((float(at), costs.ratio(batch, each), None, None) for at, batch in enumerate(batches)),
        )
        for place, each in enumerate(steps)
    ]
    if series and len(batches) > 1:
        ticks = [(float(at), str(batch)) for at, batch in enumerate(batches)]
        title = "Acceptance length that breaks even"
        picture = curves(series, what=title, x_label="requests at a time", x_ticks=ticks, from_zero=False)
        drawn.append(_figure(title, picture, {each.name: each.style for each in series}, costs.source))
    return drawn


PICTURES: tuple[Callable[[Report, Mapping[str, int]], list[str]], ...] = (
    _speedups,
    _break_even,
    _differences,
    _categories,
    _positions,
    _speeds,
    _places,
)


def _table(grid: Grid) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in grid.columns)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in grid.rows
    )
    return (
        f'<section><h2>{escape(grid.title)}</h2><div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></section>"
    )


def _meanings() -> str:
    entries = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in MEANINGS.items())
    return f"<section><h2>What the figures mean</h2><dl>{entries}</dl></section>"


def _provenance(report: Report) -> str:
    """Where the figures come from: enough to measure them again."""
    where = report["provenance"]
    entries = {
        "measured": report["created"],
        "command": where["command"],
        "engine": f"SGLang {where.get('engine_version', '-')}, environment {where['engine_env']}",
        "target": json.dumps(where["target"]),
        "machine": json.dumps(where["machine"]),
        **{f"sha256 of the {name}": where[key] for key, name in HASHES.items() if key in where},
        "flags of every engine": " ".join(where["flags"]),
    }
    for variant in _measured(report):
        if "drafter_sha256" in variant:
            entries[f"sha256 of {variant['drafter']}"] = variant["drafter_sha256"]
    if where.get("resumed"):
        entries["resumed"] = f"{where['resumed']} times"
    shown = "".join(f"<dt>{escape(name)}</dt><dd><code>{escape(text)}</code></dd>" for name, text in entries.items())
    return f'<section class="provenance"><h2>Provenance</h2><dl>{shown}</dl></section>'


def main(argv: list[str] | None = None) -> int:
    """Make the pages of a report that is there, and return the exit code."""
    top = argparse.ArgumentParser(
        prog="page", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("report", type=Path, metavar="REPORT", help="report.json of bench/accept_len.py")
    top.add_argument("--costs", type=Path, metavar="FILE", help="measured costs of the same deployment")
    top.add_argument("--out", type=Path, metavar="DIR", help="where the pages go (default: beside the report)")
    args = top.parse_args(argv)
    folder = args.out or args.report.parent
    try:
        write_pages(read_report(args.report), folder, read_costs(args.costs) if args.costs else None)
    except (ReportError, CostsError) as error:
        print(f"page: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"page: {error.filename}: {error.strerror}: choose another folder by --out.", file=sys.stderr)
        return 1
    print(f"page: report.html, report.md and report.prom in {folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
