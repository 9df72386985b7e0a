"""`python -m drafter generate`: what a person sees of it."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from drafter.arguments import key_headers, number, whole
from drafter.data.asking import GIVE_UP_S, Endpoint, GenerateError
from drafter.data.generate import BYTES_A_TOKEN, Outcome, Plan, generate, probe
from drafter.data.ledger import Ledger
from drafter.data.overlap import bundled_overlap
from drafter.data.prompts import StreamedPrompts
from drafter.data.template import Template

GENERATE = """\
examples:
  python -m drafter generate --url http://127.0.0.1:8000 --model smollm2-135m-instruct --target DIR \\
      --out train.jsonl --count 4000 --openers deploy/recipes/smollm2/openers.txt
  python -m drafter generate --url … --model … --target DIR --out mt_bench.jsonl --prompts mt_bench --past 8

Serve the target without a drafter for this, so that the data depend on none. Run the same command again to go on
after an interruption. A prompt that finds no end is cut after its last whole sentence, an answer that loops before the
loop. What is left out, and counted: prompts without a whole sentence, with placeholders, or of a benchmark; answers
that are short, that loop from the first, or that hold a benchmark's text (8 words in a row).

Made for hundreds of thousands of prompts: files are read a line at a time, --concurrency bounds the requests, and what
is done is entered in OUT.ledger, so that kill -9 loses and doubles nothing. A busy or restarting engine is asked again
after a pause that doubles up to a minute. --max-total-tokens and --max-gb are never passed.
"""

GB = 1e9


def add_generate(commands: Any) -> None:
    """The verb `generate`."""
    command = commands.add_parser(
        "generate",
        help="the target writes its own conversations, through an engine",
        description="Let the target write prompts and answers, as the engine's own token ids.",
        epilog=GENERATE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("--url", required=True, help="an OpenAI endpoint of SGLang's: an engine, or the gateway before it")
    add("--model", required=True, metavar="NAME", help="the served name")
    add("--key-file", type=Path, metavar="FILE", help="the engine's keys (as `python -m server engine` prints it)")
    add("--target", type=Path, required=True, metavar="DIR", help="the target's folder, for its chat template")
    add("--out", type=Path, required=True, metavar="FILE", help="conversations, as JSON lines; appended to")
    add("--count", type=whole(), metavar="N", help="conversations in all; with --prompts: prompts (default: each)")
    add("--prompts", metavar="SETS", help="answer these (files, or bundled sets) instead of the target's own prompts")
    add("--openers", type=Path, metavar="FILE", help=r"how its own prompts begin, one a line (\n is a line break)")
    add("--max-tokens", type=whole(), default=256, metavar="N", help="longest answer (default: 256)")
    add("--prompt-tokens", type=whole(), default=96, metavar="N", help="longest prompt of its own (default: 96)")
    add(
        "--temperatures",
        type=_temperatures,
        default=(0.0, 0.7),
        metavar="T,T",
        help="each prompt is answered once at each of these; 0 is greedy (default: 0,0.7)",
    )
    add(
        "--past",
        type=whole(0),
        default=0,
        metavar="N",
        help="for `evaluate`: greedy, N tokens past each answer's end",
    )
    add("--concurrency", type=whole(), default=64, metavar="N", help="conversations at a time (default: 64)")
    add(
        "--thinking",
        choices=("default", "on", "off"),
        default="default",
        help="have the chat template turn thinking on or off (default: as the template has it)",
    )
    add("--max-total-tokens", type=whole(), metavar="N", help="never generate more than so many tokens in all")
    add("--max-gb", type=number(above=True), metavar="GB", help="never let --out grow larger (10^9 bytes)")
    add(
        "--give-up-after",
        type=number(),
        default=GIVE_UP_S,
        metavar="S",
        help=f"seconds for which a request is asked again while nothing answers (default: {GIVE_UP_S:g})",
    )
    add("--seed", type=int, default=0, metavar="N", help="another seed writes other conversations (default: 0)")
    add("--json", action="store_true", help="print the outcome as one JSON object on stdout, and nothing else there")
    command.set_defaults(run=run_generate)


def run_generate(args: argparse.Namespace) -> int:
    """Write the conversations. Raises GenerateError, KeyFileError, ConversationError or PromptError."""
    check_out(args.out)
    prompts = StreamedPrompts(args.prompts, args.count) if args.prompts else ()
    if args.prompts is None and args.past:
        raise GenerateError("--past is for the prompts of a set that is to be walked: name it with --prompts.")
    if not prompts and args.count is None:
        raise GenerateError("how many conversations? Give --count, or --prompts with a set to answer.")
    temperatures = (0.0,) if args.past else args.temperatures
    plan = Plan(
        count=len(prompts) * len(temperatures) or args.count,
        prompts=prompts,
        openers=read_openers(args.openers) if args.openers else ("",),
        max_tokens=args.max_tokens,
        prompt_tokens=args.prompt_tokens,
        temperatures=temperatures,
        past=args.past,
        concurrency=args.concurrency,
        seed=args.seed,
        thinking=args.thinking,
        token_cap=args.max_total_tokens,
        byte_cap=None if args.max_gb is None else int(args.max_gb * GB),
    )
    endpoint = Endpoint(args.url.rstrip("/"), args.model, key_headers(args.key_file), args.give_up_after)
    outcome = asyncio.run(_generate(endpoint, plan, args.target, args.out))
    if args.json:
        print(json.dumps(outcome.__dict__))
    else:
        left_out = ", ".join(f"{count} × {reason}" for reason, count in sorted(outcome.rejected.items())) or "none"
        print(
            f"{args.out}: {outcome.there_before + outcome.written} conversations, {outcome.written} of them new, "
            f"in {outcome.seconds:.0f} s ({outcome.tokens / max(outcome.seconds, 1e-9):.0f} answer tokens/s); "
            f"{outcome.tokens_in_all:,} tokens and {outcome.bytes / 1e6:.1f} MB in all, {outcome.retries} requests "
            f"asked again. Left out: {left_out}."
        )
    if outcome.stopped_by:
        print(
            f"generate: stopped before it would pass {outcome.stopped_by}, as asked; raise the cap and run the same "
            "command to go on.",
            file=sys.stderr,
        )
        return 0
    short = plan.count - outcome.there_before - outcome.written
    if short > 0 and not prompts:
        raise GenerateError(
            f"{short} of {plan.count} conversations are missing: nearly all that was written was left out."
        )
    return 0


async def _generate(endpoint: Endpoint, plan: Plan, target: Path, out: Path) -> Outcome:
    template, overlap = Template.of_folder(target, not plan.prompts), bundled_overlap()
    with Ledger(out) as ledger:
        answers, there = len(plan.temperatures), ledger.kept
        done = sum(ledger.is_done(prompt.id, answers) for prompt in plan.prompts) * answers if plan.prompts else there
    left = max(plan.count - done, 0)
    if left:
        rate = await probe(endpoint, min(plan.concurrency, left))
        most = left * (plan.max_tokens + plan.past)
        print(
            f"generate: {left} conversations to write ({there} are there), at most {most:,} answer tokens: up to "
            f"{most / rate / 60:.0f} min at {rate:.0f} tokens/s, and {most * BYTES_A_TOKEN / 1e6:.0f} MB.",
            file=sys.stderr,
        )
    with tqdm(total=plan.count, initial=there, unit="conv", file=sys.stderr, disable=None, mininterval=1.0) as bar:

        def progress(kept: int, ledger: Ledger) -> None:
            size = f"{ledger.tokens:,} tokens, {ledger.bytes / 1e6:.1f} MB"
            bar.set_postfix_str(f"{size}, {ledger.rejected.total()} left out", refresh=False)
            bar.update(kept)

        return await generate(endpoint, template, plan, overlap, out, progress)


def check_out(file: Path) -> None:
    """Raise GenerateError unless conversations can be appended to `file`."""
    if file.is_dir():
        raise GenerateError(f"--out: {file} is a folder: name a file in it, such as {file / 'train.jsonl'}.")
    if not file.parent.is_dir():
        raise GenerateError(f"--out: {file} is to lie in {file.parent}, which is no folder: make it first.")


def read_openers(file: Path) -> Sequence[str]:
    """The lines of a file that are not empty and no comment. Raises GenerateError."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GenerateError(f"--openers: {file} cannot be read ({error}).") from None
    openers = tuple(line.replace("\\n", "\n") for line in lines if line.strip() and not line.startswith("#"))
    if not openers:
        raise GenerateError(f"--openers: {file} has no line: leave the option out to leave the beginnings open.")
    return openers


def _temperatures(text: str) -> tuple[float, ...]:
    return tuple(number()(part) for part in text.split(","))
