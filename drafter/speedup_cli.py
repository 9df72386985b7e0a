"""The verb speedup: what a drafter is worth on a machine, measured or on paper, and how far paper can be trusted."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafter.arguments import whole
from drafter.break_even_rules import break_even_rules
from drafter.costs import read_costs
from drafter.public_points import CONTEXT, Point, median_error, median_error_by_source, points
from drafter.report import Report, read_report, write_text
from drafter.roofline import cycle, data, decode_step, fits, machine, paper_costs, target
from drafter.speedup import (
    Acceptance,
    Costs,
    acceptance_length,
    adaptive_config,
    best_steps,
    even_acceptance,
    rate_of,
    speedup,
    stops_paying,
)

MACHINES = ("8xb200", "4xgb200", "8xh200", "8xrtx-pro-6000", "8xrtx-pro-6000-switch")
MODELS = {"8xb200": "kimi-k2.5-nvfp4", "4xgb200": "kimi-k2.5-nvfp4"}  # the others hold the INT4 weights
CHEAPER = {"8xrtx-pro-6000": "pcie-ipc", "8xrtx-pro-6000-switch": "pcie-switch-custom"}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STEPS = (1, 2, 3, 4, 5, 6, 7)
# SGLang's nightly test on 8x B200 asks of a K2.5 drafter at least this acceptance length at three draft steps.
DEFAULT_ACCEPTANCE = "2.8@3"
LONGEST = 64
DRAFTER = "kimi-eagle3-mla"
ON_PAPER = ("machine", "model", "drafter", "allreduce", "context")  # flags that say nothing where costs are measured

TEXT = """\
examples:
  python -m drafter speedup           Kimi-K2.5 on five machines, on paper, and every public point
  python -m drafter speedup --machine 8xb200 --acceptance 0.65,0.42,0.27
  python -m drafter speedup --machine 8xrtx-pro-6000 --allreduce pcie-ipc
  python -m drafter speedup --costs costs.json --report report.json --variant new --adaptive-config adaptive.json

S(B, k) = AL(k) * T1(B) / C(B, k): B requests at a time, k draft steps, AL tokens a cycle of C milliseconds, against T1
milliseconds a token. Break-even is the acceptance length at which S is 1.
--costs takes what bench/step_cost.py wrote, or a report with `none` and a drafter at several concurrencies. Without it
the costs are on paper (drafter/roofline.toml): kernels at their best, experts chosen evenly, so times are lower bounds.
Their ratios are better than the times, and the public points say how much; at large batches kernels are far from their
best, so that the load from which speculation loses comes out too high on paper: measure it.
--adaptive-config is written from measured costs alone. Does it beat a fixed number of steps, and SGLang's own table?
Name the drafter three times in a profile and measure them side by side with bench/accept_len.py:
  [drafters.fixed]   path = "DIR"
  [drafters.own]     path = "DIR", adaptive = "adaptive.json"
  [drafters.sglang]  path = "DIR", adaptive = true
