"""Malformed requests over raw sockets: no 500, no hang, no leak; and afterwards the gateway answers as before."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator

import pytest

from server.arms import Arm
from server.config import GatewayTable
from tests.server.conftest import Gateway
from tests.server.fake_engine import ADMIN_KEY, API_KEY, MODEL, FakeEngine, wait_until

BODY = json.dumps({"model": MODEL, "prompt": "hi", "messages": []}).encode()
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PRI", "get", "X" * 300)
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/healthz",
    "/readyz",
    "/metrics",
    "/openapi.json",
    "/server_info",
    "/flush_cache",
    "/abort_request",
    "/admin/status",
    "/v1/completions/",
    "//v1/completions",
    "/v1/../server_info",
    "/v1/%63ompletions",
    "/",
    "*",
)


def exchange(gate: Gateway, *parts: bytes, pause: float = 0.0, timeout: float = 8.0) -> bytes:
    """Send the parts, and all that comes back until the other side closes or has answered whole."""
    with socket.create_connection(("127.0.0.1", gate.port), timeout=timeout) as client:
        found = b""
        try:
            for part in parts:
                client.sendall(part)
                time.sleep(pause)
            client.settimeout(timeout)
            while chunk := client.recv(65536):
                found += chunk
                head, split, body = found.partition(b"\r\n\r\n")
                lengths = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                if split and lengths and len(body) >= int(lengths[0]):
                    break
        except (ConnectionResetError, BrokenPipeError):
            pass
        return found


def status(answer: bytes) -> int:
    """The status, 0 where the connection was closed without a word."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else 0


def head(method: str, path: str, *headers: str) -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "host: x", *headers, "", "")).encode("latin-1")


@pytest.fixture(scope="module")
def two_armed(shared_fake: FakeEngine) -> Iterator[Gateway]:
    """With a second arm, so that there is a choice to make by what a request holds."""
    arms = [Arm(name, shared_fake.url, API_KEY, ADMIN_KEY, MODEL, name, state="ready") for name in "ab"]
    gateway = Gateway(arms[0], GatewayTable(), arms[1]).start()
    yield gateway
    gateway.stop()


@pytest.fixture(autouse=True)
def unharmed(shared_gate: Gateway, shared_fake: FakeEngine) -> object:
    yield
    assert shared_gate.ask().status_code == 200
    wait_until(lambda: shared_gate.core.admission.inflight == 0 and not shared_gate.core.relay.running)
    assert shared_gate.metric("eyas_requests_total", code="500") == 0
    reached = {path for path in shared_fake.touched if path != "/ready"}
    assert not reached, f"the engine's own surface was reached: {reached}"


@pytest.mark.parametrize("path", PATHS)
def test_every_method_on_every_route(shared_gate: Gateway, path: str) -> None:
    for method in METHODS:
        answer = exchange(shared_gate, head(method, path, "content-length: 2", "connection: close") + b"{}")
        assert status(answer) in (0, 200, 400, 401, 403, 404, 405, 501), (method, path, answer[:200])
        if status(answer) == 200:
            assert method in ("GET", "HEAD") and path in PATHS[2:7]


@pytest.mark.parametrize(
    "headers",
    [
        ("transfer-encoding: chunked", f"content-length: {len(BODY)}"),
        (f"content-length: {len(BODY)}", "transfer-encoding: chunked"),
        ("content-length: 5", f"content-length: {len(BODY)}"),
        ("content-length: -1",),
        ("content-length: 1e3",),
        ("content-length: +5",),
        ("content-length: 99999999999999999999999",),
        ("content-length: ٥",),
        ("transfer-encoding: gzip, chunked",),
        ("transfer-encoding: identity",),
        ("transfer-encoding : chunked",),
        ("expect: 100-continue", "content-length: 3"),
        ("upgrade: websocket", "connection: upgrade"),
        ("upgrade: h2c", "connection: upgrade, http2-settings", "http2-settings: x"),
        ("x: " + "a" * 200_000,),
        tuple(f"x-{at}: y" for at in range(5000)),
        ("x-request-id: \x01\x02", f"content-length: {len(BODY)}"),
        ("no colon here",),
        (" folded: header",),
        ("x: \x00",),
    ],
    ids=lambda headers: headers[0][:30],
)
def test_odd_headers(shared_gate: Gateway, headers: tuple[str, ...]) -> None:
    sent = "\r\n".join(("POST /v1/completions HTTP/1.1", "host: x", "connection: close", *headers, "", ""))
    answer = exchange(shared_gate, sent.encode("utf-8", "replace"), BODY)
    assert status(answer) != 500 and b"Traceback" not in answer, answer[:300]
    smuggled = "transfer-encoding" in sent and "content-length" in sent
    assert not (smuggled and status(answer) == 200), "two lengths must never be believed"


def test_chunked_bodies_that_are_none(shared_gate: Gateway) -> None:
    start = head("POST", "/v1/completions", "transfer-encoding: chunked", "connection: close")
    for body in (
        b"zz\r\n",
        b"5\r\nab\r\n0\r\n\r\n",
        b"-1\r\n",
        b"ffffffffffffffffff\r\n",
        b"5;" + b"x" * 70_000 + b"\r\nabcde\r\n0",
    ):
        answer = exchange(shared_gate, start, body, b"\r\n\r\n")
        assert status(answer) in (0, 400, 408, 413, 431), answer[:200]


