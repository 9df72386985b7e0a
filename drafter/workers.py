"""Some coroutines at a time: what every client of an engine sends its requests with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine


async def run_workers(work: Callable[[], Coroutine[None, None, None]], count: int) -> None:
    """Run `work` `count` times at once until all are done; where one fails the others are ended and its error rises."""
    workers = [asyncio.create_task(work()) for _ in range(count)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
