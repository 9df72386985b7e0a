"""Which prompts are done, beside a file of conversations: what lets a run that was killed go on without loss or double.

A prompt's answers are appended to the conversations first, in one piece, then a line to the ledger, `OUT.ledger`: the
prompt, how many of its answers were kept, the tokens they cost, and how long the conversations are with them. What a
kill leaves beyond the last line's length belongs to no finished prompt, is cut off and asked again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from io import BufferedWriter
from pathlib import Path
from types import TracebackType

from drafter.data.conversations import Conversation, ConversationError, read_conversations

TAIL = 64  # of conversations past the last entry: more than one prompt's answers were not left by a kill


class Ledger:
    """The conversations file `out` and its ledger, open for writing.

    done: ids of finished prompts; adopted: ids of answers that were there before there was a ledger; kept:
    conversations in `out`; tokens: generated for them, what was left out included; rejected: how many answers or
    prompts were left out, by reason.
    """

    def __init__(self, out: Path) -> None:
        """Opens both, and cuts off what a kill has left. Raises ConversationError where they do not belong together."""
        self.out, self.path = out, out.with_name(out.name + ".ledger")
        self.done: set[str] = set()
        self.adopted: set[str] = set()
        self.kept = self.tokens = self.bytes = 0
        self.rejected: Counter[str] = Counter()
        if not out.exists():
            self.path.unlink(missing_ok=True)  # the ledger of a file that is no more
        if self.path.exists():
            self._read()
        elif out.exists():
            self._adopt()
        self._conversations: BufferedWriter = out.open("ab")
        self._entries: BufferedWriter = self.path.open("ab")

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._conversations.close()
        self._entries.close()

    def write(self, prompt: str, kept: Sequence[Conversation], tokens: int, rejected: Counter[str]) -> None:
        """A prompt is done: its answers, then its entry, each in the file before this returns."""
        data = "".join(conversation.to_json() + "\n" for conversation in kept).encode()
        self._conversations.write(data)
        self._conversations.flush()
        self._count(prompt, len(kept), tokens, rejected, self.bytes + len(data))
        entry = {"prompt": prompt, "kept": len(kept), "tokens": tokens, "bytes": self.bytes}
        self._entries.write((json.dumps(entry | ({"rejected": rejected} if rejected else {})) + "\n").encode())
        self._entries.flush()

    def is_done(self, prompt: str, answers: int) -> bool:
        """Whether a prompt that is answered so many times needs nothing more."""
        return prompt in self.done or any(answer_id(prompt, at) in self.adopted for at in range(answers))

    def size_with(self, kept: Sequence[Conversation]) -> int:
        """Bytes of the conversations with these."""
        return self.bytes + sum(len(conversation.to_json().encode()) + 1 for conversation in kept)

    def _count(self, prompt: str, kept: int, tokens: int, rejected: Counter[str], size: int) -> None:
        self.done.add(prompt)
        self.kept += kept
        self.tokens += tokens
        self.rejected.update(rejected)
        self.bytes = size

    def _read(self) -> None:
        _cut(self.path)
        with self.path.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    found = json.loads(line)
                    if "adopted" in found:
                        self._take(found["bytes"])
                        continue
                    rejected = Counter({str(why): int(count) for why, count in found.get("rejected", {}).items()})
                    self._count(
                        str(found["prompt"]), int(found["kept"]), int(found["tokens"]), rejected, found["bytes"]
                    )
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise ConversationError(
                        f"{self.path}:{number} is no entry of a ledger: remove the file to go on by what {self.out} "
                        "holds."
                    ) from None
        size = self.out.stat().st_size
        if size < self.bytes:
            raise ConversationError(
                f"{self.out} has {size:,} bytes, its ledger {self.path} knows of {self.bytes:,}: it was changed by "
                "hand; remove the ledger to go on by what it holds."
            )
        if size > self.bytes:
            with self.out.open("r+b") as stream:
                stream.seek(self.bytes)
                if sum(1 for _ in stream) > TAIL:
                    raise ConversationError(
                        f"{self.out} holds {size - self.bytes:,} bytes more than its ledger {self.path} knows of: "
                        "something else was appended; remove the ledger to go on by what it holds."
                    )
                stream.truncate(self.bytes)

    def _adopt(self) -> None:
        """A file without a ledger: a prompt with one answer in it is done."""
        size = _cut(self.out)
        self._take(size)
        entry = {"adopted": self.kept, "bytes": size}
        self.path.write_text(json.dumps(entry) + "\n", "utf-8")

    def _take(self, size: int) -> None:
        if size:
            for conversation in read_conversations(self.out, size):
                self.adopted.add(conversation.id)
                self.kept += 1
                self.tokens += len(conversation.output_ids)
        self.bytes = size


def answer_id(name: str, at: int) -> str:
    """The id of a prompt's answer number `at`."""
    return f"{name}/{at}" if at else name


def _cut(file: Path) -> int:
    """Take a line without an end off a file; returns how many bytes stay."""
    with file.open("r+b") as stream:
        size = stream.seek(0, 2)
        at = size
        while at > 0:  # back, a piece at a time, to the last line's end
            start = max(0, at - 65536)
            stream.seek(start)
            found = stream.read(at - start).rfind(b"\n")
            if found >= 0:
                at = start + found + 1
                break
            at = start
        if at < size:
            stream.truncate(at)
        return at