exit codes: 0 fine, 1 a file, a name or a figure that will not do, 2 usage
"""


def add_speedup(commands: Any) -> None:
    """The verb `speedup`."""
    command = commands.add_parser(
        "speedup",
        help="what a drafter is worth on a machine: break-even, best number of draft steps, from which load it loses",
        description=__doc__,
        epilog=TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    table = data()
    add("--machine", action="append", choices=list(table["machines"]), help="on paper; repeatable (default: five)")
    add("--model", choices=list(table["models"]), help="on paper (default: Kimi-K2.5 as the machine holds it)")
    add("--drafter", choices=list(table["drafters"]), help=f"on paper (default: {DRAFTER})")
    add("--allreduce", choices=list(table["allreduces"]), help="another than the machine's own")
    add("--context", type=float, metavar="N", help=f"tokens that a request holds, on paper (default: {CONTEXT:g})")
    add("--costs", type=Path, metavar="FILE", help="measured costs instead of paper")
    add(
        "--acceptance",
        metavar="AL@K|P,P,...",
        help="acceptance length at K draft steps, taken as even, or the share of steps that accept each position and "
        f"all before it (default: {DEFAULT_ACCEPTANCE})",
    )
    add("--report", type=Path, metavar="FILE", help="take the acceptance of a report's drafter")
    add("--variant", metavar="NAME", help="which of the report's drafters (default: the only one)")
    add("--adaptive-config", type=Path, metavar="FILE", help="write SGLang's --speculative-adaptive-config")
    add("--break-even-rules", type=Path, metavar="FILE", help="write break-even by load as Prometheus rules")
    add("--num-steps", type=whole(), default=3, metavar="K", help="draft steps of those rules (default: 3)")
    add("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    command.set_defaults(run=run_speedup)


def run_speedup(args: argparse.Namespace) -> int:
    """Predict, print, and write what was asked for. Raises ValueError."""
    if args.report and args.acceptance is not None:
        raise ValueError("--report and --acceptance both say what is accepted: give one.")
    if args.variant is not None and not args.report:
        raise ValueError("--variant names a drafter of a report: give --report, or leave it out.")
    idle = [f"--{name}" for name in ON_PAPER if args.costs and getattr(args, name) is not None]
    if idle:
        raise ValueError(
            f"{', '.join(idle)}: of a machine on paper, but --costs were measured: give the one or the other."
        )
    if args.context is not None and not 0 < args.context < math.inf:
        raise ValueError(f"--context is {args.context:g}, expected a number of tokens.")
    if args.adaptive_config and not args.costs:
        raise ValueError("--adaptive-config needs --costs: times on paper are too far off to serve by.")
    if args.break_even_rules and not args.costs and len(args.machine or MACHINES) != 1:
        raise ValueError("--break-even-rules are for one machine: give --costs, or one --machine.")
    overall, parts = _acceptance(args)
    if args.costs:
        costs = read_costs(args.costs)
        found: dict[str, Any] = {"predictions": [_prediction(costs, overall)]}
        if args.adaptive_config:
            config = adaptive_config(costs, overall, parts)
            write_text(args.adaptive_config, json.dumps(config, indent=1) + "\n")
            found["adaptive_config"] = config
    else:
        found = {"predictions": [_on_paper(args, name, overall) for name in args.machine or MACHINES]}
        found["points"] = _points(points())
        costs = _paper(args, (args.machine or MACHINES)[0])
    if args.break_even_rules:
        command = f"python -m drafter speedup {_chosen(args)} --num-steps {args.num_steps} --break-even-rules FILE"
        write_text(args.break_even_rules, break_even_rules(costs, args.num_steps, command))
    found["acceptance"] = list(overall)
    if args.json:
        print(json.dumps(found))
    else:
        _print(found, args)
    return 0


def _acceptance(args: argparse.Namespace) -> tuple[list[float], list[list[float]]]:
    """full_acc of all requests, and of each category where a report has them."""
    if args.report is None:
        return parse_acceptance(DEFAULT_ACCEPTANCE if args.acceptance is None else args.acceptance), []
    variant = _variant(read_report(args.report), args.variant)
    parts = [each["full_acc"] for each in variant["categories"].values() if "full_acc" in each]
    return list(variant["full_acc"]), parts


def parse_acceptance(text: str) -> list[float]:
    """`2.8@3`, or `0.65,0.42,0.27`. Raises ValueError."""
    length, at, steps = text.partition("@")
    try:
        if at:
            if int(steps) > LONGEST:
                raise ValueError(f"{steps} draft steps are more than any engine takes")
            # Even acceptance says what longer chains would do; a list says nothing beyond its end.
            return even_acceptance(rate_of(float(length), int(steps)), max(STEPS))
        rates = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--acceptance {text!r}: {error}; write 2.8@3, or 0.65,0.42,0.27.") from None
    if not all(0 <= later <= earlier <= 1 for earlier, later in zip([1.0, *rates], rates, strict=False)):
        raise ValueError(
            f"--acceptance {text!r}: each position is accepted with all before it, so the shares lie between 0 and 1 "
            "and never rise."
        )
    return rates


def _variant(report: Report, name: str | None) -> Mapping[str, Any]:
    speculated = [each for each in report["variants"] if each["status"] == "ok" and "full_acc" in each]
    names = list(dict.fromkeys(each["drafter"] for each in speculated))
    if name is None and len(names) != 1:
        raise ValueError(f"the report has the drafters {', '.join(names) or '(none)'}: choose one by --variant.")
    chosen = [each for each in speculated if name in (None, each["drafter"])]
    if not chosen:
        raise ValueError(f"the report has no drafter {name!r} that speculated, only {', '.join(names) or '(none)'}.")
    longest: Mapping[str, Any] = max(chosen, key=lambda each: len(each["full_acc"]))
    return longest


def _paper(args: argparse.Namespace, name: str) -> Costs:
    """The costs of a machine on paper, as the flags have it."""
    model, drafter = target(args.model or MODELS.get(name, "kimi-k2.5-int4")), args.drafter or DRAFTER
    fits(model, drafter)
    return paper_costs(machine(name, args.allreduce), model, drafter, BATCHES, STEPS, args.context or CONTEXT)


def _chosen(args: argparse.Namespace) -> str:
    """The flags that say which costs, as they were given."""
    if args.costs:
        return f"--costs {args.costs.name}"
    given = [("machine", (args.machine or MACHINES)[0]), *((name, getattr(args, name)) for name in ON_PAPER[1:])]
    return " ".join(f"--{name} {value}" for name, value in given if value is not None)


def _on_paper(args: argparse.Namespace, name: str, overall: Acceptance) -> dict[str, Any]:
    model = target(args.model or MODELS.get(name, "kimi-k2.5-int4"))
    on, drafter, context = machine(name, args.allreduce), args.drafter or DRAFTER, args.context or CONTEXT
    costs = _paper(args, name)
    found = _prediction(costs, overall)
    for row in found["batches"]:
        batch, best = row["batch"], row["best_steps"]
        row["decode_parts_ms"] = vars(decode_step(on, model, batch, context))
        row["cycle_parts_ms"] = vars(cycle(on, model, drafter, batch, best or 3, context))
    cheaper = CHEAPER.get(name)
    if cheaper and args.allreduce is None:
        other = paper_costs(machine(name, cheaper), model, drafter, BATCHES, STEPS, context)
        found["cheaper_allreduce"] = {
            "allreduce": cheaper,
            "batches": [
                {
                    "batch": batch,
                    "decode_ratio": costs.decode_ms[batch] / other.decode_ms[batch],
                    "break_even": {str(steps): other.ratio(batch, steps) for steps in STEPS},
                    "best_speedup": best_steps(other, overall, batch)[1],
                }
                for batch in other.batches
            ],
        }
    return found


def _prediction(costs: Costs, overall: Acceptance) -> dict[str, Any]:
    """Everything that costs and acceptance say, by batch size."""
    rows = []
    for batch in costs.batches:
        best, gain = best_steps(costs, overall, batch)
        steps = sorted(costs.step_ms[batch])
        rows.append(
            {
                "batch": batch,
                "decode_ms": costs.decode_ms[batch],
                "break_even": {str(each): costs.ratio(batch, each) for each in steps},
                "speedup": {str(each): speedup(costs, overall, batch, each) for each in steps if each <= len(overall)},
                "best_steps": best,
                "best_speedup": gain,
            }
        )
    return {"source": costs.source, "batches": rows, "stops_paying": stops_paying(costs, overall)}


def _points(found: Sequence[Point]) -> dict[str, Any]:
    kinds = {kind: [point for point in found if point.kind == kind] for kind in ("speedup", "decode")}
    return {
        "list": [{**vars(point), "error": point.error} for point in found],
        "median_error": {kind: median_error(each) for kind, each in kinds.items()},
        "median_error_by_source": {kind: median_error_by_source(each) for kind, each in kinds.items()},
    }


def _print(found: Mapping[str, Any], args: argparse.Namespace) -> None:
    overall = found["acceptance"]
    lengths = ", ".join(f"k={steps} {acceptance_length(overall, steps):.2f}" for steps in range(1, len(overall) + 1))
    print(f"acceptance length: {lengths}")
    for prediction in found["predictions"]:
        print(f"\n{prediction['source']}")
        print("   batch   decode ms   break-even acceptance length (speed-up) at k draft steps")
        for row in prediction["batches"]:
            cells = "  ".join(
                f"k={steps} {value:.2f}" + (f" (x{row['speedup'][steps]:.2f})" if steps in row["speedup"] else "")
                for steps, value in row["break_even"].items()
                if steps in ("1", "3", "5", str(row["best_steps"]))
            )
            best = f"best k={row['best_steps']}: x{row['best_speedup']:.2f}" if row["best_steps"] else "none pays"
            print(f"   {row['batch']:5}   {row['decode_ms']:9.2f}   {cells}   {best}")
        stop = prediction["stops_paying"]
        print(f"   speculation stops paying at {stop} requests at a time" if stop else "   speculation pays throughout")
        if "cheaper_allreduce" in prediction:
            other = prediction["cheaper_allreduce"]
            own = {row["batch"]: row for row in prediction["batches"]}
            for row in other["batches"]:
                if row["batch"] in (1, 8, 64):
                    mine = own[row["batch"]]
                    print(
                        f"   with {other['allreduce']}, {row['batch']} at a time: decoding x{row['decode_ratio']:.2f}, "
                        f"break-even at k=3 {mine['break_even']['3']:.2f} -> {row['break_even']['3']:.2f}, "
                        f"best speed-up x{mine['best_speedup']:.2f} -> x{row['best_speedup']:.2f}"
                    )
    if "points" in found:
        _print_points(found["points"])
    if "adaptive_config" in found:
        union = sorted({steps for entry in found["adaptive_config"].values() for steps in entry["candidate_steps"]})
        print(f"\n{args.adaptive_config}: draft steps by batch size; --speculative-num-steps must be one of {union}")


def _print_points(found: Mapping[str, Any]) -> None:
    titles = {
        "speedup": "speed-up: measured, predicted",
        "decode": "milliseconds of a decode step: measured, predicted",
    }
    for kind, title in titles.items():
        print(f"\npublic points, {title}, error")
        for point in found["list"]:
            if point["kind"] == kind:
                missing = f"   not counted: its source does not give {point['missing']}" if point["missing"] else ""
                print(
                    f"   {point['measured']:6.2f} {point['predicted']:6.2f} {point['error']:+5.0%}   {point['name']}, "
                    f"{point['batch']} at a time: {point['source']}{missing}"
                )
        print(
            f"   median error {found['median_error'][kind]:.0%}; "
            f"each source counted once, {found['median_error_by_source'][kind]:.0%}"
        )
