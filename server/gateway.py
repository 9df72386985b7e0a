"""The gateway as one object: its arms, who may come in, what is counted, and how it changes while it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import Literal

from server.admission import Admission
from server.arms import Arm, Arms
from server.auth import AdminKey, KeyRing
from server.config import GatewayTable
from server.errors import RETRY_AFTER_LOADING_S, ApiError
from server.metrics import Metrics
from server.relay import Relay
from server.shadow import Shadow

logger = logging.getLogger(__name__)

SAY_EVERY_S = 5.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Gateway:
    """What both listeners serve. Its lifespan is `open` to `close`, in one event loop.

    table: the profile's [gateway]. members: the engines, whose states others keep up to date. keys, admin: who may come
    in, and who may change things; by default everybody and nobody.
    """

    def __init__(
        self,
        table: GatewayTable,
        members: Iterable[Arm],
        *,
        version: str,
        keys: KeyRing | None = None,
        admin: AdminKey | None = None,
        shadows: Iterable[Shadow] = (),
    ) -> None:
        self.table = table
        self.version = version
        self.admin = admin or AdminKey(None)
        self.arms = Arms(members, structured_plain=table.structured_without_speculation)
        self.shadows = list(shadows)
        self.metrics = Metrics(version)
        self.admission = Admission(
            keys or KeyRing(None, table.limits),
            capacity=self._capacity(),
            queue_limit=table.queue_limit,
            queue_timeout_s=table.queue_timeout_s,
            admin=self.admin,
            no_engine=self.arms.unavailable,
            measure=self._capacity,
        )
        self.relay = Relay(self.arms, self.admission, table, self.metrics)
        self.arms.on_change = self.refit
        self.metrics.watch(self.arms, self.admission)

    @property
    def metrics_in_public(self) -> bool:
        """Whether /metrics is on the public port too: while that is loopback alone."""
        return self.table.host in LOOPBACK

    async def open(self) -> None:
        await self.relay.open()
        for shadow in self.shadows:
            shadow.open(self.relay.upstream, self.metrics)
            self.arms.shadows.append(shadow)

    async def close(self) -> None:
        for shadow in self.shadows:
            await shadow.close()
        await self.relay.close()

    def refit(self) -> None:
        """Take up what the engines can do now. Call it in the event loop."""
        self.admission.resize(self._capacity())

    def readiness(self) -> tuple[Literal["ready", "starting", "down", "draining"], str]:
        """One word, and the reason where it is another than ready."""
        if self.admission.closed is not None:
            return "draining", "the server is stopping"
        if self.arms.ready:
            return "ready", ""
        error = self.arms.unavailable()
        return "starting" if error.code == "model_loading" else "down", error.message.rstrip(".")

    def change(self, table: GatewayTable, weights: Mapping[str, float]) -> None:
        """Other limits, keys and weights, all or nothing. Raises KeysError."""
        self.admission.keys.reload(table.limits)
        self.table = table
        self.admission.queue_limit, self.admission.queue_timeout_s = table.queue_limit, table.queue_timeout_s
        self.admission.adopt(self.admission.keys.callers)
        self.arms.set_weights(weights)
        self.refit()

    async def drain(self, limit_s: float, cut_short: asyncio.Event) -> bool:
        """Let nobody new in, and wait until nothing runs: at most `limit_s`, or until `cut_short`.

        Says on the log what it waits for. Returns whether all of it ended.
        """
        headers = {"retry-after": str(RETRY_AFTER_LOADING_S), "connection": "close"}
        self.admission.closed = ApiError(503, "the server is stopping.", code="server_stopping", headers=headers)
        deadline, say_at = monotonic() + limit_s, monotonic()
        while self.relay.running:
            now = monotonic()
            if now >= deadline or cut_short.is_set():
                logger.warning("stopping without %s", self._running_text())
                self.relay.stop_all()
                return False
            if now >= say_at:
                logger.warning("waiting for %s, %.0f s more at most", self._running_text(), deadline - now)
                say_at = now + SAY_EVERY_S
            await asyncio.sleep(0.05)
        return True

    def _running_text(self) -> str:
        running = self.relay.running
        oldest = max(running, key=lambda each: each.age_s)
        return (
            f"{len(running)} request{'s' * (len(running) != 1)} ({self.admission.waiting} in the queue; the oldest, "
            f"of key {oldest.call.key_id} on arm {oldest.arm.name if oldest.arm else 'none'}, for {oldest.age_s:.0f} s)"
        )

    def _capacity(self) -> int:
        capacity = self.arms.capacity
        return min(capacity, self.table.max_inflight) if self.table.max_inflight else capacity
