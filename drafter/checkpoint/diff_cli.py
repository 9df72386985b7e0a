"""The verb `diff`: two draft vocabularies side by side, before a drafter of one meets the map of the other."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from drafter.checkpoint.cli import count_file
from drafter.checkpoint.diff import compare, describe, read_counts
from drafter.checkpoint.maps import FLAG, MAP_FORMATS, agreed_size, read_map
from drafter.checkpoint.specials import known_specials, target_specials, target_vocab_size
from drafter.checkpoint.vocab import Ids, VocabError

DIFF = """\
examples:
  python -m drafter diff drafters/kimi-k2-eagle3 vocab.safetensors --target models/kimi-k2.5
  python -m drafter diff drafters/a drafters/b --counts answers.jsonl --json

A and B are drafter folders, .safetensors files with d2t, or lists of token ids (JSON, or with space between them).
Positions are compared in the files' own order, since that is what the rows of lm_head follow; tokens as sets. A map
may hold offsets (target id = row + d2t[row]) or target ids: t2d, ranges and repeats tell which, or --map-format.
Counts: conversations (.jsonl, whose answers are counted), a JSON list by id, a JSON object, or lines of `id count`.
Two maps that differ are no failure: the exit code is 0.
"""


def add_map_format(command: argparse.ArgumentParser) -> None:
    """The flag that decides where a map can be read in two ways."""
    text = "how to read a d2t without t2d (default: by evidence; refused where both readings fit)"
    command.add_argument(FLAG, choices=MAP_FORMATS, dest="map_format", help=text)


def add_diff(commands: Any) -> None:
    """The verb `diff`."""
    command = commands.add_parser(
        "diff",
        help="two draft vocabularies side by side",
        description="Compare two draft vocabularies: positions, tokens, coverage and special tokens.",
        epilog=DIFF,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("a", type=Path, metavar="A", help="a drafter folder or a map")
    add("b", type=Path, metavar="B", help="the other")
    add("--counts", type=Path, metavar="FILE", help="token counts to report the coverage of")
    add("--target", type=Path, metavar="DIR", help="the target's folder, for its special tokens (Kimi's are known)")
    add_map_format(command)
    add("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    command.set_defaults(run=run_diff)


def run_diff(args: argparse.Namespace) -> int:
    """Compare and print. Raises VocabError or ConversationError."""
    given = target_vocab_size(args.target) if args.target else None
    a, b = (read_map(path, args.map_format, given) for path in (args.a, args.b))
    size = agreed_size(args.a, {str(args.a): a.target_vocab_size, str(args.b): b.target_vocab_size})
    specials = target_specials(args.target, given) if args.target else known_specials(size)
    found = compare(a, b, _counts(args.counts, size), specials)
    print(json.dumps(found.as_json()) if args.json else describe(found))
    return 0


def _counts(file: Path | None, size: int | None) -> Ids | None:
    if file is None:
        return None
    if file.suffix != ".jsonl":
        return read_counts(file, size)
    if size is None:
        raise VocabError(f"{file} cannot be counted without the target vocabulary's size: give --target.")
    return count_file(file, size)
