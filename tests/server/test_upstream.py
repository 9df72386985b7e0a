"""The client of the engines against servers that are nothing but sockets: every split, every early end, every reuse."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from server import upstream as module
from server.upstream import Broken, Unreachable, Upstream, origin_of
from tests.server.test_lifecycle import CERTIFICATE, CERTIFICATES_KEY

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
Behave = Callable[[Reader, Writer], Awaitable[None]]

BODY = b'{"a": "Za\xc5\xbc"}\r\n\r\ndata: [DONE]\n\n'
SIZED = b"HTTP/1.1 200 OK\r\ncontent-type: text/x\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\n%b\r\n%x;note=1\r\n%b\r\n0\r\nx-trailer: 1\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])
)
TO_THE_END = b"HTTP/1.0 200 OK\r\ncontent-type: text/x\r\n\r\n" + BODY
INFORMED = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\ncontent-type: no/such\r\n\r\n"
FORMS = {"sized": SIZED, "chunked": CHUNKED, "to_the_end": TO_THE_END, "informed": INFORMED + CHUNKED}


class Server:
    """Counts its connections and requests; `behave` does the rest."""

    def __init__(self, behave: Behave) -> None:
        self.behave = behave
        self.requests: list[bytes] = []
        self.connections = 0
        self.open = 0

    async def serve(self, reader: Reader, writer: Writer) -> None:
        self.connections += 1
        self.open += 1
        try:
            await self.behave(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()

    async def request(self, reader: Reader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        raw = head + (await reader.readexactly(int(length[0].split(b":")[1])) if length else b"")
        self.requests.append(raw)
        return raw


@asynccontextmanager
async def serving(behave: Callable[..., Awaitable[None]], **how: Any) -> Any:
    """(server, its URL, a client of it)"""

    async def behaving(reader: Reader, writer: Writer) -> None:
        await behave(server, reader, writer)

    server = Server(behaving)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, **how)
    upstream = Upstream(connect_timeout_s=2.0)
    scheme = "https" if how else "http"
    try:
        yield server, f"{scheme}://127.0.0.1:{listening.sockets[0].getsockname()[1]}", upstream
    finally:
        upstream.close()
        listening.close()
        await asyncio.sleep(0)


def answering(*pieces: bytes, close: bool = False) -> Callable[..., Awaitable[None]]:
    """Answers each request with these pieces, one by one."""

    async def behave(server: Server, reader: Reader, writer: Writer) -> None:
        while True:
            await server.request(reader)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                if len(pieces) > 1:
                    await asyncio.sleep(0.001)
            if close:
                return

    return behave


async def ask(upstream: Upstream, url: str, body: bytes = b"{}") -> tuple[int, bytes | None, bytes]:
    async with asyncio.timeout(5):
        with await upstream.post(url, "/v1/x", {"authorization": "Bearer k"}, [body]) as answer:
            await answer.head()
            return answer.status, answer.content_type, await answer.read()


def run(test: Callable[[], Awaitable[None]]) -> None:
    """On the loop that the gateway runs on."""
    uvloop.run(test())  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
def test_every_split_of_an_answer(form: str) -> None:
    raw = FORMS[form]

    async def test() -> None:
        async def behave(server: Server, reader: Reader, writer: Writer) -> None:
            while True:
                at = int((await server.request(reader)).rpartition(b"\r\n\r\n")[2])
                writer.write(raw[:at])
                await asyncio.sleep(0.001)
                writer.write(raw[at:])
                if form == "to_the_end":
                    return

        async with serving(behave) as (server, url, upstream):
            for at in range(1, len(raw)):
                assert await ask(upstream, url, b"%d" % at) == (200, b"text/x", BODY), at
            assert server.connections == (len(raw) - 1 if form == "to_the_end" else 1)

    run(test)


@pytest.mark.parametrize("form", FORMS)
def test_an_end_after_every_byte_is_an_error_at_once(form: str) -> None:
    raw = FORMS[form]

    async def test() -> None:
        async def behave(server: Server, reader: Reader, writer: Writer) -> None:
            writer.write(raw[: int((await server.request(reader)).rpartition(b"\r\n\r\n")[2])])

        async with serving(behave) as (server, url, upstream):
            whole = raw.index(BODY) if form == "to_the_end" else len(raw)
            for at in range(len(raw)):
                if at < whole:
                    with pytest.raises(Broken):
                        await ask(upstream, url, b"%d" % at)
                else:
                    assert await ask(upstream, url, b"%d" % at) == (200, b"text/x", BODY[: at - whole])
            assert len(server.requests) == server.connections == len(raw)

    run(test)


@pytest.mark.parametrize(
    "raw",
    [
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{} ",
        b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999999\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-type: a\x00b\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-type: a\x01b\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-type: a\r\n b\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 1_000_000,
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 50_000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;" + b"a" * 1_000_000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n" + b"x: y\r\n" * 200_000,
    ],
)
def test_what_is_not_http_is_an_error_at_once(raw: bytes) -> None:
    async def test() -> None:
        async def behave(server: Server, reader: Reader, writer: Writer) -> None:
            await server.request(reader)
            writer.write(raw)
            await reader.read()  # holds the connection open until the other side has had enough

        async with serving(behave) as (server, url, upstream):
            with pytest.raises(Broken):
                await ask(upstream, url)
            await until(lambda: server.open == 0)

    run(test)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.005)


def test_what_is_sent() -> None:
    async def test() -> None:
        async with serving(answering(SIZED)) as (server, url, upstream):
            parts = [memoryview(b'{"x":1}')[:-1], b',"rid":"r"}']
            with await upstream.post(
                url, "/v1/chat/completions", {"authorization": "Bearer schlüssel"}, parts
            ) as answer:
                assert await answer.read() == BODY
            with await upstream.ask("GET", url, "/ready", {}) as answer:
                assert await answer.read() == BODY
        post, get = server.requests
        always = f"host: {url[7:]}\r\nuser-agent: eyas\r\naccept-encoding: identity\r\n"
        json = "content-type: application/json\r\ncontent-length: 17\r\n"
        head = f"POST /v1/chat/completions HTTP/1.1\r\n{always}authorization: Bearer schlüssel\r\n{json}\r\n"
        assert post == head.encode() + b'{"x":1,"rid":"r"}'
        assert get == f"GET /ready HTTP/1.1\r\n{always}\r\n".encode()

    run(test)


@pytest.mark.parametrize("key", ["a\r\nx: y", "a\nb", "a\rb"])
def test_a_header_cannot_be_smuggled_in(key: str) -> None:
    async def test() -> None:
        async with serving(answering(SIZED)) as (server, url, upstream):
            with pytest.raises(ValueError, match="authorization"):
                await upstream.post(url, "/x", {"authorization": key}, [b"{}"])
            assert server.connections == 0

    run(test)


def test_a_body_of_many_megabytes_goes_out_whole() -> None:
    body = bytes(range(256)) * (1 << 16)

    async def test() -> None:
        async with serving(answering(SIZED)) as (server, url, upstream):
            with await upstream.post(url, "/x", {}, [memoryview(body), b"tail"]) as answer:
                assert await answer.read() == BODY
            assert server.requests[0].endswith(body + b"tail")
            assert await ask(upstream, url) == (200, b"text/x", BODY)
            assert server.connections == 1

    run(test)


def test_an_answer_before_the_body_was_read_does_not_keep_the_connection() -> None:
    async def test() -> None:
        async def behave(server: Server, reader: Reader, writer: Writer) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(SIZED)
            await writer.drain()
            await asyncio.sleep(0.2)

        async with serving(behave) as (server, url, upstream):
            for _ in range(2):
                assert await ask(upstream, url, b"x" * (1 << 24)) == (200, b"text/x", BODY)
            assert server.connections == 2

    run(test)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 7\r\n\r\n", 304),
        (b"HTTP/1.1 503 X\r\ncontent-length: 0\r\n\r\n", 503),
        (b"HTTP/1.1 429 X\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 429),
    ],
)
def test_an_answer_without_a_body_keeps_the_connection(raw: bytes, status: int) -> None:
    async def test() -> None:
        async with serving(answering(raw)) as (server, url, upstream):
            for _ in range(2):
                assert await ask(upstream, url) == (status, None, b"")
            assert server.connections == 1

    run(test)


# --- which connections are used again


@pytest.mark.parametrize(
    "raw",
    [
        SIZED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1),
        SIZED.replace(b"1.1", b"1.0", 1),
        SIZED + b"HTTP/1.1 200",
        SIZED + SIZED,
        SIZED + b"garbage",
        CHUNKED + CHUNKED,
    ],
)
def test_a_connection_that_is_done_or_says_more_than_asked_is_not_used_again(raw: bytes) -> None:
    async def test() -> None:
        async with serving(answering(raw)) as (server, url, upstream):
            for _ in range(3):
                assert await ask(upstream, url) == (200, b"text/x", BODY)
            assert server.connections == 3
            await until(lambda: server.open == 0)

    run(test)


def test_words_without_a_question_close_the_connection() -> None:
    async def test() -> None:
        async def behave(server: Server, reader: Reader, writer: Writer) -> None:
            await server.request(reader)
            writer.write(SIZED)
            await asyncio.sleep(0.05)
            writer.write(SIZED)
            await reader.read()

        async with serving(behave) as (server, url, upstream):
            await ask(upstream, url)
            await until(lambda: server.open == 0)
            assert await ask(upstream, url) == (200, b"text/x", BODY)
            assert server.connections == 2

    run(test)


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_closed_meanwhile_is_not_used(reset: bool) -> None:
    """Also where the loop had no turn yet in which to hear of it."""

    async def test() -> None:
        async def behave(server: Server, reader: Reader, writer: Writer) -> None:
            await server.request(reader)
            writer.write(SIZED)
            await writer.drain()
            if reset:
                writer.transport.abort()

        async with serving(behave) as (server, url, upstream):
            for _ in range(20):
                assert await ask(upstream, url) == (200, b"text/x", BODY)
            assert len(server.requests) == 20

    run(test)


def test_a_request_is_never_written_twice() -> None:
    """The engine may have begun on it: what closes after it was written is an error."""

    async def test() -> None:
        async def behave(server: Server, reader: Reader, writer: Writer) -> None:
            await server.request(reader)
            writer.write(SIZED)
            await server.request(reader)

        async with serving(behave) as (server, url, upstream):
            await ask(upstream, url)
            with pytest.raises(Broken):
                await ask(upstream, url)
            assert (len(server.requests), server.connections) == (2, 1)

    run(test)


def test_connections_idle_too_long_are_closed_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEPALIVE_S", 0.1)

    async def test() -> None:
        async with serving(answering(SIZED)) as (server, url, upstream):
            await asyncio.gather(*(ask(upstream, url) for _ in range(5)))
            assert server.connections == server.open == 5
            await ask(upstream, url)
            assert server.connections == 5
            await until(lambda: server.open == 0)
            await ask(upstream, url)
            assert server.connections == 6

    run(test)


def test_any_number_at_once_and_the_pool_serves_them_again() -> None:
    async def test() -> None:
        async with serving(answering(CHUNKED)) as (server, url, upstream):
            for _ in range(2):
                answers = await asyncio.gather(*(ask(upstream, url) for _ in range(200)))
                assert answers == [(200, b"text/x", BODY)] * 200
            assert server.connections == 200

    run(test)


# --- leaving, waiting, pressure


@pytest.mark.parametrize("sent", [b"", SIZED[:10], SIZED[:-1], CHUNKED[:-1]])
def test_leaving_closes_the_connection(sent: bytes) -> None:
    async def test() -> None:
        async def behave(server: Server, reader: Reader, writer: Writer) -> None:
            await server.request(reader)
            writer.write(sent)
            await reader.read()

        async with serving(behave) as (server, url, upstream):
            asking = asyncio.create_task(ask(upstream, url))
            await until(lambda: len(server.requests) == 1)
            await asyncio.sleep(0.02)
            asking.cancel()
            await until(lambda: server.open == 0)
            assert asking.cancelled()

    run(test)


def test_leaving_while_a_large_body_goes_out_closes_the_connection() -> None:
    async def test() -> None:
        async def behave(server: Server, reader: Reader, writer: Writer) -> None:
            await reader.readexactly(1000)
            await asyncio.sleep(0.1)
            while await reader.read(1 << 20):
                pass

        async with serving(behave) as (server, url, upstream):
            asking = asyncio.create_task(ask(upstream, url, b"x" * (1 << 26)))
            await until(lambda: server.open == 1)
            asking.cancel()
            await until(lambda: server.open == 0)

    run(test)


@pytest.mark.parametrize("ends", [True, False])
def test_a_rest_that_is_worth_nothing_is_awaited_for_a_moment(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRAIN_TIMEOUT_S", 0.2)

    async def test() -> None:
        async def behave(server: Server, reader: Reader, writer: Writer) -> None:
            while True:
                await server.request(reader)
                writer.write(CHUNKED[:-10])
                await (asyncio.sleep(0.05) if ends else reader.read())
                writer.write(CHUNKED[-10:])

        async with serving(behave) as (server, url, upstream):
            for _ in range(2):
                with await upstream.post(url, "/x", {}, [b"{}"]) as answer:
                    assert await answer.chunk() == BODY
                    answer.drain()
                await asyncio.sleep(0.1)
            assert server.connections == (1 if ends else 2)
            if not ends:
                await until(lambda: server.open == 0)

    run(test)


def test_a_slow_reader_makes_the_engine_wait() -> None:
    async def test() -> None:
        sent = 0

        async def behave(server: Server, reader: Reader, writer: Writer) -> None:
            nonlocal sent
            await server.request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (1 << 25))
            for _ in range(1 << 9):
                writer.write(b"x" * (1 << 16))
                await writer.drain()
                sent += 1 << 16
            await reader.read()

        async with serving(behave) as (_, url, upstream):
            with await upstream.post(url, "/x", {}, [b"{}"]) as answer:
                await answer.head()
                before = -1
                while before != sent:
                    before = sent
                    await asyncio.sleep(0.15)
                assert sent < 1 << 24
                assert len(await answer.read()) == 1 << 25

    run(test)


def test_a_connection_whose_answer_nobody_read_is_read_again_when_used_again() -> None:
    """It waited for its reader when the answer's last bytes came."""
    large = b"x" * (module.READ_AHEAD + 100)

    async def test() -> None:
        raw = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(large), large)
        async with serving(answering(raw[:-200], raw[-200:])) as (server, url, upstream):
            for _ in range(3):
                with await upstream.post(url, "/x", {}, [b"{}"]) as answer:
                    await until(lambda: answer.ended)
            with await upstream.post(url, "/x", {}, [b"{}"]) as answer:
                assert await answer.read() == large
            assert server.connections == 1

    run(test)