def test_a_body_byte_by_byte_is_read_like_any_other(shared_gate: Gateway) -> None:
    start = head("POST", "/v1/completions", f"content-length: {len(BODY)}", "connection: close")
    answer = exchange(shared_gate, *(start[at : at + 1] for at in range(len(start))), *(bytes([b]) for b in BODY))
    assert status(answer) == 200


def test_clients_that_send_half_and_leave(shared_gate: Gateway) -> None:
    start = head("POST", "/v1/completions", f"content-length: {len(BODY)}")
    whole = start + BODY
    for cut in range(0, len(whole), 7):
        with socket.create_connection(("127.0.0.1", shared_gate.port)) as client:
            client.sendall(whole[:cut])


@pytest.mark.parametrize("seed", range(4))
def test_bodies_with_broken_bytes(shared_gate: Gateway, seed: int) -> None:
    """A good body with bytes changed, cut out, doubled or put in."""
    dice = random.Random(seed)
    asked = {"model": MODEL, "prompt": "zażółć 🦅", "stream": False, "n": 1, "stream_options": None, "max_tokens": 3}
    good = json.dumps(asked, ensure_ascii=False).encode()
    seen = set()
    for _ in range(150):
        body = bytearray(good)
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(body))
            match dice.randrange(4):
                case 0:
                    body[at] = dice.randrange(256)
                case 1:
                    del body[at : at + dice.randrange(1, 9)]
                case 2:
                    body[at:at] = body[at : at + dice.randrange(1, 9)]
                case 3:
                    body[at:at] = bytes(dice.randrange(256) for _ in range(3))
        answer = shared_gate.client.post("/v1/completions", content=bytes(body))
        assert answer.status_code in (200, 400, 404), (bytes(body), answer.text)
        seen.add(answer.status_code)
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert {200, 400} <= seen


def test_deep_and_long_documents(shared_gate: Gateway) -> None:
    for body in (
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'"' + b"x" * 1_000_000,
        b"9" * 100_000,
        b"\xff\xfe",
        b"",
        b"\x00" * 9,
    ):
        answer = shared_gate.client.post("/v1/completions", content=body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("depth", [100, 128, 129, 300, 1000])
@pytest.mark.parametrize("long", [0, 100_000])
def test_depth_in_every_place(two_armed: Gateway, depth: int, long: int) -> None:
    """Each place of a body that is parsed, written anew, shown in an error or hashed for stickiness."""
    nest = "[" * (depth - 1) + "]" * (depth - 1)  # the body's own object is one level more
    deeper = "[" * (depth - 2) + "]" * (depth - 2)
    named = f'"model":"{MODEL}","user":"{"x" * long}"'
    for path, held, well in (
        ("completions", f'"prompt":"x","extra":{nest}', 200),
        ("completions", f'"prompt":"x","n":null,"extra":{nest}', 200),
        ("completions", f'"prompt":"x","rid":{nest}', 200),
        ("completions", f'"prompt":"x","stream":true,"stream_options":{{"extra":{deeper}}}', 200),
        ("completions", f'"prompt":"x","stream":true,"stream_options":{nest}', 400),
        ("completions", f'"prompt":"x","stream":{nest}', 400),
        ("completions", f'"prompt":"x","n":{nest}', 400),
        ("completions", f'"prompt":{nest}', 400),
        ("completions", f'"prompt":["x",{deeper}]', 400),
        ("chat/completions", f'"messages":{nest}', 200),
        ("chat/completions", f'"messages":{nest},"response_format":{nest},"tools":{nest}', 200),
    ):
        answer = two_armed.client.post(f"/v1/{path}", content=f"{{{named},{held}}}")
        assert answer.status_code == (well if depth <= 128 else 400), (path, held[:60], answer.text[:200])
        if answer.status_code == 400:
            error = answer.json()["error"]
            assert len(answer.content) < 1000 and set(error) == {"message", "type", "param", "code"}
    assert two_armed.metric("eyas_requests_total", code="500") == 0


def test_text_that_only_looks_deep_is_not_refused(shared_gate: Gateway) -> None:
    assert shared_gate.ask("/v1/completions", prompt="[{" * 5000, extra=[[1]] * 500).status_code == 200


@pytest.mark.parametrize("name", ["model", "n", "stream", "stream_options", "prompt", "return_spec_tokens_details"])
def test_an_error_does_not_give_a_large_value_back(shared_gate: Gateway, name: str) -> None:
    for value in ("x" * 300_000, ["x" * 300_000] * 3, {"y" * 300_000: [["z"]]}, [[7, "x" * 300_000]]):
        body = {"model": MODEL, "prompt": "x", name: value}
        answer = shared_gate.client.post("/v1/completions", json=body)
        expected = {"prompt": (200, 400), "stream_options": (200, 400), "model": (400, 404)}.get(name, (400,))
        assert answer.status_code in expected and len(answer.content) < 2000, answer.text[:200]
