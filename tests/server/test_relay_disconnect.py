"""Clients that leave, at every moment: the engine's connection closes, then the abort goes out with our id."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest

from tests.server.conftest import Gateway
from tests.server.fake_engine import ADMIN_KEY, MODEL, FakeEngine, wait_until


def send_request(gate: Gateway, path: str = "/v1/chat/completions", **body: Any) -> socket.socket:
    """A client's socket with a whole request sent and nothing read."""
    raw = orjson.dumps({"model": MODEL, "messages": [], "prompt": "x", **body})
    connection = socket.create_connection(("127.0.0.1", gate.port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


def read_to_end(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(65536), b""))


def check_stopped(gate: Gateway, fake: FakeEngine, phase: str) -> None:
    """One request was given up: closed at the engine, then aborted under its own id, and counted."""
    wait_until(lambda: fake.requests[0].closed_at and fake.aborts)
    seen, abort = fake.requests[0], fake.aborts[0]
    assert seen.closed_at is not None
    assert seen.closed_at <= abort.at
    assert not seen.finished
    assert abort.rid == seen.body["rid"]
    assert abort.authorization == f"Bearer {ADMIN_KEY}"
    wait_until(lambda: gate.metric("eyas_upstream_aborts_total", result="ok") == 1)
    assert len(fake.aborts) == 1
    assert gate.metric("eyas_client_disconnects_total", phase=phase) == 1
    assert gate.metric("eyas_client_disconnects_total") == 1
    wait_until(lambda: gate.metric("eyas_requests_total", code="499", route="chat") == 1)
    assert gate.metric("eyas_inflight_requests") == 0
    assert gate.metric("eyas_stream_errors_total") == 0
    assert gate.metric("eyas_tokens_total") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_gone_before_the_engines_headers(gate: Gateway, fake: FakeEngine, stream: bool) -> None:
    client = send_request(gate, user="hangs_at_once", stream=stream)
    fake.seen()
    client.close()
    check_stopped(gate, fake, "waiting")


@pytest.mark.parametrize("stream", [False, True])
def test_gone_with_a_reset(gate: Gateway, fake: FakeEngine, stream: bool) -> None:
    client = send_request(gate, user="hangs_at_once", stream=stream)
    fake.seen()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    client.close()
    check_stopped(gate, fake, "waiting")


def test_gone_while_pings_are_all_it_got(gateways: Callable[..., Gateway], fake: FakeEngine) -> None:
    gate = gateways(heartbeat_after_s=0.05)
    client = send_request(gate, user="hangs_at_once", stream=True)
    received = b""
    while received.count(b": ping\n\n") < 2:
        received += client.recv(4096)
    client.close()
    check_stopped(gate, fake, "waiting")


@pytest.mark.parametrize("how", ["hangs", "endless"])
def test_gone_within_a_stream(gate: Gateway, fake: FakeEngine, how: str) -> None:
    client = send_request(gate, user=how, stream=True)
    assert b"200 OK" in client.recv(4096)
    client.close()
    check_stopped(gate, fake, "answering")


def test_gone_while_it_does_not_read(gate: Gateway, fake: FakeEngine) -> None:
    """The gateway waits for room in a full socket when the client leaves."""
    client = send_request(gate, user="flood", stream=True)
    client.recv(100)
    sent = -1
    while sent != len(fake.requests[0].sent):  # until the engine itself has to wait
        sent = len(fake.requests[0].sent)
        time.sleep(0.3)
    client.close()
    check_stopped(gate, fake, "answering")


def test_a_client_that_does_not_read_is_not_the_engines_silence(
    gateways: Callable[..., Gateway], fake: FakeEngine
) -> None:
    gate = gateways(decode_timeout_s=0.2)
    client = send_request(gate, user="flood", stream=True)
    client.recv(100)
    time.sleep(1.5)
    assert gate.metric("eyas_stream_errors_total") == 0
    assert fake.aborts == []
    client.close()
    check_stopped(gate, fake, "answering")


def test_gone_within_its_own_body(gate: Gateway, fake: FakeEngine) -> None:
    client = socket.create_connection(("127.0.0.1", gate.port), timeout=10)
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    time.sleep(0.1)
    client.close()
    wait_until(lambda: gate.metric("eyas_client_disconnects_total", phase="body") == 1)
    assert gate.metric("eyas_requests_total", code="499") == 1
    assert fake.requests == []
    assert fake.aborts == []


def test_a_list_of_prompts_is_aborted_one_by_one(gate: Gateway, fake: FakeEngine) -> None:
    prompts = (["a", "b", "c"], [[1, 2], [3]])
    for at, prompt in enumerate(prompts):
        client = send_request(gate, "/v1/completions", user="hangs_at_once", prompt=prompt)
        fake.seen(at + 1)
        client.close()
    wait_until(lambda: len(fake.aborts) == 5)
    ids = [seen.body["rid"] for seen in fake.requests]
    expected = [f"{rid}_{at}" for rid, prompt in zip(ids, prompts, strict=True) for at in range(len(prompt))]
    assert sorted(abort.rid for abort in fake.aborts) == sorted(expected)


def test_one_prompt_of_token_ids_has_one_id(gate: Gateway, fake: FakeEngine) -> None:
    client = send_request(gate, user="hangs_at_once", prompt=[1, 2, 3])
    fake.seen()
    client.close()
    check_stopped(gate, fake, "waiting")


def test_several_answers_are_stopped_by_closing_alone(gate: Gateway, fake: FakeEngine) -> None:
    """For n > 1 the engine mints ids that nobody is told."""
    client = send_request(gate, user="hangs", stream=True, n=3)
    client.recv(4096)
    client.close()
    wait_until(lambda: fake.requests[0].closed_at)
    wait_until(lambda: gate.metric("eyas_upstream_aborts_total", result="no_id") == 1)
    assert fake.aborts == []


def test_a_refused_abort_is_counted_so(gate: Gateway, fake: FakeEngine) -> None:
    gate.arm.admin_key = "wrong"
    client = send_request(gate, user="hangs_at_once")
    fake.seen()
    client.close()
    wait_until(lambda: gate.metric("eyas_upstream_aborts_total", result="refused") == 1)


def test_an_abort_that_reaches_nobody_is_counted_so(gate: Gateway, fake: FakeEngine) -> None:
    client = send_request(gate, user="hangs_at_once")
    fake.seen()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        gate.arm.url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        client.close()
        wait_until(lambda: gate.metric("eyas_upstream_aborts_total", result="failed") == 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_request_is_not_aborted(gate: Gateway, fake: FakeEngine, stream: bool) -> None:
    with httpx.Client() as client:
        client.post(f"{gate.url}/v1/completions", json={"model": MODEL, "prompt": "x", "stream": stream})
    time.sleep(0.2)
    assert fake.aborts == []
    assert gate.metric("eyas_client_disconnects_total") == 0
    assert gate.metric("eyas_requests_total", code="200") == 1


def test_a_gateway_that_stops_stops_its_requests(
    gateways: Callable[..., Gateway], fake: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    gate = gateways()
    gate.server.config.timeout_graceful_shutdown = 1
    clients = [send_request(gate, user="hangs", stream=True), send_request(gate, user="hangs_at_once")]
    clients[0].recv(4096)
    fake.seen(2)
    gate.server.should_exit = True
    gate.thread.join(15)
    assert not gate.thread.is_alive()
    wait_until(lambda: all(seen.closed_at for seen in fake.requests))
    assert sorted(abort.rid for abort in fake.aborts) == sorted(seen.body["rid"] for seen in fake.requests)
    stream, plain = (read_to_end(client) for client in clients)
    assert b"server_stopping" in stream and b"data: [DONE]" in stream
    assert plain.startswith(b"HTTP/1.1 503") and b"server_stopping" in plain
    assert "Traceback" not in caplog.text


def test_those_that_wait_keep_nobody_out(gate: Gateway, fake: FakeEngine) -> None:
    """aiohttp's own limit of 100 connections would hold up the rest."""
    clients = [send_request(gate, user="hangs_at_once") for _ in range(120)]
    fake.seen(120)
    assert gate.metric("eyas_inflight_requests") == 120
    assert gate.ask(stream=True).status_code == 200
    for client in clients:
        client.close()
    wait_until(lambda: len(fake.aborts) == 120)


def test_many_that_leave_cost_those_that_stay_nothing(gate: Gateway, fake: FakeEngine) -> None:
    fake.pace = 0.002

    async def ask(client: httpx.AsyncClient, how: str, stream: bool) -> int:
        body = {"model": MODEL, "prompt": "x", "user": how, "stream": stream}
        answer = await client.post(f"{gate.url}/v1/completions", json=body, timeout=60)
        return answer.content.count(b"[DONE]\n\n") * answer.status_code

    async def leave_early(client: httpx.AsyncClient, at: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at / 200):
                await ask(client, "endless", stream=True)

    async def all_of_them() -> list[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits) as leavers, httpx.AsyncClient(limits=limits) as stayers:
            stayed = [asyncio.create_task(ask(stayers, "", stream=True)) for _ in range(20)]
            await asyncio.gather(*(leave_early(leavers, at) for at in range(40)))
            before = len(fake.requests)
            late = [asyncio.create_task(ask(leavers, "hangs_at_once", stream=at % 2 == 0)) for at in range(60)]
            await asyncio.to_thread(fake.seen, before + 60)
            for task in late:
                task.cancel()
            return await asyncio.gather(*stayed)

    assert asyncio.run(all_of_them()) == [200] * 20
    wait_until(lambda: gate.metric("eyas_inflight_requests") == 0)
    wait_until(lambda: all(seen.finished or seen.closed_at for seen in fake.requests))
    closed = {seen.body["rid"] for seen in fake.requests if seen.closed_at}
    assert len(closed) >= 60
    wait_until(lambda: closed <= {abort.rid for abort in fake.aborts})
    assert gate.metric("eyas_requests_total", code="499") >= len(closed)
    assert gate.ask().status_code == 200
