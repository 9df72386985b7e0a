"""The verbs about checkpoints and vocabularies: vocab."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from drafter.checkpoint.specials import special_ids, target_vocab_size
from drafter.checkpoint.vocab import DraftVocab, Ids, VocabError
from drafter.data.conversations import Conversation, read_with_ids

VOCAB = """\
example:
  python -m drafter vocab --conversations train.jsonl --target DIR --size 16384 --out vocab.safetensors

Tokens are counted in answers alone, never in prompts, since only answers are drafted. Ties go to the lower id; the
tokenizer's special tokens are always in, and those for thinking, tools and ends. Coverage on --held-out answers is a
hard cap on the first position's acceptance: a token outside the vocabulary can never be proposed.
"""


def add_vocab(commands: Any) -> None:
    """The verb `vocab`."""
    command = commands.add_parser(
        "vocab",
        help="the draft vocabulary, from the answers' token counts",
        description="Choose the tokens that a drafter may propose.",
        epilog=VOCAB,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("--conversations", type=Path, required=True, metavar="FILE", action="append", help="what to count; repeatable")
    add("--target", type=Path, required=True, metavar="DIR", help="the target's folder")
    add("--size", type=int, required=True, metavar="U", help="tokens in the draft vocabulary")
    add("--out", type=Path, required=True, metavar="FILE", help="where d2t and t2d go, as safetensors")
    add("--held-out", type=Path, metavar="FILE", help="answers to report the coverage of, which are not counted")
    add("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    command.set_defaults(run=run_vocab)


def run_vocab(args: argparse.Namespace) -> int:
    """Count, choose, write and report. Raises VocabError or ConversationError."""
    size = target_vocab_size(args.target)
    counts = sum((count_file(file, size) for file in args.conversations), np.zeros(size, np.int64))
    vocab = DraftVocab.from_counts(counts, args.size, special_ids(args.target))
    found: dict[str, Any] = {
        "size": len(vocab),
        "target_vocab_size": size,
        "vocab_hash": vocab.hash,
        "counted_tokens": int(counts.sum()),
        "distinct_tokens": int((counts > 0).sum()),
        "never_seen_rows": int((counts[vocab.target_ids] == 0).sum()),
        "coverage": vocab.coverage(counts),
    }
    if args.held_out:
        found["held_out_coverage"] = vocab.coverage(count_file(args.held_out, size))
    vocab.save(args.out)
    if args.json:
        print(json.dumps(found))
    else:
        held = f", {found['held_out_coverage']:.2%} of those held out" if args.held_out else ""
        print(
            f"{args.out}: {len(vocab):,} of {size:,} tokens cover {found['coverage']:.2%} of {counts.sum():,} answer "
            f"tokens{held}; {found['distinct_tokens']:,} tokens occur, {found['never_seen_rows']:,} rows never do. "
            f"Hash {vocab.hash[:16]}."
        )
    return 0


def count_file(file: Path, vocab_size: int) -> Ids:
    """`count_tokens` of a conversation file. Raises VocabError where it holds none, ConversationError where broken."""
    counts = count_tokens(read_with_ids(file), vocab_size)
    if not counts.any():
        raise VocabError(
            f"{file} holds no conversation, expected answers to count: let an engine write them with `python -m "
            "drafter generate`."
        )
    return counts


def count_tokens(conversations: Iterable[Conversation], vocab_size: int) -> Ids:
    """How often each target token occurs in the answers, int64 [V]. Raises VocabError."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for conversation in conversations:
        ids = np.asarray(conversation.answer_ids, dtype=np.int64)
        if ids.max() >= vocab_size:
            raise VocabError(
                f"conversation {conversation.id} has the token {ids.max()}, but the target has {vocab_size:,}: were "
                "the answers written by another target?"
            )
        np.add.at(counts, ids, 1)
    return counts
