"""HTTP/1.1 to the engines, and no more of it than that needs: kept connections, whole answers or streams of them.

A general client costs a gateway more than all else that it does for a request. Here the request is one write, llhttp
reads the answer, and the only timer is that of connecting: an exchange has its own clock, and cancels.
"""

from __future__ import annotations

import asyncio
import select
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import monotonic
from types import TracebackType
from typing import Self, cast
from urllib.parse import urlsplit

import httptools

KEEPALIVE_S = 3.0  # SGLang closes an idle connection after 5 s: never use one that it may be closing
DRAIN_TIMEOUT_S = 1.0
BARREN_LIMIT = 64 * 1024  # bytes in a row that are head, trailer or framing
READ_AHEAD = 256 * 1024  # bytes of a stream that wait for a slow client before the engine waits too
WITHOUT_BODY = frozenset((204, 304))
JOINED_BYTES = 64 * 1024  # a request of fewer goes out in one piece; of a larger one no copy is made

Part = bytes | memoryview


class UpstreamError(Exception):
    """A request that got no whole answer."""


class Unreachable(UpstreamError):
    """No connection: nothing was sent."""


class Broken(UpstreamError):
    """The connection closed before the answer's end, or what came is not HTTP."""


@dataclass(frozen=True)
class Origin:
    """Where a URL leads. `authority` is what the host header says."""

    host: str
    port: int
    secure: bool
    authority: str


