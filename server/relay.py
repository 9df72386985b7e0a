"""One request to one engine and back, as bytes: a raw ASGI callable for the two hot routes.

Each request has two tasks, the pump (engine to client) and the watch (has the client left?), and an exchange that
minds both: it pings a client that waits long, ends an engine's silence, and stops the engine when its client leaves.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
from collections.abc import Coroutine
from time import perf_counter
from typing import Any

import aiohttp
import orjson
from starlette.types import Receive, Scope, Send

from server.arms import Arm
from server.call import ROUTES, Call, ClientGone, read_body, read_call
from server.config import GatewayTable
from server.errors import (
    DONE_FRAME,
    RETRY_AFTER_LOADING_S,
    ApiError,
    Headers,
    engine_answered,
    engine_framed,
    send_error,
)
from server.metrics import Metrics
from server.sse import PIECE, AnswerStream, details_of, drop_details

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 5.0
DRAIN_TIMEOUT_S = 1.0
ENGINE_KEEPALIVE_S = 3.0  # SGLang closes an idle connection after 5 s: never reuse one that it may be closing
ERROR_BODY_LIMIT = 64 * 1024
PING_FRAME = b": ping\n\n"
SANE_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
STREAM_HEADERS: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
STREAM_TYPE = (b"content-type", b"text/event-stream; charset=utf-8")


class Relay:
    """The ASGI callable of the hot routes, and what all its requests share. Open it before the first request."""

    def __init__(self, arm: Arm, gateway: GatewayTable, metrics: Metrics) -> None:
        self.arm = arm
        self.gateway = gateway
        self.metrics = metrics
        self._pumps: set[asyncio.Task[None]] = set()
        self._aborts: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Open the connections' pool in the running loop."""
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=ENGINE_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.gateway.connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"content-type": "application/json", "accept-encoding": "identity"},
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Give up what still runs, tell the engine so, and close the pool."""
        for pump in self._pumps:
            pump.cancel()
        if self._pumps:
            await asyncio.wait(self._pumps)
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=ABORT_TIMEOUT_S)
        await self.session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = perf_counter()
        path = scope["path"]
        # All ids have one length, since SGLang aborts every request whose id begins with the one it is told.
        rid = secrets.token_hex(16)
        request_id = _request_id(scope, rid)
        try:
            if scope["method"] != "POST":
                raise ApiError(405, f"{path} takes POST, not {scope['method']}.", headers={"allow": "POST"})
            raw = await read_body(scope, receive, self.gateway.max_body_bytes)
            read = perf_counter()
            call = read_call(path, raw, rid, self.arm.served_name, self.arm.vocab_size)
            self._check_ready()
        except ClientGone:
            self.metrics.disconnects.labels("body").inc()
            self._count(path, 499)
            return
        except ApiError as error:
            self.metrics.rejected.labels(_reason(error)).inc()
            self._count(path, error.status)
            await send_error(send, error, [(b"x-request-id", request_id)])
            return
        exchange = Exchange(self, call, send, request_id, begun)
        self.metrics.overhead.observe(perf_counter() - read)
        self.metrics.inflight.inc()
        try:
            await exchange.run(receive)
        finally:
            self.metrics.inflight.dec()
            self._count(path, exchange.status)

    def start_pump(self, pump: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `pump` as a task that `close` knows of."""
        task = asyncio.create_task(pump)
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)
        return task

    def abort(self, call: Call) -> None:
        """Tell the engine to stop `call`, whatever becomes of the request's own task.

        The second measure only: the first is that the engine's connection has been closed.
        """
        if not call.abort_ids:
            self.metrics.aborts.labels("no_id").inc()
            return
        task = asyncio.create_task(self._abort(call.abort_ids))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, ids: list[str]) -> None:
        result = "ok"
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                for rid in ids:
                    url = f"{self.arm.url}/abort_request"
                    headers = authorization(self.arm.admin_key)
                    async with self.session.post(url, data=orjson.dumps({"rid": rid}), headers=headers) as answer:
                        await answer.read()
                        if answer.status != 200:
                            result = "refused"
        except TimeoutError:
            result = "timeout"
        except (aiohttp.ClientError, OSError):
            result = "failed"
        if result != "ok":
            logger.warning("arm %s: abort of request %s: %s", self.arm.name, ids[0], result)
        self.metrics.aborts.labels(result).inc()

    def _check_ready(self) -> None:
        if self.arm.state == "ready":
            return
        code = "model_loading" if self.arm.state == "starting" else "engine_down"
        detail = self.arm.detail or ("the model is loading" if code == "model_loading" else "the engine is down")
        raise ApiError(503, f"{detail}.", code=code, headers={"retry-after": str(RETRY_AFTER_LOADING_S)})

    def _count(self, path: str, status: int) -> None:
        self.metrics.requests.labels(ROUTES[path], str(status), self.arm.name).inc()


