"""How many tokens does a drafter earn per verify step, how fast is it, and does it change the answers?

Starts the engine without a drafter and with each drafter, in turns, sends the same prompts at the same loads, and
writes report.json, report.html, report.md and report.prom. The work is in bench/runner.py.
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

from bench.evidence import load_of, probe_line  # noqa: E402
from bench.journal import Journal  # noqa: E402
from bench.load import Load, Sampling, Thinking  # noqa: E402
from bench.page import write_pages  # noqa: E402
from bench.progress import Progress  # noqa: E402
from bench.render import print_report  # noqa: E402
from bench.runner import Plan, PlanError, Variant, fingerprint, run, variants_of  # noqa: E402
from drafter.arguments import number, whole  # noqa: E402
from drafter.data.prompts import load_prompts  # noqa: E402
from drafter.report import Report, ReportError, to_json, write_report  # noqa: E402
from drafter.settings import read_settings  # noqa: E402
from server.config import load_profile  # noqa: E402

LARGEST = 2**31 - 1  # of any number: the engine's seeds have no more bits
COUNT = whole(1, LARGEST)
DEFAULT_PROFILE = ROOT / "deploy" / "profiles" / "cpu-smollm2.toml"

TEXT = """\
examples:
  python bench/accept_len.py --drafter ngram --limit 16
  python bench/accept_len.py --drafter ngram --drafter runs/my-drafter --prompts mt_bench,humaneval --repeats 3
  python bench/accept_len.py --drafter ngram --drafter ngram:max_trie_depth=6 --concurrency 1,4,8 --out runs/curve
  python bench/accept_len.py --url none=http://a:30000 --url new=http://b:30000 --key-file engine.yaml
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
                         changes no answer in exact arithmetic; in bfloat16 some may differ, so it is told, not failed:
                         the engine without a drafter is then asked how near a tie it was at the first other token
  step cost              time of a verify step over that of a decode step without speculation, at the same load: a
                         drafter that accepts less than that per step loses
  tokens/s               tokens (by the engine's own count) per second of wall time, over all requests together
  TTFT, TPOT             time to the first piece of text; time per token after it (medians over requests)
  ITL p99                time between two pieces of a stream; with speculation a piece carries several tokens
  Speed holds for this machine, this concurrency and these prompts only.

A drafter from elsewhere is served as it is: one sentence says what it accepts, how fast it is, and whether it loses.
Engines that already run (--url) are asked as they are; their acceptance could be faked, so the gate holds.
ngram:KEY=VALUE,... is NGRAM with other parameters than the profile's, such as another corpus
(external_corpus_path=FILE); each such word is a variant.
Variants take turns (--interleave): with --repeats or --looks, A B A B, or A B B A where a start takes over two minutes.
A run that is killed goes on by the same command with the same --out.

prompt files: JSON lines, each {"prompt": "...", "id"?, "category"?} or {"messages": [...], "id"?, "category"?}
seeds: SGLang heeds them only where the profile's extra_args have --enable-deterministic-inference
exit codes: 0 fine, 1 a variant failed, 2 usage, 130 interrupted
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
        default=[],
        metavar="NAME|DIR|none|ngram",
        help="what to measure: none, ngram, a name of the profile's [drafters], or a folder; may be given again",
    )
    add(
        "--url",
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help="an engine that already runs, measured as it is; may be given again",
    )
    add("--key-file", type=Path, metavar="FILE", help="keys of the engines at --url, as an engine writes them")
    add("--profile", type=Path, default=DEFAULT_PROFILE, metavar="FILE", help="deployment (default: cpu-smollm2.toml)")
    add(
        "--prompts",
        default="mt_bench",
        metavar="SETS",
        help="comma list of mt_bench (80), humaneval (164) and files (default: mt_bench)",
    )
    add("--limit", type=COUNT, metavar="N", help="so many of each set, spread over its categories (default: all)")
    add(
        "--concurrency",
        type=_counts,
        default=(4,),
        metavar="N[,N...]",
        help="requests at a time; several make a curve (default: 4)",
    )
    add("--num-steps", type=COUNT, metavar="N", help="draft steps of EAGLE3 drafters (default: the profile's)")
    add("--max-tokens", type=COUNT, default=256, metavar="N", help="longest answer (default: 256)")
    add("--temperature", type=number(0, 2), default=0.0, metavar="T", help="0 is greedy (default: 0)")
    add("--repeats", type=COUNT, default=1, metavar="N", help="passes over the prompts per variant (default: 1)")
    add(
        "--seed",
        type=whole(0, LARGEST),
        default=0,
        metavar="N",
        help="of the first request; the others count on (default: 0)",
    )
    add("--answers", type=COUNT, default=1, metavar="N", help="answers to each request, counted together (default: 1)")
    add(
        "--thinking",
        type=_thinking,
        default=("default",),
        metavar="on|off|default",
        help="passed to the chat template of a model that can think; `on,off` measures both (default: leave it alone)",
    )
    add("--baseline", metavar="NAME", help="what to compare with; runs first (default: none, or the first --url)")
    add(
        "--interleave",
        choices=("auto", "on", "off"),
        default="auto",
        help="whether variants take turns, repeat by repeat (default: auto, fewer turns where a start is slow)",
    )
    add(
        "--looks",
        type=COUNT,
        default=1,
        metavar="N",
        help="split the prompts in N parts and stop after the first at which every difference is clear; intervals "
        "allow for it (default: 1, no early stop)",
    )
    add(
        "--check-sampling",
        type=COUNT,
        nargs="?",
        const=5_000,
        default=0,
        metavar="N",
        help="with --temperature: also test, by N continuations of each of four prompts (default: 5000), that "
        "speculation samples what plain decoding samples",
    )
    add("--out", type=Path, metavar="DIR", help="where the report goes (default: EYAS_HOME/runs/TIME)")
    add("--json", action="store_true", help="print the report as one JSON object on stdout, and nothing else there")
    return top


