"""How many tokens does a drafter earn per verify step, how fast is it, and does it change the answers?

Starts the engine once without a drafter and once with each drafter, sends the same prompts, and writes report.json
and report.md. The work is in bench/runner.py.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):
    # Run as a script: Python put bench/ first on the path, where the project's root belongs.
    sys.path[0] = str(ROOT)

from rich.console import Console  # noqa: E402

from bench.load import Sampling  # noqa: E402
from bench.progress import Progress  # noqa: E402
from bench.render import markdown, print_report  # noqa: E402
from bench.runner import Plan, PlanError, run, variants_of  # noqa: E402
from drafter.data.prompts import load_prompts  # noqa: E402
from drafter.report import ReportError, to_json, write_report, write_text  # noqa: E402
from drafter.settings import read_settings  # noqa: E402
from server.config import load_profile  # noqa: E402

DEFAULT_PROFILE = ROOT / "deploy" / "profiles" / "cpu-smollm2.toml"

TEXT = """\
examples:
  python bench/accept_len.py --drafter ngram --limit 16
  python bench/accept_len.py --drafter ngram --drafter runs/my-drafter --prompts mt_bench,humaneval --repeats 3
  python -m bench.accept_len --profile deploy/profiles/cpu-smollm2.toml --drafter ngram --limit 8 --json >report.json

what the numbers mean:
  acceptance length      1 + accepted draft tokens / verify steps, over the sums of all answers; the token that the
                         target adds to each step is included, so 1.00 means that the drafter earns nothing
                         in brackets its 95 % interval: another set of such prompts would give a figure within it
  differences            between two drafters on the same prompts, by a paired bootstrap over prompts within their
                         categories; p is adjusted for the number of pairs (Holm)
  without loops          the same without answers that repeat themselves (of 32 tokens or more, fewer than 0.7 of
                         the 4-grams distinct): loops are easy to guess and flatter every drafter
  accepted up to         for each draft position, the share of all steps that accepted it and all before it
  accepted if reached    the same among the steps that accepted all before it; even in a healthy drafter
  flatness               second position over first, of those: far below 1 points to a defect before too little training
  greedy equal           at temperature 0, answers whose token ids are those of the baseline, one by one. Speculation
                         changes no answer in exact arithmetic; in bfloat16 some may differ, so it is told, not failed
  tokens/s               tokens (by the engine's own count) per second of wall time, over all requests together
  TTFT, TPOT             time to the first piece of text; time per token after it (medians over requests)
  ITL p99                time between two pieces of a stream; with speculation a piece carries several tokens
  Speed holds for this machine, this concurrency and these prompts only.

prompt files: JSON lines, each {"prompt": "...", "id"?, "category"?} or {"messages": [...], "id"?, "category"?}
seeds: SGLang heeds them only where the profile's extra_args have --enable-deterministic-inference
exit codes: 0 fine, 1 a variant failed, 2 usage, 130 interrupted (then nothing is written)
"""


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(
        prog="accept_len", description=__doc__, epilog=TEXT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = top.add_argument
    add(
        "--drafter",
        action="append",
        required=True,
        metavar="NAME|DIR|none|ngram",
        help="what to measure: none, ngram, a name of the profile's [drafters], or a folder; may be given again",
    )
    add("--profile", type=Path, default=DEFAULT_PROFILE, metavar="FILE", help="deployment (default: cpu-smollm2.toml)")
    add(
        "--prompts",
        default="mt_bench",
        metavar="SETS",
        help="comma list of mt_bench (80), humaneval (164) and files (default: mt_bench)",
    )
    add("--limit", type=_count, metavar="N", help="so many of each set, spread over its categories (default: all)")
    add("--concurrency", type=_count, default=4, metavar="N", help="requests at a time (default: 4)")
    add("--num-steps", type=_count, metavar="N", help="draft steps of EAGLE3 drafters (default: the profile's)")
    add("--max-tokens", type=_count, default=256, metavar="N", help="longest answer (default: 256)")
    add("--temperature", type=_temperature, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    add("--repeats", type=_count, default=1, metavar="N", help="passes over the prompts per variant (default: 1)")
    add("--seed", type=_natural, default=0, metavar="N", help="of the first request; the others count on (default: 0)")
    add(
        "--thinking",
        choices=("default", "on", "off"),
        default="default",
        help="passed to the chat template of a model that can think (default: leave it to the template)",
    )
    add("--baseline", default="none", metavar="NAME", help="what to compare with; runs first (default: none)")
    add("--out", type=Path, metavar="DIR", help="where report.json and report.md go (default: EYAS_HOME/runs/TIME)")
    add("--json", action="store_true", help="print the report as one JSON object on stdout, and nothing else there")
    return top


def main(argv: list[str] | None = None) -> int:
    """Run the bench and return its exit code."""
    args = parser().parse_args(argv)
    made: list[Path] = []
    try:
        plan = Plan(
            profile=load_profile(args.profile),
            drafters=tuple(args.drafter),
            prompts=tuple(load_prompts(args.prompts, args.limit)),
            sampling=Sampling(args.max_tokens, args.temperature, args.seed, args.thinking),
            baseline=args.baseline,
            concurrency=args.concurrency,
            num_steps=args.num_steps,
            repeats=args.repeats,
        )
        variants = variants_of(plan)
        folder = args.out or _new_folder(read_settings().runs)
        made = _make_folder(folder)
    except ValueError as error:  # every error of ours that is the user's to mend
        print(f"accept_len: {error}", file=sys.stderr)
        return 2
    progress = Progress(len(variants), len(plan.prompts) * plan.repeats)
    try:
        report = run(plan, variants, progress)
    except KeyboardInterrupt:
        for path in made:
            with contextlib.suppress(OSError):  # somebody else has put something there
                path.rmdir()
        print("accept_len: interrupted; the engine was stopped and no report was written.", file=sys.stderr)
        return 130
    finally:
        progress.close()
    try:
        write_report(report, folder / "report.json")
        write_text(folder / "report.md", markdown(report))
    except (OSError, ReportError) as error:
        print(f"accept_len: the report was not written: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(to_json(report), end="")
    else:
        print_report(report, Console())
    print(f"accept_len: report in {folder}", file=sys.stderr)
    return 1 if any(variant["status"] == "failed" for variant in report["variants"]) else 0


def _new_folder(runs: Path) -> Path:
    """A folder for a run that starts now, which does not exist yet."""
    stamp = f"accept-len-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    names = itertools.chain([stamp], (f"{stamp}-{count}" for count in itertools.count(2)))
    return next(runs / name for name in names if not (runs / name).exists())


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder now, before hours of work depend on it. Returns what was made, innermost first."""
    missing = list(itertools.takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"the folder {folder} cannot be made ({error.strerror}): choose another by --out.") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PlanError(f"the folder {folder} cannot be written to: choose another by --out.")
    return missing


def _count(text: str) -> int:
    number = _natural(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return number


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 2")
    return value


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before the first engine, or while the report was written
        sys.exit(130)
