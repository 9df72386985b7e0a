"""`python -m drafter capture`: what a person sees of it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from drafter.arguments import KeyFileError, key_headers, number, whole
from drafter.data.capture import CONCURRENCY, GB, CaptureError, Estimate, capture, read_conversations
from drafter.data.shard_writer import SHARD_BYTES
from drafter.data.shards import ShardError, open_shards
from drafter.data.spool import SpoolError

EPILOG = """example, in two terminals:
  python -m server engine --profile deploy/profiles/cpu-smollm2.toml --capture /tmp/spool
  python -m drafter capture answers.jsonl --url http://127.0.0.1:PORT --key-file FILE --dir /tmp/spool --out shards

The first prints URL and FILE. A line of answers.jsonl holds input_ids and output_ids, as `python -m drafter generate`
writes them; meta.past says how many of the last output ids lie past the answer's end and are not learnt from.
Interrupted (also by kill -9, also of the engine), the same command goes on where it was.

exit codes: 0 all captured, 1 failure, or lines that the engine would not read, 2 usage, 130 interrupted.
"""


def add_capture(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb; its function comes as `run` of the parsed arguments."""
    text = "have an engine read conversations, and keep what a drafter would be fed as shards"
    command = subparsers.add_parser(
        "capture", help=text, description=text, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("conversations", nargs="+", type=Path, metavar="FILE", help="JSON lines with token ids")
    command.add_argument("--url", required=True, help="address of the capturing engine")
    command.add_argument("--dir", required=True, type=Path, help="the folder that the engine was started with")
    command.add_argument("--out", required=True, type=Path, help="the folder of shards, new or to be gone on with")
    command.add_argument("--key-file", type=Path, metavar="FILE", help="the engine's key file, as it printed it")
    command.add_argument(
        "--target", type=Path, metavar="DIR", help="the target's folder (default: as the engine names it)"
    )
    command.add_argument(
        "--concurrency", type=whole(), default=CONCURRENCY, help="requests at once (default: %(default)s)"
    )
    command.add_argument("--max-gb", type=number(above=True), help="stop before --out grows larger (10^9 bytes)")
    command.add_argument(
        "--shard-mb",
        type=number(above=True),
        default=SHARD_BYTES / 2**20,
        help="size of a shard (default: %(default)g)",
    )
    command.add_argument("--json", action="store_true", help="one JSON object on stdout, and nothing else")
    command.set_defaults(run=run_capture)


def run_capture(arguments: argparse.Namespace) -> int:
    """Capture, and say what came of it. Returns the exit code."""
    try:
        with Display() as display:
            result = capture(
                read_conversations(arguments.conversations),
                url=arguments.url,
                engine_dir=arguments.dir,
                out=arguments.out,
                headers=key_headers(arguments.key_file),
                target=arguments.target,
                concurrency=arguments.concurrency,
                max_gb=arguments.max_gb,
                shard_bytes=int(arguments.shard_mb * 2**20),
                on_estimate=display.estimate,
                on_tokens=display.tokens,
            )
    except (CaptureError, KeyFileError, ShardError, SpoolError) as error:
        print(f"eyas: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("eyas: interrupted; the same command goes on from here.", file=sys.stderr)
        return 130
    folder = open_shards(arguments.out)
    if arguments.json:
        print(json.dumps({**asdict(result), "out": str(arguments.out), "data_hash": folder.data_hash}))
    else:
        rate = result.tokens / result.seconds if result.seconds else 0.0
        print(
            f"{arguments.out}: {folder.manifest['documents']:,} documents, {folder.manifest['tokens']:,} tokens, "
            f"{result.bytes / GB:.2f} GB; now {result.documents:,} of them at {rate:,.0f} tokens/s"
        )
    for line in result.refused:
        print(f"eyas: not captured: {line}", file=sys.stderr)
    return 1 if result.refused else 0


class Display:
    """An estimate, then a bar on a terminal, or a line for each tenth where stderr is none."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def estimate(self, estimate: Estimate) -> None:
        print(
            f"eyas: {estimate.documents:,} documents, {estimate.tokens:,} tokens to capture"
            f"{f' ({estimate.skipped:,} are there already)' if estimate.skipped else ''}: about "
            f"{estimate.bytes / GB:.2f} GB, {estimate.free_bytes / GB:.1f} GB are free",
            file=sys.stderr,
        )
        terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=estimate.tokens,
            unit="tok",
            unit_scale=True,
            file=sys.stderr,
            # Without a terminal a line now and then, instead of a bar that is drawn over itself.
            mininterval=0.2 if terminal else 30.0,
            bar_format=None if terminal else "eyas: {n_fmt}/{total_fmt} tokens, {rate_fmt}, {remaining} left\n",
        )

    def tokens(self, count: int) -> None:
        assert self._bar is not None
        self._bar.update(count)
