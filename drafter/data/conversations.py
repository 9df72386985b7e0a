"""Conversations as JSON lines: messages, and the engine's own token ids where it gave them.

A line is `{"messages": […], "id"?, "input_ids"?, "output_ids"?, "meta"?}`. `meta.past` counts the last output ids that
lie past the answer's end: an engine drafts across that end, so a walk of the answer must know them.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


class ConversationError(ValueError):
    """A conversation file that cannot be used: says the file, the line, and what to do."""


@dataclass(frozen=True)
class Conversation:
    """A prompt and the target's answer.

    input_ids: the prompt as the engine tokenised it, with the template; output_ids: the answer, then `meta["past"]`
    tokens after its end. Both are empty where only text is known. where: the file and line that it was read from.
    """

    id: str
    messages: Sequence[Mapping[str, Any]]
    input_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    where: str = field(default="", compare=False)

    @property
    def past(self) -> int:
        """How many of `output_ids` lie past the answer's end."""
        return int(self.meta.get("past", 0))

    @property
    def answer_ids(self) -> Sequence[int]:
        """The answer alone."""
        return self.output_ids[: len(self.output_ids) - self.past]

    @property
    def ids_sha256(self) -> str:
        """Hash of what an engine would be fed: the ids and where the answer begins and ends."""
        ids = np.array([len(self.input_ids), self.past, *self.input_ids, *self.output_ids], dtype="<i4")
        return hashlib.sha256(ids.tobytes()).hexdigest()

    def to_json(self) -> str:
        """One line, without its newline."""
        row: dict[str, Any] = {"id": self.id, "messages": list(self.messages)}
        if self.output_ids:
            row |= {"input_ids": list(self.input_ids), "output_ids": list(self.output_ids)}
        if self.meta:
            row["meta"] = dict(self.meta)
        return json.dumps(row, ensure_ascii=False, separators=(",", ":"))


def read_conversations(path: Path, size: int | None = None) -> Iterator[Conversation]:
    """Yield the conversations of a file, which may be gzipped; of its first `size` bytes alone where that is given.

    Raises ConversationError at the first bad line.
    """
    read = 0
    for number, line in text_lines(path):
        read += len(line.encode())
        if size is not None and read > size:
            return
        yield parse_line(line, f"{path}:{number}", f"{path.stem}/{number}")


def read_with_ids(path: Path) -> Iterator[Conversation]:
    """The same, where every line must carry the engine's token ids. Raises ConversationError."""
    for conversation in read_conversations(path):
        for key, ids in (("input_ids", conversation.input_ids), ("output_ids", conversation.answer_ids)):
            if not ids:
                raise ConversationError(
                    f"{conversation.where} has no {key}: let an engine write the answers with `python -m drafter "
                    "generate`, which stores the engine's own token ids, so that no template is guessed."
                )
        yield conversation


def parse_line(line: str, where: str, default_id: str) -> Conversation:
    """One line. Raises ConversationError."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConversationError(f"{where} is not JSON ({error.msg}, column {error.colno}).") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise ConversationError(f"{where} is no conversation ({error}): take the line out.") from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(row, dict):
        raise ConversationError(f"{where} is no JSON object: each line is one conversation.")
    if not isinstance(messages, list) or not all(isinstance(entry, dict) and "role" in entry for entry in messages):
        raise ConversationError(f"{where} has no 'messages', expected a list of objects with a 'role'.")
    ids: dict[str, list[int]] = {}
    for key in ("input_ids", "output_ids"):
        found = row.get(key, [])
        if not isinstance(found, list) or not all(type(token) is int and 0 <= token < 2**31 for token in found):
            raise ConversationError(
                f"{where}: {key!r} holds something that is no token id: expected a list of numbers."
            )
        ids[key] = found
    meta = row.get("meta", {})
    past = meta.get("past", 0) if isinstance(meta, dict) else None
    if type(past) is not int or not 0 <= past <= len(ids["output_ids"]):
        raise ConversationError(
            f"{where}: meta.past is {past!r}, expected how many of the {len(ids['output_ids'])} output ids lie past "
            "the answer's end."
        )
    return Conversation(str(row.get("id", default_id)), messages, ids["input_ids"], ids["output_ids"], meta, where)


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of each line that is not blank. Raises ConversationError."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, line
    except FileNotFoundError:
        raise ConversationError(
            f"{path} cannot be read, it does not exist: make it with `python -m drafter generate`."
        ) from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConversationError(f"{path} cannot be read ({error}): it is damaged or not a conversation file.") from None
