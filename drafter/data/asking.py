"""Asks an OpenAI endpoint of SGLang's: so many requests at a time, again after a pause where it is busy or away."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp

CONNECT_TIMEOUT_S, IDLE_TIMEOUT_S = 10.0, 900.0
AGAIN = (408, 425, 429, 500, 502, 503, 504)  # a restart or a full queue; all else is an answer
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
GIVE_UP_S = 600.0


class GenerateError(RuntimeError):
    """An endpoint that cannot write the conversations, in one sentence with the fix."""


class Refused(ValueError):
    """A request that the endpoint will not answer, however often it is asked: its text says what it answered."""


@dataclass(frozen=True)
class Endpoint:
    """Where to ask. `headers` carry the key, where there is one. give_up_s: how long one request is asked again."""

    url: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    give_up_s: float = GIVE_UP_S


class Asker:
    """Asks at most `concurrency` things at once. retries: how often something was asked again."""

    def __init__(self, endpoint: Endpoint, concurrency: int) -> None:
        self.endpoint = endpoint
        self.retries = 0
        self._turn = asyncio.Semaphore(concurrency)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=IDLE_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)

    async def __aenter__(self) -> Asker:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer as an object. Raises Refused, or GenerateError where nothing answers for `give_up_s`."""
        async with self._turn:
            begun, attempt = time.monotonic(), 0
            while True:
                said, wait = await self._once(route, body | {"model": self.endpoint.model})
                if isinstance(said, dict):
                    return said
                pause = max(wait, pause_s(attempt))
                if time.monotonic() - begun + pause > self.endpoint.give_up_s:
                    raise GenerateError(f"{said}: is the engine up? Run the same command again to go on.")
                attempt += 1
                self.retries += 1
                await asyncio.sleep(pause)

    async def _once(self, route: str, body: dict[str, Any]) -> tuple[dict[str, Any] | str, float]:
        """The answer; or why there is none, and how long the endpoint asks to be left alone. Raises Refused."""
        url = self.endpoint.url
        try:
            async with self._session.post(f"{url}{route}", json=body, headers=self.endpoint.headers) as response:
                if response.status == 200:
                    found: dict[str, Any] = json.loads(await response.read())
                    return found, 0.0
                said = f"{url}{route} answered {response.status}: {(await response.text()).strip()[:300]}"
                if response.status not in AGAIN:
                    raise Refused(said)
                wait = response.headers.get("retry-after", "")
                return said, min(float(wait), LONGEST_PAUSE_S) if wait.isdecimal() else 0.0
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"{url} does not answer ({error or type(error).__name__})", 0.0
        except ValueError as error:
            if isinstance(error, Refused):
                raise
            return f"{url}{route} answered no JSON ({error})", 0.0


def pause_s(attempt: int) -> float:
    """Seconds before asking again: twice as long each time, up to a minute, and half of it by chance, so that those
    who were turned away together do not come back together."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(attempt, 16)) * random.uniform(0.5, 1.0))
