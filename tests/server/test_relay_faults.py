"""Refusals, the engine's faults, and long waits, as a client of the gateway meets them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from server.auth import KeyRing, add_key
from server.breaker import BREAK_AFTER
from server.config import Limits
from tests.server.conftest import Gateway
from tests.server.fake_engine import MODEL, TEXT, FakeEngine, wait_until
from tests.server.test_relay import USER, error_of, frames_of, text_of
from tests.server.test_relay_disconnect import send_request

# --- refusals


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b"\xff\xfe{}", 400, None),
        (b'{"a":"\xc5"}', 400, None),
        (b'"text"', 400, None),
        (b"[]", 400, None),
        (b"null", 400, None),
        (b"{}", 400, "model"),
        (b'{"model":null}', 400, "model"),
        (b'{"model":["tiny"]}', 400, "model"),
        (b'{"model":"Tiny"}', 404, "model"),
        (b'{"model":"tiny:adapter"}', 404, "model"),
        (b'{"model":"tiny","stream":1}', 400, "stream"),
        (b'{"model":"tiny","stream":"true"}', 400, "stream"),
        (b'{"model":"tiny","stream":true,"stream_options":true}', 400, "stream_options"),
        (b'{"model":"tiny","stream":true,"stream_options":{"include_usage":"no"}}', 400, "include_usage"),
        (b'{"model":"tiny","return_spec_tokens_details":0}', 400, "return_spec_tokens_details"),
        (b'{"model":"tiny","n":0}', 400, "n"),
        (b'{"model":"tiny","n":-1}', 400, "n"),
        (b'{"model":"tiny","n":129}', 400, "n"),
        (b'{"model":"tiny","n":true}', 400, "n"),
        (b'{"model":"tiny","n":"2"}', 400, "n"),
        (b'{"model":"tiny","n":2.0}', 400, "n"),
        (b'{"model":"tiny","prompt":[]}', 400, "prompt"),
        (b'{"model":"tiny","prompt":7}', 400, "prompt"),
        (b'{"model":"tiny","prompt":{"a":1}}', 400, "prompt"),
        (b'{"model":"tiny","prompt":[1,-5]}', 400, "prompt"),
        (b'{"model":"tiny","prompt":[1,512]}', 400, "prompt"),
        (b'{"model":"tiny","prompt":[1000000000]}', 400, "prompt"),
        (b'{"model":"tiny","prompt":[18446744073709551616]}', 400, "prompt"),
        (b'{"model":"tiny","prompt":[1,"a"]}', 400, "prompt"),
        (b'{"model":"tiny","prompt":[1,true]}', 400, "prompt"),
        (b'{"model":"tiny","prompt":[1,2.0]}', 400, "prompt"),
        (b'{"model":"tiny","prompt":[[1,2],[3,-4]]}', 400, "prompt"),
        (b'{"model":"tiny","prompt":[[1,2],[]]}', 400, "prompt"),
        (b'{"model":"tiny","prompt":["a",7]}', 400, "prompt"),
        (b'{"model":"tiny","prompt":["a",null]}', 400, "prompt"),
        (b"[" * 100_000, 400, None),
    ],
)
def test_what_no_engine_shall_see(
    shared_gate: Gateway, shared_fake: FakeEngine, body: bytes, status: int, param: str | None
) -> None:
    gate, fake = shared_gate, shared_fake
    rejected, counted = gate.metric("eyas_rejected_total"), gate.metric("eyas_requests_total", code=str(status))
    before = len(fake.requests)
    answer = gate.client.post("/v1/chat/completions", content=body)
    error = error_of(answer)
    assert (answer.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert len(fake.requests) == before
    assert gate.metric("eyas_rejected_total") == rejected + 1
    assert gate.metric("eyas_requests_total", code=str(status)) == counted + 1
    assert gate.ask().status_code == 200


def test_ids_are_let_in_where_nobody_said_how_many_there_are(
    gateways: Callable[..., Gateway], fake: FakeEngine
) -> None:
    gate = gateways()
    assert gate.client.post("/v1/completions", json={"model": MODEL, "prompt": [1, 500_000]}).status_code == 200
    assert gate.client.post("/v1/completions", json={"model": MODEL, "prompt": [1, -1]}).status_code == 400


@pytest.mark.parametrize("body", [b'{"model":"tiny","stream":null}', b'{"stream":null,"model":"tiny","n":null}'])
def test_a_null_stream_is_no_stream(shared_gate: Gateway, shared_fake: FakeEngine, body: bytes) -> None:
    answer = shared_gate.client.post("/v1/chat/completions", content=body)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("application/json")
    assert "stream" not in shared_fake.requests[-1].body


def test_a_body_at_the_limit_and_past_it(gateways: Callable[..., Gateway], fake: FakeEngine) -> None:
    gate = gateways(max_body_bytes=200_000)
    frame = b'{"model":"tiny","prompt":"%s"}'
    room = 200_000 - len(frame % b"")
    assert gate.client.post("/v1/completions", content=frame % (b"x" * room)).status_code == 200
    too_long = frame % (b"x" * (room + 1))
    answer = gate.client.post("/v1/completions", content=too_long)
    assert answer.status_code == 413
    assert error_of(answer)["code"] == "request_too_large"

    def in_chunks() -> Any:
        for at in range(0, len(too_long), 9_000):
            yield too_long[at : at + 9_000]

    assert gate.client.post("/v1/completions", content=in_chunks()).status_code == 413
    assert gate.client.post("/v1/completions", content=frame % b"y").status_code == 200
    assert len(fake.requests) == 2
    assert gate.metric("eyas_rejected_total", reason="request_too_large") == 2


def test_an_announced_length_past_the_limit_is_refused_unread(gateways: Callable[..., Gateway]) -> None:
    gate = gateways(max_body_bytes=1000)
    with socket.create_connection(("127.0.0.1", gate.port), timeout=5) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n{")
        assert connection.recv(64).startswith(b"HTTP/1.1 413")


def test_a_large_body_goes_through_whole(gate: Gateway, fake: FakeEngine) -> None:
    prompt = "Ż" * 8_000_000
    assert gate.ask("/v1/completions", prompt=prompt).status_code == 200
    assert fake.requests[0].body["prompt"] == prompt


@pytest.mark.parametrize(("state", "code"), [("starting", "model_loading"), ("down", "engine_down")])
def test_not_ready_is_told_with_a_time_to_come_back(gate: Gateway, fake: FakeEngine, state: Any, code: str) -> None:
    gate.arm.state, gate.arm.detail = state, "weights 3 of 9"
    answer = gate.ask(stream=True)
    assert answer.status_code == 503
    assert error_of(answer)["code"] == code
    assert "weights 3 of 9" in error_of(answer)["message"]
    assert int(answer.headers["retry-after"]) > 0
    assert fake.requests == []
    gate.arm.state = "ready"
    assert gate.ask(stream=True).status_code == 200


# --- the engine's faults


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("how", "status", "message"),
    [
        ("flat_error", 400, "The input is too long."),
        ("queue_full", 503, "The request queue is full."),
        ("unauthorized", 401, "Unauthorized"),
        ("text_error", 500, "the engine answered with status 500."),
        ("redirect", 502, "the engine answered with status 307 where an answer or an error was expected."),
        ("dies_at_once", 502, "the engine's answer broke off."),
    ],
)
def test_errors_keep_their_status_and_gain_a_shape(
    gate: Gateway, fake: FakeEngine, how: str, status: int, message: str, stream: bool
) -> None:
    answer = gate.ask(user=how, stream=stream)
    assert answer.status_code == status
    assert error_of(answer)["message"] == message
    assert answer.headers["x-eyas-arm"] == "main"
    assert ("retry-after" in answer.headers) == (status == 503)
    assert fake.touched == []
    wait_until(lambda: gate.metric("eyas_requests_total", code=str(status)) == 1)


def test_a_stream_whose_first_frame_is_an_error_has_that_status(gate: Gateway) -> None:
    answer = gate.ask(user="error_frame_first", stream=True)
    assert answer.status_code == 503
    assert error_of(answer)["message"] == "The request queue is full."
    assert "retry-after" in answer.headers


def test_a_stream_without_a_frame_is_no_success(gate: Gateway) -> None:
    answer = gate.ask(user="empty", stream=True)
    assert answer.status_code == 502
    error_of(answer)


def test_a_wrong_engine_key_is_an_error_and_never_shown(gate: Gateway) -> None:
    gate.arm.api_key = "not-the-key"
    answer = gate.ask()
    assert answer.status_code == 401
    assert "not-the-key" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_no_engine_there(gate: Gateway, stream: bool) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        gate.arm.url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        answer = gate.ask(stream=stream)
    assert answer.status_code == 502
    assert error_of(answer)["code"] == "engine_unreachable"


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("dies", "died"),
        ("dies_inside_a_frame", "died"),
        ("truncated", "truncated"),
        ("error_frame", "engine"),
        ("error_frame_last", "engine"),
    ],
)
def test_a_broken_stream_ends_in_an_error_and_done(gate: Gateway, fake: FakeEngine, how: str, kind: str) -> None:
    answer = gate.ask(user=how, stream=True)
    assert answer.status_code == 200
    *pieces, error, done = frames_of(answer.content)
    assert done == b"data: [DONE]\n\n"
    assert json.loads(error[6:])["error"]["message"]
    assert pieces and all(b'"choices":[{' in piece for piece in pieces)
    assert b"".join(pieces) == fake.requests[0].sent[: len(b"".join(pieces))]
    wait_until(lambda: gate.metric("eyas_stream_errors_total", kind=kind) == 1)
    assert gate.metric("eyas_stream_errors_total") == 1


@pytest.mark.parametrize("how", ["dies", "no_json"])
def test_a_broken_plain_answer_is_a_502(gate: Gateway, how: str) -> None:
    answer = gate.ask(user=how)
    assert answer.status_code == 502
    error_of(answer)


# --- waiting


def test_pings_while_the_engine_is_silent_then_the_same_bytes(
    gateways: Callable[..., Gateway], fake: FakeEngine
) -> None:
    gate = gateways(heartbeat_after_s=0.1)
    answer = gate.ask(user="slow", stream=True)
    frames = frames_of(answer.content)
    pings = [frame for frame in frames if frame == b": ping\n\n"]
    assert 3 <= len(pings) <= 6
    assert frames[: len(pings)] == pings
    assert text_of(answer.content) == TEXT
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-eyas-arm"] == "main" and answer.headers["cache-control"] == "no-cache"
    client = openai.OpenAI(base_url=f"{gate.url}/v1", api_key="x", max_retries=0)
    chunks = client.chat.completions.create(model=MODEL, messages=USER, stream=True, extra_body={"user": "slow"})  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT


def test_no_ping_before_its_time_and_none_in_plain_answers(gateways: Callable[..., Gateway]) -> None:
    assert b"ping" not in gateways(heartbeat_after_s=5.0).ask(user="slow", stream=True).content
    assert gateways(heartbeat_after_s=0.1).ask(user="slow").json()["choices"]


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("slow_then_error", "status", "The input is too long."),
        ("slow_then_dead", "died", "the engine's answer broke off."),
    ],
)
def test_after_a_ping_an_error_is_a_frame(gateways: Callable[..., Gateway], how: str, kind: str, message: str) -> None:
    gate = gateways(heartbeat_after_s=0.1)
    answer = gate.ask(user=how, stream=True)
    assert answer.status_code == 200
    *pings, error, done = frames_of(answer.content)
    assert set(pings) == {b": ping\n\n"}
    assert json.loads(error[6:])["error"]["message"] == message
    assert done == b"data: [DONE]\n\n"
    wait_until(lambda: gate.metric("eyas_stream_errors_total", kind=kind) == 1)


def test_an_engine_silent_before_the_first_frame(gateways: Callable[..., Gateway], fake: FakeEngine) -> None:
    gate = gateways(prefill_timeout_s=0.3)
    answer = gate.ask(user="hangs_at_once", stream=True)
    assert answer.status_code == 504
    assert error_of(answer)["code"] == "engine_timeout"
    seen = fake.requests[0]
    wait_until(lambda: seen.closed_at and fake.aborts)
    assert fake.aborts[0].rid == seen.body["rid"]


def test_an_engine_silent_within_a_stream(gateways: Callable[..., Gateway], fake: FakeEngine) -> None:
    gate = gateways(decode_timeout_s=0.3)
    answer = gate.ask(user="hangs", stream=True)
    *pieces, error, done = frames_of(answer.content)
    assert len(pieces) == 2
    assert json.loads(error[6:])["error"]["code"] == "engine_timeout"
    assert done == b"data: [DONE]\n\n"
    wait_until(lambda: fake.requests[0].closed_at and fake.aborts)
    assert gate.metric("eyas_stream_errors_total", kind="timeout") == 1


def test_frames_that_keep_coming_are_no_silence(gateways: Callable[..., Gateway], fake: FakeEngine) -> None:
    gate = gateways(decode_timeout_s=0.3)
    fake.pace = 0.05
    assert text_of(gate.ask(stream=True).content) == TEXT
    assert len(frames_of(fake.requests[0].sent)) * 0.05 > 0.6


def test_a_plain_answer_is_not_held_to_the_idle_times(gateways: Callable[..., Gateway]) -> None:
    gate = gateways(prefill_timeout_s=0.1, decode_timeout_s=0.1, heartbeat_after_s=0.1)
    assert gate.ask(user="slow").status_code == 200


# --- the deadline


def check_stopped(gate: Gateway, fake: FakeEngine) -> None:
    """The engine was told to stop, and nothing of the request is left."""
    wait_until(lambda: fake.requests[0].closed_at and fake.aborts)
    assert fake.aborts[0].rid == fake.requests[0].body["rid"]
    wait_until(lambda: gate.metric("eyas_inflight_requests") == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_the_deadline_of_an_answer_that_has_not_begun(
    gateways: Callable[..., Gateway], fake: FakeEngine, stream: bool
) -> None:
    gate = gateways(request_timeout_s=0.4)
    answer = gate.ask(user="hangs_at_once", stream=stream)
    assert answer.status_code == 504
    assert error_of(answer)["code"] == "request_timeout"
    check_stopped(gate, fake)
    assert gate.ask(user="slow" if stream else "").status_code == (504 if stream else 200)


def test_the_deadline_of_a_stream_that_goes_on(gateways: Callable[..., Gateway], fake: FakeEngine) -> None:
    gate = gateways(request_timeout_s=0.5)
    *pieces, error, done = frames_of(gate.ask(user="endless", stream=True).content)
    assert len(pieces) > 3
    assert json.loads(error[6:])["error"]["code"] == "request_timeout"
    assert done == b"data: [DONE]\n\n"
    check_stopped(gate, fake)
    assert gate.metric("eyas_stream_errors_total", kind="deadline") == 1


def test_the_deadline_of_a_client_that_does_not_read(gateways: Callable[..., Gateway], fake: FakeEngine) -> None:
    gate = gateways(request_timeout_s=0.7)
    client = send_request(gate, user="flood", stream=True)
    client.recv(100)
    check_stopped(gate, fake)
    client.close()


def test_a_client_that_does_not_read_does_not_keep_its_slot(gateways: Callable[..., Gateway], fake: FakeEngine) -> None:
    gate = gateways(unread_timeout_s=0.4, max_inflight=1)
    client = send_request(gate, user="flood", stream=True)
    client.recv(100)
    assert gate.ask().status_code == 200, "it waited for the slot"
    check_stopped(gate, fake)
    assert gate.metric("eyas_stream_errors_total", kind="unread") == 1
    client.close()


def test_a_client_that_reads_slowly_is_served(gateways: Callable[..., Gateway], fake: FakeEngine) -> None:
    gate = gateways(unread_timeout_s=0.5)
    client = send_request(gate, user="flood", stream=True)
    until, taken = time.monotonic() + 2.5, 0
    while time.monotonic() < until:
        taken += len(client.recv(1 << 20))
        time.sleep(0.1)
    assert taken > 5_000_000 and fake.aborts == [] and gate.metric("eyas_stream_errors_total") == 0
    client.close()


@pytest.mark.parametrize("user", ["endless", "flood"])
def test_the_length_of_an_answer_is_not_held_against_the_engine(
    gateways: Callable[..., Gateway], fake: FakeEngine, user: str
) -> None:
    gate = gateways(request_timeout_s=0.2)
    for _ in range(BREAK_AFTER):
        client = send_request(gate, user=user, stream=True)
        client.recv(100)
        wait_until(lambda: not gate.core.relay.running)
        client.close()
    assert gate.ask().status_code == 200


def test_a_stream_that_its_client_cuts_is_paid_for(gateways: Callable[..., Gateway], tmp_path: Path) -> None:
    """Else a client that leaves before the usage comes, at the very end, has no limit at all."""
    file = tmp_path / "keys.json"
    _, key = add_key(file, "a", Limits(tokens_per_minute=100))
    gate = gateways(keys=KeyRing(file, Limits()))
    mine = {"authorization": f"Bearer {key}"}
    body = {"model": MODEL, "prompt": "x", "user": "endless", "stream": True}
    with gate.client.stream("POST", "/v1/completions", json=body, headers=mine) as answer:
        for at, _ in enumerate(answer.iter_lines()):
            if at > 220:  # two lines a piece
                break
    wait_until(lambda: not gate.core.relay.running)
    refused = gate.ask(headers=mine)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_tokens")


def test_the_deadline_after_a_ping_is_told_in_a_frame(gateways: Callable[..., Gateway], fake: FakeEngine) -> None:
    gate = gateways(request_timeout_s=0.5, heartbeat_after_s=0.1)
    answer = gate.ask(user="hangs_at_once", stream=True)
    *pings, error, done = frames_of(answer.content)
    assert set(pings) == {b": ping\n\n"}
    assert (json.loads(error[6:])["error"]["code"], done) == ("request_timeout", b"data: [DONE]\n\n")
    check_stopped(gate, fake)


@pytest.mark.parametrize("part", [b"", b"{"])
def test_a_body_that_does_not_come_is_not_waited_for(
    gateways: Callable[..., Gateway], fake: FakeEngine, part: bytes
) -> None:
    gate = gateways(body_timeout_s=0.3)
    with socket.create_connection(("127.0.0.1", gate.port), timeout=5) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n" + part)
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 408") and b'"code":"body_timeout"' in answer
    assert gate.metric("eyas_rejected_total", reason="body_timeout") == 1
    assert gate.ask().status_code == 200
