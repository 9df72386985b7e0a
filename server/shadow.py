"""A shadow arm: it gets copies of some requests, its answers are read for their statistics and never returned.

Its load is bounded twice, by a share of the requests and by how many run at once; what is over is let go.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson

from server.arms import Arm
from server.call import Call, new_rid
from server.enginekeys import authorization
from server.metrics import Metrics
from server.sse import AnswerStream, details_of
from server.upstream import Answer, Upstream, UpstreamError

logger = logging.getLogger(__name__)

TIMEOUT_S = 600.0
CLOSE_S = 5.0


class Shadow:
    """`arm` shadows the others: `share` of the requests, at most `max_inflight` at once."""

    def __init__(self, arm: Arm, share: float, max_inflight: int) -> None:
        self.arm = arm
        self.share = share
        self.max_inflight = max_inflight
        self._due = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, upstream: Upstream, metrics: Metrics) -> None:
        """Ask through `upstream` from now on."""
        self.upstream = upstream
        self.metrics = metrics

    async def close(self) -> None:
        """Give up what runs."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)

    def offer(self, call: Call) -> None:
        """Copy `call` if it is this one's turn and there is room. Never raises, never waits."""
        self._due += self.share
        if self._due < 1:
            return
        self._due -= 1
        if self.arm.state != "ready" or len(self._tasks) >= self.max_inflight:
            self._count("skipped")
            return
        rid = new_rid()
        body = call.body.replace(call.rid.encode(), rid.encode())
        task = asyncio.create_task(self._ask(call.path, body, stream=call.stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, path: str, body: bytes, *, stream: bool) -> None:
        headers = authorization(self.arm.api_key)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                with await self.upstream.post(self.arm.url, path, headers, [body]) as answer:
                    await answer.head()
                    details = await (_streamed(answer) if stream else _plain(answer))
                    status = answer.status
        except (TimeoutError, UpstreamError, ValueError) as error:
            logger.warning("shadow arm %s: %r", self.arm.name, error)
            self._count("failed")
            return
        if status == 200:
            whose = (self.arm.served_name, self.arm.drafter, self.arm.name)
            self.metrics.of(whose).add_speculation(details)
        self._count("ok" if status == 200 else "refused")

    def _count(self, result: str) -> None:
        self.metrics.shadow_requests.labels(self.arm.name, result).inc()


async def _plain(answer: Answer) -> Any:
    document = orjson.loads(await answer.read())
    return details_of(document) if isinstance(document, dict) else None


async def _streamed(answer: Answer) -> Any:
    frames = AnswerStream(wants_usage=False, wants_details=False)
    while not frames.done and (chunk := await answer.chunk()):
        frames.feed(chunk)
    return frames.details
