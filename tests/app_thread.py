"""How every fake engine serves: an aiohttp application on a port of its own, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self

from aiohttp import web


class AppThread:
    """Serves what `app` returns between `start` and `stop`; the system chooses the port of `url`."""

    url = ""
    _dying: asyncio.Task[None] | None = None

    def app(self) -> web.Application:
        raise NotImplementedError

    def start(self) -> Self:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self._run(self._up())
        return self

    def stop(self) -> None:
        self._run(self._down())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

    def die(self, request: web.Request) -> None:
        """From within the application, as a killed process would: this connection breaks, and no other is taken."""
        cut(request)
        self._dying = self.loop.create_task(self.runner.cleanup())

    async def _up(self) -> None:
        self.runner = web.AppRunner(self.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _down(self) -> None:
        await (self._dying or self.runner.cleanup())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(10)


def cut(request: web.Request) -> None:
    """Close the connection as a killed process would."""
    assert request.transport is not None
    request.transport.abort()