def test_a_head_that_comes_byte_by_byte() -> None:
    async def test() -> None:
        async with serving(answering(*(bytes([byte]) for byte in CHUNKED))) as (_, url, upstream):
            assert await ask(upstream, url) == (200, b"text/x", BODY)

    run(test)


def test_closing_breaks_off_what_runs() -> None:
    async def test() -> None:
        async def behave(server: Server, reader: Reader, writer: Writer) -> None:
            await server.request(reader)
            await reader.read()

        async with serving(behave) as (server, url, upstream):
            asking = asyncio.create_task(ask(upstream, url))
            await until(lambda: len(server.requests) == 1)
            upstream.close()
            with pytest.raises(Broken):
                await asking
            await until(lambda: server.open == 0)

    run(test)


# --- connecting


def test_nobody_there() -> None:
    async def test() -> None:
        upstream = Upstream(connect_timeout_s=2.0)
        for url in ("http://127.0.0.1:1", "http://no-such-host.invalid:80", f"http://{'a' * 70}.invalid:80"):
            with pytest.raises(Unreachable):
                await ask(upstream, url)

    run(test)


def test_a_connection_that_takes_too_long() -> None:
    async def test() -> None:
        async def silent(server: Server, reader: Reader, writer: Writer) -> None:
            await reader.read()

        async with serving(silent) as (server, url, _):
            upstream = Upstream(connect_timeout_s=0.1)
            with pytest.raises(Unreachable):  # TLS is begun, and nobody answers
                await ask(upstream, url.replace("http", "https"))
            await until(lambda: server.open == 0)

    run(test)