class Exchange:
    """One call on one arm. `status` is what the client got: 499 where it left first, 500 where nothing was sent."""

    def __init__(self, relay: Relay, call: Call, send: Send, request_id: bytes, begun: float) -> None:
        arm = relay.arm
        self.relay = relay
        self.call = call
        self.send = send
        self.begun = begun
        self.status = 500
        self.url = f"{arm.url}{call.path}"
        self.authorization = authorization(arm.api_key)
        self.whose = (arm.served_name, arm.drafter, arm.name)
        self.headers: Headers = [
            (b"x-request-id", request_id),
            (b"x-eyas-arm", arm.name.encode("latin-1", "replace")),
            (b"x-eyas-drafter", arm.drafter.encode("latin-1", "replace")),
        ]
        self.frames = AnswerStream(wants_usage=call.wants_usage, wants_details=call.wants_details)
        self.started = False  # the response's head went out
        self.finished = False  # and its last byte
        self.first_frame_at: float | None = None
        # When the engine last gave a sign of life; infinite while it is the client that is waited for.
        self.alive_at = perf_counter()
        self.next_ping_at = self.alive_at + relay.gateway.heartbeat_after_s

    async def run(self, receive: Receive) -> None:
        """Relay the call to its end: the answer's, the client's leaving, the engine's silence, or our own stop."""
        pump = self.relay.start_pump(self._pump())
        watch = asyncio.create_task(_client_gone(receive))
        try:
            end = await self._mind(pump, watch)
        except asyncio.CancelledError:
            end = "stopping"  # the server ends its last requests so; a client is owed an end that it can read
        finally:
            watch.cancel()
            if not pump.done():
                pump.cancel()
                await asyncio.wait((pump,))
        if end == "answered":
            pump.result()
        elif end == "gone":
            phase = "answering" if self.first_frame_at is not None else "waiting"
            self.relay.metrics.disconnects.labels(phase).inc()
            self.status = 499
        elif end == "silent":
            await self._fail(ApiError(504, "the engine was silent for too long.", code="engine_timeout"), "timeout")
        else:
            await self._fail(ApiError(503, "the server is stopping.", code="server_stopping"), "stopping")

    async def _mind(self, pump: asyncio.Task[None], watch: asyncio.Task[None]) -> str:
        """Look after both tasks until one of them, or the engine's silence, ends the exchange. Returns which."""
        while not pump.done():
            await asyncio.wait((pump, watch), timeout=self._patience(), return_when=asyncio.FIRST_COMPLETED)
            if self.finished:
                await pump
            elif pump.done():
                break
            elif watch.done():
                return "gone"
            elif perf_counter() >= self._deadline():
                return "silent"
            elif self._ping_is_due():
                await self._ping()
        return "answered"

    def _deadline(self) -> float:
        """When the engine's silence is too long. A plain answer's length shows only at its end: it has none."""
        gateway = self.relay.gateway
        if not self.call.stream:
            return math.inf
        begun = self.first_frame_at is not None
        return self.alive_at + (gateway.decode_timeout_s if begun else gateway.prefill_timeout_s)

    def _ping_is_due(self) -> bool:
        return self.call.stream and self.first_frame_at is None and perf_counter() >= self.next_ping_at

    def _patience(self) -> float | None:
        """Seconds until this exchange must look after its tasks again, None for never."""
        if not self.call.stream:
            return None
        now = perf_counter()
        until = min(self._deadline(), now + self.relay.gateway.decode_timeout_s)
        if self.first_frame_at is None:
            until = min(until, self.next_ping_at)
        return max(0.0, until - now)

    async def _ping(self) -> None:
        if not self.started:
            await self._start(200, [STREAM_TYPE, *STREAM_HEADERS])
        self.next_ping_at = perf_counter() + self.relay.gateway.heartbeat_after_s
        await self.send({"type": "http.response.body", "body": PING_FRAME, "more_body": True})

    async def _pump(self) -> None:
        try:
            await self._relay()
        except asyncio.CancelledError:
            # By now the engine's connection is closed, which is what stops it; the abort comes after.
            if not self.finished:
                self.relay.abort(self.call)
            raise
        except ApiError as error:
            await self._fail(error, "status")
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            await self._fail(ApiError(502, "the engine cannot be reached.", code="engine_unreachable"), "unreachable")
        except (aiohttp.ClientError, OSError) as error:
            logger.warning("arm %s: the engine's answer broke off: %r", self.whose[2], error)
            await self._fail(ApiError(502, "the engine's answer broke off.", code="engine_died"), "died")

    async def _relay(self) -> None:
        post = self.relay.session.post(self.url, data=self.call.body, headers=self.authorization, allow_redirects=False)
        async with post as response:
            if response.status != 200:
                raise engine_answered(response.status, await _read_error(response))
            if self.call.stream:
                await self._relay_stream(response)
            else:
                await self._relay_plain(response)

    async def _relay_stream(self, response: aiohttp.ClientResponse) -> None:
        frames, send, content = self.frames, self.send, response.content
        while not frames.done and (chunk := await content.readany()):
            block = frames.feed(chunk)
            if not block:
                self.alive_at = perf_counter()
                continue
            if self.first_frame_at is None:
                if frames.error is not None and PIECE not in block and not self.started:
                    raise engine_framed(frames.error)
                self.first_frame_at = perf_counter()
                if not self.started:
                    await self._start(200, [_content_type(response, STREAM_TYPE), *STREAM_HEADERS])
            self.alive_at = math.inf
            self.finished = frames.done
            await send({"type": "http.response.body", "body": block, "more_body": not frames.done})
            self.alive_at = perf_counter()
        await self._end_stream(response)

    async def _end_stream(self, response: aiohttp.ClientResponse) -> None:
        frames, metrics = self.frames, self.relay.metrics
        if frames.error is not None:
            metrics.stream_errors.labels("engine").inc()
            if not frames.done:
                await self._send_last(DONE_FRAME)
            return
        if not frames.done:
            await self._fail(ApiError(502, "the engine's answer ended early.", code="engine_died"), "truncated")
            return
        self._account(frames.usage, frames.details)
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                await response.content.readany()  # to its end, so that the connection can be used again
        except TimeoutError:
            response.close()

    async def _relay_plain(self, response: aiohttp.ClientResponse) -> None:
        raw = await response.read()
        try:
            answer = orjson.loads(raw)
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise ApiError(502, "the engine's answer is not a JSON object.", code="engine_died")
        details = details_of(answer)
        if details is not None and not self.call.wants_details:
            drop_details(answer)
            raw = orjson.dumps(answer)
        described = [_content_type(response, (b"content-type", b"application/json"))]
        self.first_frame_at = perf_counter()
        await self._start(200, [*described, (b"content-length", b"%d" % len(raw))])
        await self._send_last(raw)
        self._account(answer.get("usage"), details)

    def _account(self, usage: Any, details: Any) -> None:
        """Count a finished answer."""
        metrics = self.relay.metrics
        usage = usage if isinstance(usage, dict) else None
        metrics.add_usage(usage)
        metrics.add_speculation(details, self.whose)
        if not self.call.stream or self.first_frame_at is None:
            return
        metrics.ttft.labels(*self.whose).observe(self.first_frame_at - self.begun)
        tokens = (usage or {}).get("completion_tokens")
        if self.call.answers_one and isinstance(tokens, int) and tokens > 1:
            metrics.tpot.labels(*self.whose).observe((perf_counter() - self.first_frame_at) / (tokens - 1))

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": headers + self.headers})

    async def _send_last(self, body: bytes) -> None:
        self.finished = True
        await self.send({"type": "http.response.body", "body": body})

    async def _fail(self, error: ApiError, kind: str) -> None:
        """Tell the client: with a status where none was sent, else in the stream."""
        if self.finished:
            return
        if not self.started:
            self.started = self.finished = True
            self.status = error.status
            await send_error(self.send, error, self.headers)
            return
        self.relay.metrics.stream_errors.labels(kind).inc()
        await self._send_last(error.frame() + DONE_FRAME)


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_error(response: aiohttp.ClientResponse) -> bytes:
    body = b""
    while len(body) < ERROR_BODY_LIMIT and (chunk := await response.content.readany()):
        body += chunk
    return body


def authorization(key: str) -> dict[str, str]:
    """The header that carries `key`, none without one."""
    return {"authorization": f"Bearer {key}"} if key else {}


def _content_type(response: aiohttp.ClientResponse, otherwise: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    found = response.headers.get("content-type")
    return (b"content-type", found.encode("latin-1")) if found else otherwise


def _request_id(scope: Scope, rid: str) -> bytes:
    """The client's own id where it sent one that is safe in a header and a log, else ours."""
    theirs = dict(scope["headers"]).get(b"x-request-id", b"")
    return theirs if SANE_REQUEST_ID.fullmatch(theirs) else rid.encode()


def _reason(error: ApiError) -> str:
    return error.code or {405: "wrong_method"}.get(error.status, "invalid_request")
