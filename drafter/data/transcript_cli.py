"""The verb tokenize: a team's own chats as the token ids that the target's engine would see."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from drafter.data.conversations import ConversationError
from drafter.data.transcript import Transcriber, read_chats
from drafter.report import replaced

TEXT = """\
example:
  python -m drafter tokenize chats.jsonl --target models/kimi-k2.5 --out own.jsonl
  python -m drafter capture own.jsonl --url URL --dir SPOOL --out shards

A line of chats.jsonl is {"messages": [{"role": …, "content": …}, …], "tools"?, "id"?}. Each answer becomes a line of
its own, with what came before it as the prompt: input_ids as the engine makes them of a request, output_ids as it would
have written the answer, so that the loss falls on the answer alone. Chats that another model wrote teach what that
model says: where the target can be asked, `generate` its own answers instead.
"""


def add_tokenize(commands: Any) -> None:
    """The verb `tokenize`."""
    verb = commands.add_parser(
        "tokenize",
        help="your own chats as token ids, by the target's own template",
        description="Render chats by the target's template and tokenise them as its engine does.",
        epilog=TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = verb.add_argument
    add("chats", nargs="+", type=Path, metavar="FILE", help="chats as JSON lines, which may be gzipped")
    add("--target", type=Path, required=True, metavar="DIR", help="the target's folder")
    add("--out", type=Path, required=True, metavar="FILE", help="conversations with ids; must not exist")
    add("--last", action="store_true", help="only the last answer of each chat (default: each answer, a line each)")
    add("--thinking", choices=("default", "on", "off"), default="default", help="as the chats were had")
    add("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    verb.set_defaults(run=run_tokenize)


def run_tokenize(args: argparse.Namespace) -> int:
    """Write the conversations, all or none. Raises ConversationError."""
    if args.out.exists():
        raise ConversationError(f"--out: {args.out} exists: name another file.")
    transcriber = Transcriber(args.target, args.thinking)
    chats = tokens = 0
    ways: Counter[str] = Counter()
    seen: dict[str, str] = {}
    with replaced(args.out) as stream:
        for file in args.chats:
            for chat in read_chats(file):
                if chat.id in seen:
                    raise ConversationError(f"{chat.where} has the id {chat.id!r} of {seen[chat.id]}: ids are unique.")
                seen[chat.id] = chat.where
                chats += 1
                for conversation in transcriber.conversations(chat, args.last):
                    ways[conversation.meta["tokens_by"]] += 1
                    tokens += len(conversation.output_ids)
                    stream.write(conversation.to_json() + "\n")
        if not chats:
            raise ConversationError(f"{', '.join(map(str, args.chats))}: no chat, expected one on each line.")
    found = {"chats": chats, "conversations": ways.total(), "answer_tokens": tokens, "by_content": ways["content"]}
    if args.json:
        print(json.dumps(found))
    else:
        note = (
            f"; {ways['content']} of them by their content alone, since the template writes past answers otherwise"
            if ways["content"]
            else ""
        )
        print(f"{args.out}: {ways.total()} answers of {chats} chats, {tokens:,} answer tokens{note}.")
    return 0
