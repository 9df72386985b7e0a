"""A client that costs next to nothing: bytes written, and the moments noted at which an answer begins and ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import perf_counter
from typing import cast

import httptools

DONE = b"data: [DONE]"


class AnswerError(RuntimeError):
    """An answer that is none: another status, or an end before its end."""


@dataclass
class Timed:
    """One answer. ttft_s: to the first event of a stream, or to a plain answer's first byte. All in seconds."""

    ttft_s: float
    total_s: float
    body: bytes


@dataclass
class Connection(asyncio.Protocol):
    """A kept-alive connection for one request after another."""

    host: str
    parts: list[bytes] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    async def ask(self, body: bytes, key: str) -> Timed:
        """POST a chat request. Raises AnswerError."""
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.parser = httptools.HttpResponseParser(self)
        self.parts.clear()
        self.moments.clear()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self.host}\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        begun = perf_counter()
        self.transport.write(head.encode() + body)
        await self.answer
        ended = perf_counter()
        whole = b"".join(self.parts)
        if self.parser.get_status_code() != 200:
            raise AnswerError(f"{self.host} answered with status {self.parser.get_status_code()}: {whole[:300]!r}")
        return Timed(self.moments[0] - begun, ended - begun, whole)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if not self.moments and not body.startswith(b":"):  # a comment is no event
            self.moments.append(perf_counter())
        self.parts.append(body)

    def on_message_complete(self) -> None:
        if not self.answer.done():
            self.answer.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if hasattr(self, "answer") and not self.answer.done():
            self.answer.set_exception(AnswerError(f"{self.host} closed the connection within an answer"))


async def connect(host: str, port: int) -> Connection:
    """A new connection."""
    _, connection = await asyncio.get_running_loop().create_connection(lambda: Connection(f"{host}:{port}"), host, port)
    return connection