@lru_cache(maxsize=1024)
def origin_of(url: str) -> Origin:
    """The origin of `http(s)://host[:port]`. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no engine's URL, expected http://HOST:PORT or https://HOST:PORT.")
    secure = parts.scheme == "https"
    host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode()
    authority = (f"[{host}]" if ":" in host else host) + (f":{parts.port}" if parts.port else "")
    return Origin(host, parts.port or (443 if secure else 80), secure, authority)


class Upstream:
    """The connections to all engines. Any number at once: how many requests there are is for admission to say.

    connect_timeout_s: for the name, the connection and TLS together.
    """

    def __init__(self, connect_timeout_s: float) -> None:
        self.connect_timeout_s = connect_timeout_s
        self._idle: dict[Origin, dict[Connection, None]] = {}  # the one used last is last
        self._all: set[Connection] = set()
        self._reaper: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None

    async def ask(
        self, method: str, url: str, path: str, headers: Mapping[str, str], body: Sequence[Part] = ()
    ) -> Answer:
        """Send a request, its body in parts; who enters the answer gets it as it comes, and closes it by leaving.

        Raises Unreachable; ValueError for a header that is none. What has been written once is never written again:
        whether the engine has begun on it cannot be known.
        """
        origin = origin_of(url)
        parts = [_head(method, path, origin, headers, sum(map(len, body))), *body]
        connection = self._take(origin) or await self._connect(origin)
        return connection.ask(parts)

    async def post(self, url: str, path: str, headers: Mapping[str, str], body: Sequence[Part]) -> Answer:
        """`ask`, of the one method that engines answer with a model."""
        return await self.ask("POST", url, path, headers, body)

    def close(self) -> None:
        """Close every connection; answers that still come break off."""
        for connection in list(self._all):
            connection.transport.abort()
        if self._reaper is not None:
            self._reaper.cancel()

    def keep(self, connection: Connection) -> None:
        """Take a connection back whose answer has ended."""
        connection.idle_since = monotonic()
        self._idle.setdefault(connection.origin, {})[connection] = None
        if self._reaper is None:
            self._reaper = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._reap)

    def opened(self, connection: Connection) -> None:
        """A connection was made."""
        self._all.add(connection)

    def lost(self, connection: Connection) -> None:
        """A connection has closed."""
        self._all.discard(connection)
        idle = self._idle.get(connection.origin, {})
        idle.pop(connection, None)
        if not idle:
            self._idle.pop(connection.origin, None)

    def _take(self, origin: Origin) -> Connection | None:
        """The connection that was used last, unless it has been idle too long, or something has happened to it."""
        idle = self._idle.get(origin)
        while idle:
            connection, _ = idle.popitem()
            if monotonic() - connection.idle_since < KEEPALIVE_S and not connection.stale():
                return connection
            connection.transport.abort()
        return None

    async def _connect(self, origin: Origin) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self, origin), origin.host, origin.port, ssl=self._context(origin)
                )
        except (OSError, UnicodeError) as error:  # TimeoutError and the faults of TLS are OSErrors
            raise Unreachable(f"{origin.authority} cannot be reached: {error!r}") from None
        if connection.transport.is_closing():
            raise Unreachable(f"{origin.authority} closed the connection at once")
        return connection

    def _context(self, origin: Origin) -> ssl.SSLContext | None:
        if not origin.secure:
            return None
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls

    def _reap(self) -> None:
        """Close what has been idle too long, and look again when the next will have been."""
        now = monotonic()
        oldest = now
        for idle in self._idle.values():
            for connection in idle:
                if now - connection.idle_since < KEEPALIVE_S:
                    oldest = min(oldest, connection.idle_since)
                    break  # those after it were used later
                connection.transport.abort()
        wait = KEEPALIVE_S - (now - oldest)
        self._reaper = asyncio.get_running_loop().call_later(wait, self._reap) if self._idle else None


class Answer:
    """One answer as it comes, used in a `with`: who leaves before its end closes the connection, and stops the engine.

    status: 0 until `head` has been awaited. content_type: None without one. ended: its last byte has come.
    """

    __slots__ = ("_broken", "_connection", "_parts", "_paused", "_size", "_waiter", "content_type", "ended", "status")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parts: list[bytes] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._broken: str | None = None
        self._paused = False
        self.status = 0
        self.content_type: bytes | None = None
        self.ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.leave(self)

    async def head(self) -> None:
        """Wait until its status and headers are known. Raises Broken."""
        while not self.status:
            await self._more()

    async def chunk(self) -> bytes:
        """All of its body that has come since, as soon as there is some; empty at its end. Raises Broken."""
        while not self._parts:
            if self.ended:
                return b""
            await self._more()
        parts = self._parts
        found = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts = []
        self._size = 0
        self.resume()
        return found

    async def read(self) -> bytes:
        """The rest of its body, whole. Raises Broken."""
        parts = []
        while part := await self.chunk():
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def drain(self) -> None:
        """The rest is worth nothing, but its connection is: when the `with` is left, it has a moment to come."""
        self._connection.drain(self)

    def add(self, part: bytes) -> None:
        """The connection has read a part of the body."""
        self._parts.append(part)
        self._size += len(part)
        if self._size > READ_AHEAD and not self._paused:
            self._paused = True
            self._connection.transport.pause_reading()

    def resume(self) -> None:
        """Let the engine go on, where it had to wait."""
        if self._paused:
            self._paused = False
            self._connection.transport.resume_reading()

    def wake(self) -> None:
        """The connection has something new for who waits."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def fail(self, why: str) -> None:
        """No more of it will come."""
        self._broken = why
        self.wake()

    async def _more(self) -> None:
        if self._broken is not None:
            raise Broken(self._broken)
        self._waiter = self._connection.loop.create_future()
        await self._waiter


