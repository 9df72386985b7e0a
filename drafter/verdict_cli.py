"""The verb verdict: a training log read, its curve and what it implies, and whether to go on."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafter.arguments import number
from drafter.report import write_text
from drafter.runlog import Point, RunLog, RunLogError, parse_run, read_run
from drafter.svg import Series, curves, stacked
from drafter.verdict import CONTINUE, EXIT_CODES, Verdict, as_json, judge, place

SHOWN = 12  # rows of the curve that are printed

TEXT = """\
examples:
  python -m drafter verdict runs/a/log.jsonl
  python -m drafter verdict finetune.log --baseline scratch.log --plot curves.svg
  python -m drafter verdict finetune.log --baseline 0.747        the first position's accuracy, if no more is known
  python -m drafter verdict runs/a/log.jsonl --baseline runs/b/log.jsonl --follow && next-step

LOG is what a trainer wrote: the log.jsonl of `train`, the output of speculators ([speculators.metrics] {'val': ...},
also wrapped, cut off or between other lines), of SpecForge or of EAGLE. `cond_acc_k` is conditional, so that
acceptance length = 1 + sum over k of the product of cond_acc_0..k; SpecForge's `acc_k` is marginal, and its product is
a guess between two bounds that are told. Both are means over positions: compare them with other logs, never with what
an engine counts. What of a log could not be read is told. Flatness is cond_acc_1 / cond_acc_0: far below 1 points to a
foreign initialisation or a faulty roll-out before too little training.

stop: the roll-out is broken, or the loss not finite, or the gap to the baseline does not close, or it has settled under
the baseline or without having learnt, or it has fallen.
promote (to the bench): as good as the baseline, or settled where there is none.

exit codes: 0 promote, 3 continue, 4 stop, 1 a log that cannot be judged, 2 usage, 130 interrupted
"""


def add_verdict(commands: Any) -> None:
    """The verb `verdict`."""
    verb = commands.add_parser(
        "verdict",
        help="read a training log: go on, stop, or promote to the bench",
        description="Read a training log, ours or another trainer's, and say whether to go on.",
        epilog=TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = verb.add_argument
    add("log", type=Path, metavar="LOG", help="a trainer's log")
    add("--baseline", metavar="LOG_OR_JSON", help="another run's log, its metrics as JSON, or one share such as 0.747")
    add("--follow", action="store_true", help="read again while it grows, until it says stop or promote")
    add("--every", type=number(above=True), default=10.0, metavar="S", help="seconds between readings (default: 10)")
    add("--plot", type=Path, metavar="FILE", help="draw the curves as SVG")
    add("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    verb.set_defaults(run=run_verdict)


def run_verdict(args: argparse.Namespace) -> int:
    """Judge, print, draw. Returns the verdict's exit code. Raises RunLogError or OSError."""
    if args.plot and args.plot.suffix != ".svg":
        raise RunLogError(f"--plot: {args.plot} is to be SVG: name a file that ends in .svg.")
    baseline = _baseline(args.baseline) if args.baseline is not None else None
    run, verdict = _followed(args, baseline) if args.follow else _judged(args.log, baseline)
    if args.plot:
        write_text(args.plot, draw(run, baseline))
    if args.json:
        print(json.dumps(_found(run, baseline, verdict)))
    else:
        print(words(run, baseline, verdict))
    return EXIT_CODES[verdict.decision]


def tell_apart(log: Path, point: Point) -> str:
    """The command that tells a faulty roll-out from a first step that is wrong."""
    folder = log.parent / "drafter"
    drafter = shlex.quote(str(folder)) if (folder / "config.json").is_file() else "DRAFTER"
    return (
        f"python -m drafter evaluate --drafter {drafter} --shards HELD_OUT --target TARGET "
        f"--num-steps {max(2, len(point.survival))} --oracle-hidden"
    )


def words(run: RunLog, baseline: RunLog | None, verdict: Verdict) -> str:
    """A verdict for a person."""
    points = [point for point in run.judged if point.survival]
    last = points[-1]
    flat = "-" if last.flatness is None else f"{last.flatness:.2f}"
    kind = "evaluation" if run.evaluated else "mean of training record"
    lines = [
        f"{run.name}: {len(points)} {kind if len(points) == 1 else f'{kind}s'}, "
        f"implied acceptance length {last.accept_len_positions:.2f} (a mean over positions), flatness {flat}",
        *_table(points, verdict),
        f"{verdict.decision}: {verdict.reasons[0]}",
        *(f"  and {reason}" for reason in verdict.reasons[1:]),
    ]
    if verdict.hypotheses:
        lines += [f"  {rank}. {text}" for rank, text in enumerate(verdict.hypotheses, start=1)]
        lines += [
            "  what tells them apart: each later step is given the target's own features. Far better than without "
            "--oracle-hidden: the roll-out is at fault. As low: the first step is, and so the initialisation.",
            f"  {tell_apart(Path(run.name), last)}",
        ]
    left_out = [*run.left_out, *(f"baseline, {each}" for each in (baseline.left_out if baseline else ()))]
    lines += [f"note: {note}" for note in verdict.notes]
    lines += [f"left out: {each}" for each in left_out[:SHOWN]]
    if len(left_out) > SHOWN:
        lines.append(f"left out: {len(left_out) - SHOWN} more (--json has them all)")
    return "\n".join(lines)


