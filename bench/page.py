"""A report as one HTML page that needs nothing else: pictures, tables, provenance; for a phone, a screen and paper.

`python -m bench.page REPORT` makes report.html, report.md and report.prom of any report.json, as accept_len does.
"""

from __future__ import annotations

import argparse
import json
import sys
from html import escape
from pathlib import Path

from bench.pictures import measured, pictures
from bench.render import HASHES, SIMULATED, Grid, failures, grids, heading, markdown
from bench.textfile import textfile
from drafter.costs import CostsError, read_costs
from drafter.report import Report, ReportError, read_report, write_text
from drafter.speedup import Costs

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


def page(report: Report, costs: Costs | None = None) -> str:
    """The page. costs: of the same deployment, for pictures over the number of draft steps."""
    title = f"Acceptance report: {report['provenance']['target'].get('served_name', '?')}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(heading(report))}</p>",
        *_banners(report),
        f'<div class="pictures">{"".join(pictures(report, costs))}</div>',
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
    for variant in measured(report):
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
    top.add_argument("--json", action="store_true", help="print which files were made as one JSON object on stdout")
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
    if args.json:
        print(json.dumps({name: str(folder / f"report.{name}") for name in ("html", "md", "prom")}))
    print(f"page: report.html, report.md and report.prom in {folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
