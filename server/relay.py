"""The hot routes: one raw ASGI callable, which reads a request, admits it, and hands it to an exchange.

It owns what all exchanges share: the connections to the engines, and the aborts that outlive their requests.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection
from time import perf_counter

import orjson
from starlette.types import Receive, Scope, Send

from server.admission import Admission, Ticket
from server.arms import Arm, Arms
from server.call import ROUTES, Call, ClientGone, new_rid, read_body, read_call
from server.config import GatewayTable
from server.enginekeys import authorization
from server.errors import ApiError, reason, send_error
from server.exchange import Exchange
from server.logs import log_answered, log_refused, requests
from server.metrics import Metrics
from server.tracing import Tracing
from server.upstream import Upstream, UpstreamError

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 5.0
TRACE_PARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
TRACE_STATE = re.compile(rb"[ -~]{1,512}")
SANE_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Relay:
    """The ASGI callable of the hot routes, and what all its requests share. Open it before the first request."""

    def __init__(self, arms: Arms, admission: Admission, gateway: GatewayTable, metrics: Metrics) -> None:
        self.arms = arms
        self.admission = admission
        self.gateway = gateway
        self.metrics = metrics
        self.tracing: Tracing | None = None
        self._exchanges: set[Exchange] = set()
        metrics.inflight.set_function(lambda: len(self._exchanges))
        self._aborts: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Open the connections' pool in the running loop."""
        self.upstream = Upstream(self.gateway.connect_timeout_s)

    async def close(self) -> None:
        """Give up what still runs, tell the engine so, and close the pool."""
        tasks = {exchange.task for exchange in self._exchanges}
        self.stop_all()
        if tasks:
            await asyncio.wait(tasks)
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=ABORT_TIMEOUT_S)
        self.upstream.close()

    def stop_all(self) -> None:
        """End what still runs: each client is told."""
        for exchange in list(self._exchanges):
            exchange.stop("stopping")

    @property
    def running(self) -> Collection[Exchange]:
        """The calls that are not over."""
        return self._exchanges

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = perf_counter()
        path = scope["path"]
        rid = new_rid()
        heads = dict(scope["headers"])
        request_id = _request_id(heads, rid)
        ticket = None
        try:
            if scope["method"] != "POST":
                raise ApiError(405, f"{path} takes POST, not {scope['method']}.", headers={"allow": "POST"})
            ticket = self.admission.admit(scope)
            raw = await read_body(heads, receive, self.gateway.max_body_bytes, self.gateway.body_timeout_s)
            read = perf_counter()
            call = read_call(path, raw, rid, self.arms.served_name, self.arms.vocab_size)
            call.key_id, call.arm_wish = ticket.key_id, ticket.arm_wish
        except ClientGone:
            self._leave(ticket, 0)
            self.metrics.disconnects.labels("body").inc()
            self.count(path, 499, None)
            if not requests.disabled:
                log_refused(path, 499, request_id, ticket.key_id if ticket else None, None)
            return
        except ApiError as error:
            self._leave(ticket, 0)
            self.metrics.rejected.labels(reason(error)).inc()
            self.count(path, error.status, None)
            if not requests.disabled:
                log_refused(path, error.status, request_id, ticket.key_id if ticket else None, error.code)
            await send_error(send, error, [(b"x-request-id", request_id)])
            return
        exchange = Exchange(self, call, ticket, send, request_id, begun, read)
        exchange.trace = _trace(heads)
        self._exchanges.add(exchange)
        span = self.tracing.begin(exchange) if self.tracing else None
        try:
            await exchange.run(receive)
        finally:
            if span:
                span.end(exchange)
            self._exchanges.discard(exchange)
            self._leave(ticket, exchange.tokens)
            self.count(path, exchange.status, exchange.arm)
            if not requests.disabled:
                log_answered(exchange, request_id)

    def _leave(self, ticket: Ticket | None, tokens: int) -> None:
        if ticket is not None:
            ticket.release(tokens)

    def abort(self, call: Call, arm: Arm) -> None:
        """Tell the engine of `arm` to stop `call`, whatever becomes of the request's own task.

        The second measure only: the first is that the engine's connection has been closed.
        """
        if not call.abort_ids:
            self.metrics.aborts.labels("no_id").inc()
            return
        task = asyncio.create_task(self._abort(call.abort_ids, arm))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, ids: list[str], arm: Arm) -> None:
        result = "ok"
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                for rid in ids:
                    body = [orjson.dumps({"rid": rid})]
                    headers = authorization(arm.admin_key)
                    with await self.upstream.post(arm.url, "/abort_request", headers, body) as answer:
                        await answer.read()
                        if answer.status != 200:
                            result = "refused"
        except TimeoutError:
            result = "timeout"
        except UpstreamError:
            result = "failed"
        if result != "ok":
            logger.warning("arm %s: abort of request %s: %s", arm.name, ids[0], result)
        self.metrics.aborts.labels(result).inc()

    def count(self, path: str, status: int, arm: Arm | None) -> None:
        """Count a request that is over; `arm` is where it was sent, None where no arm saw it."""
        self.metrics.requests.labels(ROUTES[path], str(status), arm.name if arm else "none").inc()


def _request_id(heads: dict[bytes, bytes], rid: str) -> bytes:
    """The client's own id where it sent one that is safe in a header and a log, else ours."""
    theirs = heads.get(b"x-request-id", b"")
    return theirs if SANE_REQUEST_ID.fullmatch(theirs) else rid.encode()


def _trace(heads: dict[bytes, bytes]) -> dict[str, str]:
    """The W3C trace context that goes on to the engine, where the client sent a sane one."""
    parent = heads.get(b"traceparent")
    if parent is None or not TRACE_PARENT.fullmatch(parent):
        return {}
    found = {"traceparent": parent.decode()}
    state = heads.get(b"tracestate", b"")
    if TRACE_STATE.fullmatch(state):
        found["tracestate"] = state.decode()
    return found
