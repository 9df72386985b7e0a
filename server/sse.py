"""An engine's stream on its way to the client: whole frames pass as the bytes they came as.

Only what is no piece of the answer is parsed: the statistics and usage that the gateway asked for and the client did
not are taken out, and errors and the end are noticed. No byte is looked at twice for a frame's end.
"""

from __future__ import annotations

from typing import Any

import orjson

SEPARATOR = b"\n\n"
# Inside a JSON string these quotes would be escaped, so a text that speaks of choices never matches.
PIECE = b'"choices":[{'
LEAK = b"<|tool_call"  # Kimi's own tokens, which a parser of tool calls takes out of the text unless it has failed


class AnswerStream:
    """Feed it the upstream's chunks, send on what it returns.

    usage, details: the engine's usage and speculation statistics, once their frames have passed.
    pieces: how many pieces of the answer have passed. leaked: a tool's tokens stood in one of them as text.
    error: the `error` of an error frame. done: `[DONE]` has passed, and what comes after it is ignored.
    """

    def __init__(self, *, wants_usage: bool, wants_details: bool) -> None:
        self.wants_usage = wants_usage
        self.wants_details = wants_details
        self.usage: dict[str, Any] | None = None
        self.details: Any = None
        self.pieces = 0
        self.leaked = False
        self.error: Any = None
        self.done = False
        self._tail = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """The whole frames that `chunk` completes, less those kept from the client; empty where there are none.

        An unfinished frame waits, so that an error can still be told after an upstream that broke inside one.
        """
        block = chunk if not self._tail and chunk.endswith(SEPARATOR) else self._cut(chunk)
        pieces = block.count(PIECE)
        self.pieces += pieces
        if LEAK in block:
            self.leaked = True
        if pieces == block.count(SEPARATOR):
            return block
        return self._sift(block)

    def _cut(self, chunk: bytes) -> bytes:
        """Everything up to the last frame's end; the rest waits in the tail."""
        seen = len(self._tail)
        self._tail += chunk
        end = self._tail.rfind(SEPARATOR, max(0, seen - 1))
        if end < 0:
            return b""
        end += len(SEPARATOR)
        block = bytes(self._tail[:end])
        del self._tail[:end]
        return block

    def _sift(self, block: bytes) -> bytes:
        *frames, rest = block.split(SEPARATOR)
        kept = []
        for frame in frames:
            passed = frame if PIECE in frame else self._inspect(frame)
            if passed is not None:
                kept.append(passed + SEPARATOR)
            if self.done:
                return b"".join(kept)
        return b"".join(kept) + rest

    def _inspect(self, frame: bytes) -> bytes | None:
        """The frame as the client shall see it, None to keep it back."""
        lines = frame.split(b"\n")
        data = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
        if data == [b"[DONE]"]:
            self.done = True
            return frame
        try:
            message = orjson.loads(b"\n".join(data))
        except orjson.JSONDecodeError:
            return frame
        if not isinstance(message, dict):
            return frame
        if message.get("error") is not None:
            self.error = message["error"]
            return frame
        return frame if self._keep(message) else self._without(message, lines)

    def _keep(self, message: dict[str, Any]) -> bool:
        """Note the statistics; whether the client asked for all that the message carries."""
        details, usage = details_of(message), message.get("usage")
        if details is not None:
            self.details = details
        # With continuous_usage_stats the pieces of the answer carry a usage too: that one is the client's own wish.
        lone_usage = isinstance(usage, dict) and not message.get("choices")
        if lone_usage:
            self.usage = usage
        return (details is None or self.wants_details) and (not lone_usage or self.wants_usage)

    def _without(self, message: dict[str, Any], lines: list[bytes]) -> bytes | None:
        if not self.wants_details:
            drop_details(message)
        if not self.wants_usage and not message.get("choices"):
            message.pop("usage", None)
        if not message.get("choices") and "sglext" not in message and message.get("usage") is None:
            return None
        others = [line for line in lines if not line.startswith(b"data:")]
        return b"\n".join([*others, b"data: " + orjson.dumps(message)])


def details_of(message: dict[str, Any]) -> Any:
    """The speculation statistics of an answer or of a stream's frame, None without."""
    extension = message.get("sglext")
    return extension.get("spec_tokens_details") if isinstance(extension, dict) else None


def drop_details(message: dict[str, Any]) -> None:
    """Take the speculation statistics out of `message`, and `sglext` with them where it held nothing else."""
    extension = message.get("sglext")
    if isinstance(extension, dict) and extension.pop("spec_tokens_details", None) is not None and not extension:
        del message["sglext"]
