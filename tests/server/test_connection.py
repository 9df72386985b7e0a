"""Connections from outside, over raw sockets: heads without an end, requests on top of each other, trailers."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from server import connection
from tests.server.conftest import Gateway
from tests.server.fake_engine import MODEL, FakeEngine, wait_until
from tests.server.test_fuzz import head, status


def request(user: str = "", *headers: str, stream: bool = False) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": "hi", "user": user, "stream": stream}).encode()
    return head("POST", "/v1/completions", *headers, f"content-length: {len(body)}") + body


def chunked(*after: bytes) -> bytes:
    """The same with a chunked body, and what follows its last chunk's size line."""
    start = head("POST", "/v1/completions", "transfer-encoding: chunked")
    body = json.dumps({"model": MODEL, "prompt": "hi"}).encode()
    return start + b"%x\r\n%s\r\n0\r\n" % (len(body), body) + b"".join(after)


def whole(client: socket.socket, within: float = 10.0) -> bytes:
    """All that comes until the other side closes."""
    client.settimeout(within)
    found = b""
    try:
        while chunk := client.recv(65536):
            found += chunk
    except ConnectionResetError:
        pass
    return found


@pytest.fixture
def client(shared_gate: Gateway) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", shared_gate.port), timeout=10) as found:
        yield found


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch, shared_gate: Gateway) -> Iterator[socket.socket]:
    """A connection whose heads have half a second."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.5)
    with socket.create_connection(("127.0.0.1", shared_gate.port), timeout=10) as found:
        yield found


def is_error(answer: bytes, code: int, name: str) -> bool:
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    return status(answer) == code and error["code"] == name and set(error) == {"message", "type", "param", "code"}


def test_a_head_without_an_end_is_refused(client: socket.socket) -> None:
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
    sent = 0
    with pytest.raises(OSError):
        while sent < 50_000_000:
            client.sendall(b"x: " + b"a" * 10_000 + b"\r\n")
            sent += 10_000
    assert sent < 10_000_000  # the sockets' buffers, and what the gateway read before it closed


def test_one_header_that_is_too_large_is_told(client: socket.socket) -> None:
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
    time.sleep(0.1)
    client.sendall(b"x: " + b"a" * (connection.LOOSE_BYTES + 1))
    assert is_error(whole(client), 431, "headers_too_large")


@pytest.mark.parametrize("after", [b"x: " + b"a" * 200_000, b"x: y\r\n" * 40_000], ids=["a trailer", "trailers"])
def test_trailers_without_an_end(client: socket.socket, after: bytes) -> None:
    client.sendall(chunked())
    client.settimeout(10)
    client.sendall(after)
    assert status(whole(client)) in (0, 431)


def test_a_chunk_whose_extension_has_no_end(client: socket.socket) -> None:
    client.sendall(head("POST", "/v1/completions", "transfer-encoding: chunked") + b"5;")
    client.sendall(b"x" * 200_000)
    assert status(whole(client)) in (0, 431)


@pytest.mark.parametrize("name", ["x-request-id", "x-eyas-arm", "authorization"])
def test_trailers_are_no_headers(client: socket.socket, name: str) -> None:
    client.sendall(chunked(f"{name}: smuggled\r\n\r\n".encode()))
    time.sleep(0.2)
    answer = client.recv(65536)
    assert status(answer) == 200 and b"smuggled" not in answer
    client.sendall(request())
    assert status(client.recv(65536)) == 200, "the connection goes on"


@pytest.mark.parametrize(
    ("sent", "answered"),
    [(b"", 0), (b"POST /v1", 408), (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx: ", 408), (b"\r\n", 0)],
)
def test_a_head_that_does_not_come(hurried: socket.socket, sent: bytes, answered: int) -> None:
    hurried.sendall(sent)
    answer = whole(hurried)
    assert is_error(answer, 408, "headers_timeout") if answered else answer == b""


def test_the_second_head_that_does_not_come(hurried: socket.socket) -> None:
    hurried.sendall(request())
    assert status(hurried.recv(65536)) == 200
    time.sleep(0.8)
    hurried.sendall(b"\r\nPO")
    begun = time.monotonic()
    assert is_error(whole(hurried), 408, "headers_timeout")
    assert time.monotonic() - begun > 0.4, "the time between two requests is not the head's"


def test_a_slow_answer_is_no_slow_head(hurried: socket.socket, shared_fake: FakeEngine) -> None:
    shared_fake.delay = 1.2
    hurried.sendall(request("slow"))
    assert status(hurried.recv(65536)) == 200


def test_what_follows_a_refusal_has_its_time_too(hurried: socket.socket, shared_gate: Gateway) -> None:
    hurried.sendall(head("POST", "/v1/completions", "content-length: 999999999"))
    assert is_error(hurried.recv(65536), 413, "request_too_large")
    with pytest.raises(OSError):
        for _ in range(100):
            hurried.sendall(b"x")
            time.sleep(0.05)


def test_a_refused_body_that_comes_whole_leaves_the_connection(hurried: socket.socket, shared_gate: Gateway) -> None:
    size = shared_gate.core.table.max_body_bytes + 1
    hurried.sendall(head("POST", "/v1/completions", f"content-length: {size}"))
    assert is_error(hurried.recv(65536), 413, "request_too_large")
    hurried.sendall(b"x" * size)
    time.sleep(0.7)
    hurried.sendall(request())
    assert status(hurried.recv(65536)) == 200


@pytest.mark.parametrize(("user", "stream"), [("hangs_at_once", False), ("hangs", True)])
@pytest.mark.parametrize("count", [1, 50])
def test_who_leaves_with_a_request_in_the_pipeline_is_noticed(
    client: socket.socket, shared_gate: Gateway, user: str, stream: bool, count: int
) -> None:
    before = shared_gate.metric("eyas_upstream_aborts_total")
    client.sendall(request(user, stream=stream) + request() * count)
    wait_until(lambda: shared_gate.core.admission.inflight == 1)
    client.sendall(request())
    client.close()
    wait_until(lambda: shared_gate.core.admission.inflight == 0)
    wait_until(lambda: shared_gate.metric("eyas_upstream_aborts_total") == before + 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_pipelined_request_is_dropped_and_the_first_answered_whole(
    client: socket.socket, shared_fake: FakeEngine, stream: bool
) -> None:
    before = len(shared_fake.requests)
    client.sendall(request(stream=stream) + request("flat_error") + b"GARBAGE\r\n\r\n")
    answer = whole(client)
    assert status(answer) == 200 and answer.count(b"HTTP/1.1 ") == 1
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") if stream else b'"choices"' in answer
    assert len(shared_fake.requests) == before + 1


def test_garbage_after_a_request_breaks_into_no_answer(client: socket.socket) -> None:
    client.sendall(request("endless", stream=True))
    answer = client.recv(65536)
    client.sendall(b"GARBAGE\r\n\r\n")
    answer += whole(client)
    assert answer.count(b"HTTP/1.1 ") == 1 and b"invalid_http" not in answer


@pytest.mark.parametrize("sent", [b"GARBAGE\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"])
def test_what_is_no_http_is_told_like_everything_else(client: socket.socket, sent: bytes) -> None:
    client.sendall(sent)
    assert is_error(whole(client), 400, "invalid_http")


def test_no_websocket(client: socket.socket) -> None:
    keys = ("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: " + "A" * 24)
    client.sendall(head("GET", "/v1/completions", *keys))
    assert status(client.recv(65536)) in (400, 405)