def draw(run: RunLog, baseline: RunLog | None) -> str:
    """Implied acceptance length of run and baseline, and the run's positions, as one SVG file."""
    logs = [log for log in (run, baseline) if log]
    axis = next(
        (axis for axis in ("step", "epoch") if all(getattr(p, axis) is not None for log in logs for p in log.judged)),
        "record",
    )

    def series(points: Sequence[Point], values: Sequence[float], name: str, style: int) -> Series:
        places = range(len(points)) if axis == "record" else [getattr(point, axis) for point in points]
        return Series(name, style, tuple((float(x), y, None, None) for x, y in zip(places, values, strict=True)))

    lengths = [
        series(log.judged, [point.accept_len_positions for point in log.judged], log.name, style)
        for style, log in enumerate(logs)
    ]
    positions = []
    for k in range(max(len(point.survival) for point in run.judged)):
        reaching = [point for point in run.judged if len(point.survival) > k]
        positions.append(series(reaching, [point.survival[k] for point in reaching], f"full_acc_{k}", 2 + k))
    places = sorted({point[0] for each in lengths for point in each.points})
    ticks = [(x, f"{x:,g}") for x in places]
    return stacked(
        [
            (
                "implied acceptance length, a mean over positions",
                curves(lengths, what="implied acceptance length", x_label=axis, x_ticks=ticks, from_zero=False),
            ),
            (
                f"accepted up to position k, {run.name}",
                curves(positions, what="accepted up to each position", x_label=axis, x_ticks=ticks),
            ),
        ],
        [(each.style, each.name) for each in (*lengths, *positions)],
    )


def _baseline(text: str) -> RunLog:
    if not text:
        raise RunLogError("--baseline is empty, as an unset variable is: give a log or a share, or leave it out.")
    try:
        share = float(text)
    except ValueError:
        return read_run(Path(text))
    if not 0 <= share <= 1:
        raise RunLogError(f"--baseline: {text} is no share from 0 to 1: give the first position's accuracy, or a log.")
    return parse_run(json.dumps({"val": {"full_acc_0": share}}), text)


def _judged(log: Path, baseline: RunLog | None) -> tuple[RunLog, Verdict]:
    run = read_run(log)
    return run, judge(run, baseline)


def _followed(args: argparse.Namespace, baseline: RunLog | None) -> tuple[RunLog, Verdict]:
    """Judge whenever the log has changed, a line on stderr each time, until it says stop or promote."""
    seen, said = None, None
    while True:
        try:
            stat = args.log.stat()
            if (stat.st_size, stat.st_mtime_ns) != seen:
                seen = stat.st_size, stat.st_mtime_ns
                run, verdict = _judged(args.log, baseline)
                last = run.judged[-1]
                line = f"{place(last)}: implied {last.accept_len_positions:.2f}, {verdict.decision}"
                if line != said:
                    print(f"verdict: {line}", file=sys.stderr, flush=True)
                    said = line
                if verdict.decision != CONTINUE:
                    return run, verdict
        except (FileNotFoundError, RunLogError) as error:
            if said is None:  # a run that has not evaluated yet
                print(f"verdict: waiting: {error}", file=sys.stderr, flush=True)
                said = "waiting"
        time.sleep(args.every)


def _table(points: Sequence[Point], verdict: Verdict) -> list[str]:
    """A row for each point, at most SHOWN of them, the last among them."""
    step = -(-len(points) // SHOWN)
    shown = list(reversed(points[::-1][::step]))
    beside = {pair.place: pair.baseline for pair in verdict.pairs}
    width = max(len(place(point)) for point in shown)
    depth = max(len(point.survival) for point in shown)
    head = f"{'':<{width}}  {' '.join(f'acc_{k}' for k in range(depth))}  implied  flatness"
    lines = [head + ("  baseline" if beside else "")]
    for point in shown:
        rates = [f"{rate:.3f}" for rate in point.survival] + ["    -"] * (depth - len(point.survival))
        flat = "-" if point.flatness is None else f"{point.flatness:.2f}"
        line = f"{place(point):<{width}}  {' '.join(rates)}  {point.accept_len_positions:7.2f}  {flat:>8}"
        if beside:
            value = beside.get(float(getattr(point, verdict.axis)))
            line += f"  {'-' if value is None else f'{value:.2f}':>8}"
        lines.append(line)
    return lines


def _found(run: RunLog, baseline: RunLog | None, verdict: Verdict) -> dict[str, Any]:
    """The object that `verdict --json` prints."""
    last = next(point for point in reversed(run.judged) if point.survival)
    return {
        "decision": verdict.decision,
        "reasons": list(verdict.reasons),
        "hypotheses": list(verdict.hypotheses),
        "tell_apart": tell_apart(Path(run.name), last) if verdict.hypotheses else None,
        "log": run.name,
        "evaluated": run.evaluated,
        "accept_len_positions": round(last.accept_len_positions, 6),
        "flatness": None if last.flatness is None else round(last.flatness, 6),
        "axis": verdict.axis,
        "curve": [as_json(point) for point in run.judged],
        "baseline": None
        if baseline is None
        else {"log": baseline.name, "curve": [as_json(point) for point in baseline.judged]},
        "at_equal_places": [pair.__dict__ for pair in verdict.pairs],
        "notes": list(verdict.notes),
        "left_out": list(run.left_out),
        "baseline_left_out": list(baseline.left_out) if baseline else [],
    }