@pytest.fixture
def tls(tmp_path: Path) -> ssl.SSLContext:
    """A server's side of TLS, by a certificate for localhost that nobody has signed."""
    (tmp_path / "cert.pem").write_text(CERTIFICATE)
    (tmp_path / "key.pem").write_text(CERTIFICATES_KEY)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    return context


@pytest.mark.parametrize("form", FORMS)
def test_tls(form: str, tls: ssl.SSLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))

    async def test() -> None:
        behave = answering(FORMS[form][:50], FORMS[form][50:], close=form == "to_the_end")
        async with serving(behave, ssl=tls) as (server, url, upstream):
            for _ in range(3):
                assert await ask(upstream, url) == (200, b"text/x", BODY)
            assert await ask(upstream, url, b"x" * (1 << 20)) == (200, b"text/x", BODY)
            assert server.connections == (4 if form == "to_the_end" else 1)

    run(test)


def test_tls_of_somebody_else_is_refused_and_told_nothing(tls: ssl.SSLContext) -> None:
    async def test() -> None:
        async with serving(answering(SIZED), ssl=tls) as (server, url, upstream):
            with pytest.raises(Unreachable, match="certificate"):
                await ask(upstream, url)
            assert server.requests == []

    run(test)


@pytest.mark.parametrize("url", ["127.0.0.1:1", "ftp://x", "http://", "unix:///x"])
def test_no_engines_url(url: str) -> None:
    with pytest.raises(ValueError, match="expected http"):
        origin_of(url)


def test_where_urls_lead() -> None:
    assert origin_of("http://[::1]:30000") == module.Origin("::1", 30000, False, "[::1]:30000")
    assert origin_of("https://engine.example") == module.Origin("engine.example", 443, True, "engine.example")
    assert origin_of("http://żubr:1").authority == "xn--ubr-22a:1"