class Connection(asyncio.Protocol):
    """One connection, for one answer after another; httptools calls its on_ methods."""

    def __init__(self, upstream: Upstream, origin: Origin) -> None:
        self.upstream = upstream
        self.origin = origin
        self.loop = asyncio.get_running_loop()
        self.idle_since = 0.0
        self.answer: Answer | None = None
        self.draining: asyncio.TimerHandle | None = None  # nobody wants the rest of the answer
        self.barren = 0  # bytes since the head or the last ones of a body
        self.content_type: bytes | None = None
        self.until_eof = True  # the answer's end is the connection's
        self.parser = httptools.HttpResponseParser(self)
        self.poll = select.poll()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        self.upstream.opened(self)

    def stale(self) -> bool:
        """Whether something came while nobody used it: its end, most likely, of which the loop may not know yet."""
        return self.transport.is_closing() or bool(self.poll.poll(0))

    def ask(self, parts: Sequence[Part]) -> Answer:
        """Send a request."""
        self.answer = answer = Answer(self)
        self.barren = 0
        self._expect_head()
        if sum(map(len, parts)) < JOINED_BYTES:
            self.transport.write(b"".join(parts))
        else:
            self.transport.writelines(parts)
        return answer

    def leave(self, answer: Answer) -> None:
        """Nobody waits for `answer` any more."""
        if self.answer is answer and self.draining is None:
            self.transport.abort()

    def drain(self, answer: Answer) -> None:
        """Read the rest of `answer` and throw it away, for a moment."""
        if self.answer is answer:
            answer.resume()
            self.draining = self.loop.call_later(DRAIN_TIMEOUT_S, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        if self.answer is None:
            self.transport.abort()  # nobody has asked for anything
            return
        self.barren += len(data)
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(f"the answer is not HTTP: {error}")
            return
        if self.barren > BARREN_LIMIT:
            self._break(f"more than {BARREN_LIMIT} bytes of headers or framing")

    def eof_received(self) -> None:
        answer = self.answer
        if answer is not None and answer.status and self.until_eof:
            self._end(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self.upstream.lost(self)
        self._break(f"the connection was lost ({error})" if error else "the connection was closed")

    def on_message_begin(self) -> None:
        if self.answer is None:
            self.transport.abort()  # a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self.content_type = value
        elif name == b"content-length":
            self.until_eof = False
        elif name == b"transfer-encoding":
            self.until_eof = value.rpartition(b",")[2].strip().lower() != b"chunked"

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        answer = self.answer
        if answer is None or status < 200:  # 100 and its like: the answer comes after it
            return
        self.barren = 0
        self.until_eof = self.until_eof and status not in WITHOUT_BODY
        answer.content_type = self.content_type
        answer.status = status
        answer.wake()

    def on_body(self, part: bytes) -> None:
        self.barren = 0
        if self.answer is not None and self.draining is None:
            self.answer.add(part)
            self.answer.wake()

    def on_message_complete(self) -> None:
        answer = self.answer
        if answer is None:
            return
        if not answer.status:  # a 100, or its like
            self._expect_head()
            return
        sound = self.parser.should_keep_alive() and not self.transport.get_write_buffer_size()
        self._end(answer)
        if sound:
            self.upstream.keep(self)
        else:
            self.transport.abort()

    def _expect_head(self) -> None:
        self.content_type = None
        self.until_eof = True

    def _end(self, answer: Answer) -> None:
        self.answer = None
        answer.resume()
        if self.draining is not None:
            self.draining.cancel()
            self.draining = None
        answer.ended = True
        answer.wake()

    def _break(self, why: str) -> None:
        if self.draining is not None:
            self.draining.cancel()
            self.draining = None
        if self.answer is not None:
            self.answer.fail(why)
            self.answer = None
        self.transport.abort()


def _head(method: str, path: str, origin: Origin, headers: Mapping[str, str], size: int) -> bytes:
    """A request's head; `size`: its body's bytes, which are JSON."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if not lines.count("\r") == lines.count("\n") == len(headers):
        raise ValueError(f"a header's value holds an end of line: correct the one of {', '.join(headers)} that does.")
    if size:
        lines += f"content-type: application/json\r\ncontent-length: {size}\r\n"
    return (
        f"{method} {path} HTTP/1.1\r\nhost: {origin.authority}\r\nuser-agent: eyas\r\naccept-encoding: identity\r\n"
        f"{lines}\r\n"
    ).encode()
