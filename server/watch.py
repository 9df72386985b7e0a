"""Whether an engine that runs still makes tokens: its process, its own metrics, and in doubt one more token."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Literal

import httpx

from server.process import EngineProcess

WATCH_S = 2.0
PROBE_TIMEOUT_S = 30.0  # /health_generate itself gives up after 20 s


def watch(
    url: str,
    process: EngineProcess,
    hang_timeout_s: float,
    stopping: threading.Event,
) -> tuple[Literal["dead", "hung"], str] | None:
    """Block until `stopping` is set (None), the process died, or requests run and no token comes: which, and how."""
    seen, since = -1.0, time.monotonic()
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while not stopping.wait(min(WATCH_S, hang_timeout_s / 4)):
            if (code := process.poll()) is not None:
                return "dead", f"the engine died (exit code {code})"
            running, tokens = _activity(client, url)
            if running == 0 or tokens != seen:
                seen, since = tokens, time.monotonic()
            elif time.monotonic() - since > hang_timeout_s and not _answers(client, url):
                return "hung", f"{running:.0f} requests ran for {hang_timeout_s:.0f} s without a token"
    return None


def _activity(client: httpx.Client, url: str) -> tuple[float, float]:
    """(requests that run, tokens computed so far), from the engine's own metrics.

    An engine whose HTTP side does not answer counts as one that runs something and makes nothing.
    """
    try:
        text = client.get(f"{url}/metrics").text
    except httpx.TransportError:
        return 1.0, -1.0
    running = tokens = 0.0
    for line in text.splitlines():
        if line.startswith("sglang:num_running_reqs{"):
            running += float(line.rpartition(" ")[2])
        elif line.startswith("sglang:realtime_tokens_total{"):
            tokens += float(line.rpartition(" ")[2])
    return running, tokens


def _answers(client: httpx.Client, url: str) -> bool:
    """Whether the engine still generates: the last word before it is called hung."""
    with contextlib.suppress(httpx.TransportError):
        return client.get(f"{url}/health_generate", timeout=PROBE_TIMEOUT_S).status_code == httpx.codes.OK
    return False
