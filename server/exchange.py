"""One call and its answer: the pump (engine to client), beside it the watch (has the client left?) and a timer.

It pings a client that waits long, ends an engine's silence, stops the engine when its client leaves, and asks another
arm where one has failed before the answer's first byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import orjson
from starlette.types import Receive, Send

from server.admission import Ticket
from server.arms import Arm, Outcome
from server.call import Call
from server.enginekeys import authorization
from server.errors import DONE_FRAME, ApiError, Headers, engine_answered, engine_framed, reason, send_error
from server.sse import LEAK, PIECE, AnswerStream, details_of, drop_details
from server.upstream import Answer, Unreachable, UpstreamError

if TYPE_CHECKING:
    from server.relay import Relay

logger = logging.getLogger(__name__)

LAST_WORD_TIMEOUT_S = 1.0
ERROR_BODY_LIMIT = 64 * 1024
PING_FRAME = b": ping\n\n"
STREAM_HEADERS: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
SAID = ("content", "tool_calls", "reasoning_content")
STREAM_TYPE = (b"content-type", b"text/event-stream; charset=utf-8")

End = Literal["gone", "silent", "late", "unread", "stopping"]
ENDS = {
    "silent": (ApiError(504, "the engine was silent for too long.", code="engine_timeout"), "timeout"),
    "late": (ApiError(504, "the answer took longer than a request may.", code="request_timeout"), "deadline"),
    "unread": (ApiError(408, "the answer was not read for too long.", code="client_timeout"), "unread"),
    "stopping": (ApiError(503, "the server is stopping.", code="server_stopping"), "stopping"),
}


class Fault(Exception):
    """An attempt that failed: what the client is told, what the arm is charged with, how a broken stream is counted."""

    def __init__(self, error: ApiError, outcome: Outcome, kind: str) -> None:
        super().__init__(error.message)
        self.error = error
        self.outcome: Outcome = outcome
        self.kind = kind


class Exchange:
    """One call and its answer. `status` is what the client got: 499 where it left first, 500 where nothing was sent.

    arm: where the call was sent last, None before. tokens: what a finished answer used, prompt included; of a stream
    that was cut, its pieces, since the usage comes last.
    """

    def __init__(
        self, relay: Relay, call: Call, ticket: Ticket, send: Send, request_id: bytes, begun: float, read: float
    ) -> None:
        gateway = relay.gateway
        self.relay = relay
        self.call = call
        self.ticket = ticket
        self.send = send
        self.begun = begun
        self.read = read
        self.status = 500
        self.arm: Arm | None = None
        self.tokens = 0
        self.own_headers: Headers = [(b"x-request-id", request_id), *ticket.headers]
        self.headers = self.own_headers
        self.frames = AnswerStream(wants_usage=call.wants_usage, wants_details=call.wants_details)
        self.started = False  # the response's head went out
        self.finished = False  # and its last byte
        self.first_frame_at: float | None = None
        self.trace: dict[str, str] = {}  # headers that go on to the engine
        self.end: End | None = None  # why the pump was stopped
        self.pinging: asyncio.Task[None] | None = None
        self.late_at = begun + gateway.request_timeout_s
        # When the engine last gave a sign of life; infinite while it is somebody else that is waited for.
        self.alive_at = math.inf
        self.next_ping_at = math.inf
        self.stuck_since: tuple[float, int] | None = None  # and at which piece, while the client takes none

    @property
    def age_s(self) -> float:
        """Seconds since its head came in."""
        return perf_counter() - self.begun

    async def run(self, receive: Receive) -> None:
        """Relay the call to its end: the answer's, the client's leaving, too long a wait, or our own stop."""
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        watch = asyncio.create_task(self._watch(receive))
        self.timer = asyncio.get_running_loop().call_later(self._patience(perf_counter()), self._look)
        try:
            await self._pump()
        except asyncio.CancelledError:
            self.end = self.end or "stopping"  # the server ends its last requests so
            task.uncancel()
            await self._end_by(self.end)
        finally:
            watch.cancel()
            self.timer.cancel()
            self.tokens = self.tokens or self.frames.pieces

    def stop(self, end: End) -> None:
        """End this exchange for a reason that is not the answer's end."""
        if self.end is None and not self.finished:
            self.end = end
            self.task.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.stop("gone")

    def _look(self) -> None:
        """Called when something may be due: the deadline, the end of patience with a silent engine, a ping."""
        now = perf_counter()
        if now >= self.late_at:
            self.stop("late")
        elif now >= self._silent_at():
            self.stop("silent")
        elif self._unread(now):
            self.stop("unread")
        else:
            if now >= self.next_ping_at and self.first_frame_at is None:
                self.next_ping_at = now + self.relay.gateway.heartbeat_after_s
                self.pinging = asyncio.create_task(self._ping(self.pinging))
            self.timer = asyncio.get_running_loop().call_later(self._patience(now), self._look)

    def _patience(self, now: float) -> float:
        """Seconds until the next look."""
        gateway = self.relay.gateway
        if not self.call.stream:
            return self.late_at - now
        until = min(self.late_at, self._silent_at(), now + gateway.decode_timeout_s, now + gateway.unread_timeout_s)
        if self.first_frame_at is None:
            until = min(until, self.next_ping_at, now + gateway.heartbeat_after_s)
        return max(0.0, until - now)

    def _silent_at(self) -> float:
        """When the engine's silence is too long. A plain answer's length shows only at its end: it has the deadline."""
        gateway = self.relay.gateway
        if not self.call.stream:
            return math.inf
        begun = self.first_frame_at is not None
        return self.alive_at + (gateway.decode_timeout_s if begun else gateway.prefill_timeout_s)

    def _unread(self, now: float) -> bool:
        """Whether the client has taken nothing for too long, by two looks at least: it would keep its slot for ever."""
        sending = self.first_frame_at is not None and self.alive_at == math.inf
        if not sending:
            self.stuck_since = None
        elif self.stuck_since is None or self.stuck_since[1] != self.frames.pieces:
            self.stuck_since = (now, self.frames.pieces)
        else:
            return now - self.stuck_since[0] >= self.relay.gateway.unread_timeout_s
        return False

    async def _ping(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        if not self.started:
            await self._start(200, [STREAM_TYPE, *STREAM_HEADERS])
        await self.send({"type": "http.response.body", "body": PING_FRAME, "more_body": True})

    async def _end_by(self, end: End) -> None:
        """What becomes of the client whose exchange was stopped."""
        if end == "gone":
            phase = "answering" if self.first_frame_at is not None else "waiting"
            self.relay.metrics.disconnects.labels(phase).inc()
            self.status = 499
            return
        error, kind = ENDS[end]
        with contextlib.suppress(TimeoutError):  # a client that does not read is not waited for
            async with asyncio.timeout(LAST_WORD_TIMEOUT_S):
                await self._fail(error, kind)

    async def _pump(self) -> None:
        arms = self.relay.arms
        failed: list[Arm] = []
        try:
            waiting = perf_counter()
            await self.ticket.wait(self.call)
            self.waited_s = perf_counter() - waiting
            if self.ticket.queued_s:
                self.relay.metrics.queue_wait.observe(self.ticket.queued_s)
            arm: Arm | None = arms.choose(self.call)
        except ApiError as error:
            self.relay.metrics.rejected.labels(reason(error)).inc()
            await self._fail(error, "rejected")
            return
        while arm is not None:
            fault = await self._attempt(arm)
            if fault is None:
                return
            failed.append(arm)
            arm = None if self.started else arms.choose_again(self.call, failed, fault.outcome)
            if arm is None:
                await self._fail(fault.error, fault.kind)
            else:
                self.call.renew()

    async def _attempt(self, arm: Arm) -> Fault | None:
        """Send the call to `arm` and relay its answer; tell the arms how that ended. Returns what went wrong."""
        self._enter(arm)
        fault = None
        try:
            await self._relay(arm)
        except asyncio.CancelledError:
            # By now the engine's connection is closed, which is what stops it; the abort comes after.
            if not self.finished:
                self.relay.abort(self.call, arm)
            # Past the first frame, the deadline is the answer's length, or a client that reads slowly.
            hangs = self.end == "silent" or (self.end == "late" and self.first_frame_at is None)
            self.relay.arms.report(arm, "timeout" if hangs else "gone")
            raise
        except Fault as found:
            fault = found
        except Unreachable:
            error = ApiError(502, "the engine cannot be reached.", code="engine_unreachable")
            fault = Fault(error, "unreachable", "unreachable")
        except UpstreamError as found:
            logger.warning("arm %s: the engine's answer broke off: %s", arm.name, found)
            fault = Fault(ApiError(502, "the engine's answer broke off.", code="engine_died"), "died", "died")
        self.relay.arms.report(arm, fault.outcome if fault else "ok")
        return fault

    def _enter(self, arm: Arm) -> None:
        now = perf_counter()
        if self.arm is None:
            self.relay.metrics.overhead.observe(now - self.read - self.waited_s)
            self.next_ping_at = now + self.relay.gateway.heartbeat_after_s
        self.arm = arm
        self.alive_at = now
        self.counted = self.relay.metrics.of((arm.served_name, arm.drafter, arm.name))
        self.headers = [
            *self.own_headers,
            (b"x-eyas-arm", arm.name.encode("latin-1", "replace")),
            (b"x-eyas-drafter", arm.drafter.encode("latin-1", "replace")),
        ]

    async def _relay(self, arm: Arm) -> None:
        call, headers = self.call, authorization(arm.api_key) | self.trace
        with await self.relay.upstream.post(arm.url, call.path, headers, call.parts) as answer:
            await answer.head()
            if answer.status != 200:
                raise _refusal(engine_answered(answer.status, await _read_error(answer)))
            if call.stream:
                await self._relay_stream(arm, answer)
            else:
                await self._relay_plain(answer)

    async def _relay_stream(self, arm: Arm, answer: Answer) -> None:
        frames, send = self.frames, self.send
        while not frames.done and (chunk := await answer.chunk()):
            block = frames.feed(chunk)
            if not block:
                self.alive_at = perf_counter()
                continue
            if self.first_frame_at is None:
                if self.pinging is not None:
                    await self.pinging
                if frames.error is not None and PIECE not in block and not self.started:
                    raise _refusal(engine_framed(frames.error))
                self.first_frame_at = perf_counter()
                self.relay.arms.began(arm)
                self.call.forget()
                if not self.started:
                    await self._start(200, [_content_type(answer, STREAM_TYPE), *STREAM_HEADERS])
            self.alive_at = math.inf
            self.finished = frames.done
            await send({"type": "http.response.body", "body": block, "more_body": not frames.done})
            self.alive_at = perf_counter()
        await self._end_stream(answer)

    async def _end_stream(self, answer: Answer) -> None:
        frames, metrics = self.frames, self.relay.metrics
        if frames.error is not None:
            metrics.stream_errors.labels("engine").inc()
            if not frames.done:
                await self._send_last(DONE_FRAME)
            raise _refusal(engine_framed(frames.error))
        if not frames.done:
            raise Fault(ApiError(502, "the engine's answer ended early.", code="engine_died"), "died", "truncated")
        # Of each answer of a chat come a piece with the role and one with the finish; between them, what it says.
        empty = self.call.chat and frames.pieces <= 2 * self.call.answers
        self._flag(empty=empty, leaked=frames.leaked)
        self._account(frames.usage, frames.details)
        answer.drain()

    async def _relay_plain(self, answer: Answer) -> None:
        raw = await answer.read()
        try:
            document = orjson.loads(raw)
        except orjson.JSONDecodeError:
            document = None
        if not isinstance(document, dict):
            raise Fault(
                ApiError(502, "the engine's answer is not a JSON object.", code="engine_died"), "died", "status"
            )
        details = details_of(document)
        if details is not None and not self.call.wants_details:
            drop_details(document)
            raw = orjson.dumps(document)
        described = [_content_type(answer, (b"content-type", b"application/json"))]
        self.first_frame_at = perf_counter()
        await self._start(200, [*described, (b"content-length", b"%d" % len(raw))])
        await self._send_last(raw)
        empty = self.call.chat and any(_says_nothing(choice) for choice in document.get("choices") or ())
        self._flag(empty=empty, leaked=LEAK in raw)
        self._account(document.get("usage"), details)

    def _flag(self, *, empty: bool, leaked: bool) -> None:
        """Count what parsers of tool calls and of thoughts are known to do. The answer is passed on all the same."""
        if empty:
            self.counted.empty_answers.inc()
        if leaked:
            self.counted.leaked_tool_tokens.inc()

    def _account(self, usage: Any, details: Any) -> None:
        """Count a finished answer."""
        usage = usage if isinstance(usage, dict) else None
        self.relay.metrics.add_usage(usage, self.ticket.key_id)
        self.counted.add_speculation(details)
        total = (usage or {}).get("total_tokens")
        self.tokens = total if isinstance(total, int) else 0
        if not self.call.stream or self.first_frame_at is None:
            return
        self.counted.ttft.observe(self.first_frame_at - self.begun)
        tokens = (usage or {}).get("completion_tokens")
        if self.call.answers_one and isinstance(tokens, int) and tokens > 1:
            self.counted.tpot.observe((perf_counter() - self.first_frame_at) / (tokens - 1))

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": [*headers, *self.headers]})

    async def _send_last(self, body: bytes) -> None:
        self.finished = True
        await self.send({"type": "http.response.body", "body": body})

    async def _fail(self, error: ApiError, kind: str) -> None:
        """Tell the client: with a status where none was sent, else in the stream."""
        if self.finished:
            return
        if self.pinging is not None:
            await self.pinging
        if not self.started:
            self.started = self.finished = True
            self.status = error.status
            await send_error(self.send, error, self.headers)
            return
        self.relay.metrics.stream_errors.labels(kind).inc()
        await self._send_last(error.frame() + DONE_FRAME)


def _says_nothing(choice: Any) -> bool:
    held = choice.get("message") if isinstance(choice, dict) else None
    return isinstance(held, dict) and not any(held.get(name) for name in SAID)


async def _read_error(answer: Answer) -> bytes:
    body = b""
    while len(body) < ERROR_BODY_LIMIT and (chunk := await answer.chunk()):
        body += chunk
    return body


def _content_type(answer: Answer, otherwise: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    return (b"content-type", answer.content_type) if answer.content_type else otherwise


def _refusal(error: ApiError) -> Fault:
    """The engine's own error, by what it says of the arm."""
    if error.status in (429, 503):
        return Fault(error, "busy", "status")
    return Fault(error, "error" if error.status >= 500 else "refused", "status")