def main(argv: list[str] | None = None) -> int:
    """Run the bench and return its exit code."""
    args = parser().parse_args(argv)
    made: list[Path] = []
    try:
        if not args.drafter and not args.url:
            raise PlanError("nothing to measure: name a --drafter, or a --url of an engine that runs.")
        plan = Plan(
            profile=load_profile(args.profile) if args.drafter else None,
            drafters=tuple(args.drafter),
            prompts=tuple(load_prompts(args.prompts, args.limit)),
            sampling=Sampling(args.max_tokens, args.temperature, args.seed, answers=args.answers),
            baseline=args.baseline,
            loads=tuple(Load(count, thinking) for thinking in args.thinking for count in args.concurrency),
            num_steps=args.num_steps,
            repeats=args.repeats,
            urls=tuple(args.url),
            key_file=args.key_file,
            interleave=args.interleave,
            looks=args.looks,
            check_sampling=args.check_sampling,
        )
        variants = variants_of(plan)
        folder = args.out or _new_folder(read_settings().runs)
        made = _make_folder(folder)
        journal = Journal(folder, fingerprint(plan, variants))
    except ValueError as error:  # every error of ours that is the user's to mend
        _remove(made)
        print(f"accept_len: {error}", file=sys.stderr)
        return 2
    if journal.resumed:
        print(f"accept_len: going on with the run in {folder}, {len(journal.blocks)} blocks done", file=sys.stderr)
    progress = progress_of(plan, variants, journal)
    try:
        report = run(plan, variants, progress, journal)
    except KeyboardInterrupt:
        return _interrupted(folder, made, journal)
    except OSError as error:  # a full disk, say: the engine was stopped, and the journal has what was measured
        print(
            f"accept_len: stopped by {error}: mend it and give the same command with --out {folder}.", file=sys.stderr
        )
        return 1
    finally:
        progress.close()
    try:
        write_report(report, folder / "report.json")
        write_pages(report, folder)
    except (OSError, ReportError) as error:
        print(f"accept_len: the report was not written: {error}", file=sys.stderr)
        return 1
    journal.remove()
    if args.json:
        print(to_json(report), end="")
    else:
        print_report(report, Console())
    _say_probes(report)
    print(f"accept_len: report in {folder}", file=sys.stderr)
    return 1 if any(variant["status"] == "failed" for variant in report["variants"]) else 0


def _say_probes(report: Report) -> None:
    """A sentence for each drafter and load on whether it pays."""
    ok = [variant for variant in report["variants"] if variant["status"] == "ok"]
    baselines = {load_of(each): each for each in ok if each["drafter"] == report["provenance"]["baseline"]}
    for variant in ok:
        if "speedup" in variant:
            print(f"accept_len: {probe_line(variant, baselines[load_of(variant)])}", file=sys.stderr)


def progress_of(plan: Plan, variants: list[Variant], journal: Journal) -> Progress:
    """Progress over what the journal does not have yet."""
    each = len(plan.prompts) * plan.repeats * len(plan.loads) * plan.sampling.answers
    turns = 1 if plan.interleave == "off" else plan.repeats * plan.looks
    progress = Progress(len(variants), each, turns)
    for (name, _, _), block in journal.blocks.items():
        progress.skipped(name, len(block.answers))
    return progress


def _interrupted(folder: Path, made: list[Path], journal: Journal) -> int:
    """Leave what was measured, or nothing where nothing was."""
    if journal.blocks:
        print(
            f"accept_len: interrupted; the engine was stopped, {len(journal.blocks)} blocks are kept: the same command "
            f"with --out {folder} goes on.",
            file=sys.stderr,
        )
        return 130
    journal.remove()
    _remove(made)
    print("accept_len: interrupted; the engine was stopped and no report was written.", file=sys.stderr)
    return 130


def _remove(made: list[Path]) -> None:
    """Remove the folders that this run made, innermost first."""
    for path in made:
        with contextlib.suppress(OSError):  # somebody else has put something there
            path.rmdir()


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


def _counts(text: str) -> tuple[int, ...]:
    found = tuple(COUNT(part) for part in text.split(","))
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} names one number twice")
    return found


def _thinking(text: str) -> tuple[Thinking, ...]:
    found = tuple(text.split(","))
    if len(set(found)) < len(found) or not set(found) <= {"default", "on", "off"}:
        raise argparse.ArgumentTypeError(f"{text!r} is not on, off, default, or some of them with commas between")
    return found  # type: ignore[return-value]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before the first engine, or while the report was written
        sys.exit(130)
