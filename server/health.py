"""The health of remote arms: what a name stands for, which of its engines answer, and what they say of themselves."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import PurePath
from time import monotonic
from urllib.parse import urlsplit

import orjson

from server.arms import Arm, Arms
from server.enginekeys import authorization
from server.resolved import capacity_of
from server.upstream import Upstream, UpstreamError

logger = logging.getLogger(__name__)

PROBE_S = 2.0
PROBE_TIMEOUT_S = 5.0
RESOLVE_S = 10.0
UNKNOWN = "unknown"  # the drafter of an engine that neither the profile nor the engine itself has named
DOWN_AFTER = 3  # probes in a row without an answer

Resolve = Callable[[str, int], Awaitable[list[str]]]


async def addresses(host: str, port: int) -> list[str]:
    """All addresses of a name, sorted. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(each[4][0]) for each in found})


class RemoteArm:
    """All engines behind one URL. Over http a name with several addresses is several engines, each probed by itself;
    over https it is one, since its certificate is for the name."""

    def __init__(self, arms: Arms, arm: Arm, *, resolve: Resolve = addresses) -> None:
        self.arms = arms
        self.pattern = arm
        self.fixed_capacity = arm.capacity is not None
        self.unnamed_drafter = arm.drafter == UNKNOWN
        self.resolve = resolve
        self.members = {arm.url: arm}
        self.failures: dict[str, int] = {}
        self._resolve_at = 0.0

    async def watch(self, upstream: Upstream) -> None:
        """Look after the engines until cancelled."""
        while True:
            if monotonic() >= self._resolve_at:
                await self.refresh(partial(self.probe, upstream))
                self._resolve_at = monotonic() + RESOLVE_S
            await asyncio.gather(*(self.probe(upstream, arm) for arm in list(self.members.values())))
            self.arms.on_change()  # a breaker may have become half-open meanwhile
            await asyncio.sleep(PROBE_S)

    async def refresh(self, acquaint: Callable[[Arm], Awaitable[None]]) -> None:
        """Look the name up. Where that fails, what is known stays. New engines are asked whether they are ready before
        the old ones go: in between there would be none, and whoever waits would be turned away."""
        parts = urlsplit(self.pattern.url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        if parts.scheme == "https" or _is_address(host) or self.pattern.name not in self.arms.names:
            return  # one engine, as a shadow is, which has no share to divide
        try:
            found = await self.resolve(host, port)
        except (OSError, UnicodeError) as error:
            logger.warning("arm %s: %s cannot be looked up: %s", self.pattern.name, host, error)
            return
        urls = [f"http://{f'[{each}]' if ':' in each else each}:{port}" for each in found]
        if len(urls) == 1:
            urls = [self.pattern.url]  # the name, which its server may want to hear
        if not urls or set(urls) == set(self.members):
            return
        members = {url: self.members.get(url) or self._member(url) for url in urls}
        await asyncio.gather(*(acquaint(arm) for url, arm in members.items() if url not in self.members))
        weight = next(iter(self.members.values())).weight  # it may have been moved meanwhile
        for arm in members.values():
            arm.weight = weight
        self.members = members
        self.arms.replace(self.pattern.name, list(self.members.values()))
        logger.info("arm %s: %s is %s", self.pattern.name, host, ", ".join(found))

    async def probe(self, upstream: Upstream, arm: Arm) -> None:
        """Ask one engine whether it is ready; on its first yes, what it serves and how much at once."""
        problem = ""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                status, _ = await _get(upstream, arm, "/ready")
                if status != 200:
                    problem = f"the engine is not ready (it answers {status})"
            if not problem and arm.state != "ready":
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    problem = await self._acquaint(upstream, arm)
        except (TimeoutError, UpstreamError, ValueError) as error:
            problem = f"the engine cannot be reached ({type(error).__name__})"
        self._note(arm, problem)

    async def _acquaint(self, upstream: Upstream, arm: Arm) -> str:
        """Learn what the engine is. Returns what speaks against it."""
        status, body = await _get(upstream, arm, "/server_info")
        if status in (401, 403):
            return f"the engine refuses our key ({status}): correct engine_keys_file"
        said = orjson.loads(body) if status == 200 else {}
        found = said if isinstance(said, dict) else {}
        served = found.get("served_model_name")
        if served is not None and served != arm.served_name:
            return f"the engine serves {served!r}, not {arm.served_name!r}"
        if not self.fixed_capacity:
            arm.capacity = capacity_of(found)
        if self.unnamed_drafter and served is not None:
            arm.drafter = drafter_of(found)
        return ""

    def _note(self, arm: Arm, problem: str) -> None:
        before = arm.state
        if not problem:
            self.failures[arm.url] = 0
            if before != "ready":
                arm.state, arm.detail, arm.ready_since = "ready", "", monotonic()
        else:
            failures = self.failures[arm.url] = self.failures.get(arm.url, 0) + 1
            if before == "starting" or failures >= DOWN_AFTER:
                arm.state = "starting" if before == "starting" and failures < DOWN_AFTER else "down"
                arm.detail = problem
        if arm.state != before:
            logger.warning("arm %s at %s is %s%s", arm.name, arm.url, arm.state, f": {problem}" if problem else "")
            self.arms.on_change()

    def _member(self, url: str) -> Arm:
        pattern = self.pattern
        return Arm(
            pattern.name,
            url,
            pattern.api_key,
            pattern.admin_key,
            pattern.served_name,
            pattern.drafter,
            vocab_size=pattern.vocab_size,
            capacity=pattern.capacity if self.fixed_capacity else None,
            weight=next(iter(self.members.values())).weight,
        )


async def _get(upstream: Upstream, arm: Arm, path: str) -> tuple[int, bytes]:
    """An answer's status and body. Raises UpstreamError."""
    headers = authorization(arm.api_key)
    with await upstream.ask("GET", arm.url, path, headers) as answer:
        await answer.head()
        return answer.status, await answer.read()


def drafter_of(info: dict[str, object]) -> str:
    """The drafter by /server_info: its folder's name, or the algorithm of one without weights, or none."""
    path = info.get("speculative_draft_model_path")
    name = PurePath(path).name if isinstance(path, str) else str(info.get("speculative_algorithm") or "none").lower()
    return name if name.isprintable() else UNKNOWN  # it goes into a header of each answer


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
