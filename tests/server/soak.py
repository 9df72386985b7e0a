"""A soak of the whole gateway, as a process of its own before a fake engine that errs, stalls, dies and comes back.

    python -m tests.server.soak --requests 10000

A third of the clients leave at random moments, 500 streams run at once, the engine is restarted twice. Then: no task,
socket or slot is left, the engine runs nothing, each request was accounted once, and memory has not grown.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from server.ports import free_port
from tests.server.fake_engine import ADMIN_KEY, API_KEY, MODEL, FakeEngine

REPO = Path(__file__).parents[2]
ADMIN = "an-admin-key-for-the-soak"
PROFILE = f"""
[target]
path = "/nowhere"
served_name = "{MODEL}"
[engine]
device = "cpu"
context_length = 64
max_running_requests = 1
[gateway]
log_format = "json"
max_inflight = 400
queue_limit = 300
[arms.far]
url = "URL"
engine_keys_file = "engine.json"
"""
# What the fake engine does, by the request's `user`; the last two end only when their client leaves.
MANNERS = (*[""] * 12, "slow", "slow", "flat_error", "error_frame", "dies", "dies_at_once", "queue_full", "truncated")
ENDLESS = ("hangs", "endless")
TOGETHER = 500


class Soak:
    """One run. `checks` holds what must be true at its end, by name."""

    def __init__(self, folder: Path, requests: int, seed: int) -> None:
        self.folder = folder
        self.requests = requests
        self.dice = random.Random(seed)
        self.statuses: collections.Counter[str] = collections.Counter()
        self.answered: list[str] = []
        self.sent = 0
        self.rss: list[tuple[int, int]] = []
        self.checks: dict[str, bool] = {}
        self.figures: dict[str, Any] = {}
        logging.getLogger("aiohttp.server").setLevel("CRITICAL")  # the fake's, of clients that have left
        self.fake = FakeEngine().start()
        self.fake.delay = 0.05
        port = free_port()
        self.url, self.admin = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"
        (folder / "profile.toml").write_text(PROFILE.replace("URL", self.fake.url))
        (folder / "engine.json").write_text(json.dumps({"api-key": API_KEY, "admin-api-key": ADMIN_KEY}))
        (folder / "admin.key").write_text(ADMIN)
        (folder / "admin.key").chmod(0o600)
        environment = {**os.environ, "EYAS_HOME": str(folder), "EYAS_ADMIN_KEY_FILE": str(folder / "admin.key")}
        command = [sys.executable, "-m", "server", "serve", "--profile", str(folder / "profile.toml")]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen([*command, "--port", str(port)], cwd=REPO, env=environment, stderr=log)
        self.gateway = psutil.Process(self.process.pid)

    def run(self) -> None:
        """All of it. The gateway and the fake are stopped at the end."""
        try:
            self._wait_until(self._ready)
            asyncio.run(self._some(50))
            self._wait_until(self._idle)
            time.sleep(4)
            before = self._state()
            asyncio.run(self._load())
            self._wait_until(self._idle)
            time.sleep(4)  # the pool's idle connections to the engine are closed after 3 s
            self._check(before, self._state())
        finally:
            self.process.send_signal(signal.SIGTERM)
            self.figures["exit_code"] = self.process.wait(30)
            self.fake.stop()
        self._check_log()

    async def _load(self) -> None:
        restarts = {self.requests // 3, 2 * self.requests // 3}
        first = min(1000, self.requests // 4)
        while self.sent < self.requests:
            await self._some(min(100, self.requests - self.sent))
            if self.sent >= first and not self.rss:
                await self._streams_together()  # the most that will ever be held is held once before the first reading
                self.rss.append((self.sent, self.gateway.memory_info().rss))
            if restarts and self.sent >= min(restarts):
                restarts.remove(min(restarts))
                running = asyncio.create_task(self._some(60))
                await asyncio.sleep(0.1)
                await asyncio.to_thread(self.fake.stop_listening)
                await asyncio.sleep(0.3)
                await asyncio.to_thread(self.fake.listen_again)
                await running
                await asyncio.to_thread(self._wait_until, self._ready)
        await self._streams_together()
        self.rss.append((self.sent, self.gateway.memory_info().rss))

    async def _some(self, count: int, *, together: bool = False) -> None:
        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(_sent)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.url, connector=connector, trace_configs=[trace]) as session:
            await asyncio.gather(*(self._one(session, together=together) for _ in range(count)))

    async def _streams_together(self) -> None:
        await asyncio.to_thread(self._wait_until, self._ready)
        await self._some(TOGETHER, together=True)

    async def _one(self, session: aiohttp.ClientSession, *, together: bool) -> None:
        dice, self.sent = self.dice, self.sent + 1
        leaves = dice.random() < 1 / 3
        user = "slow" if together else dice.choice((*MANNERS, *ENDLESS) if leaves else MANNERS)
        body: dict[str, Any] = {"model": MODEL, "prompt": "x" * dice.randrange(2000), "user": user}
        body["stream"] = together or user in ENDLESS or dice.random() < 0.5
        sent = asyncio.Event()
        asked = asyncio.create_task(self._ask(session, body, f"soak-{self.sent}", sent))
        if leaves:
            early = dice.random() < 0.1  # perhaps before it was sent
            if not early:
                await asyncio.wait((asked, asyncio.create_task(sent.wait())), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(dice.choice((0.0, 0.005, 0.02, 0.1)) * dice.random())
            asked.cancel()
        try:
            await asked
        except asyncio.CancelledError:
            self.statuses["left"] += 1
        except aiohttp.ClientError as error:
            self.statuses[type(error).__name__] += 1

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any], name: str, sent: asyncio.Event) -> None:
        headers = {"x-request-id": name}
        async with session.post("/v1/completions", json=body, headers=headers, trace_request_ctx=sent) as answer:
            text = await answer.read()
            self.statuses[str(answer.status)] += 1
            self.answered.append(name)
            if body["stream"] and answer.status == 200:
                assert text.endswith(b"data: [DONE]\n\n"), "a stream that was cut short without a word"

    def _state(self) -> dict[str, Any]:
        status = httpx.get(f"{self.admin}/admin/status", headers={"authorization": f"Bearer {ADMIN}"}).json()
        sockets = [each for each in self.gateway.net_connections() if each.status == psutil.CONN_ESTABLISHED]
        return {
            "slots": status["slots_in_use"],
            "waiting": status["waiting"],
            "arm": status["arms"][0]["inflight"],
            "tasks": status["tasks"],
            "sockets": len(sockets),
            "descriptors": self.gateway.num_fds(),
        }

    def _idle(self) -> bool:
        state = self._state()
        return not (state["slots"] or state["waiting"] or state["arm"])

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def _wait_until(self, holds: Any, within: float = 60.0) -> None:
        deadline = time.monotonic() + within
        while not holds():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the gateway did not come to rest: {self._state()}")
            time.sleep(0.1)

    def _check(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        running = [seen for seen in self.fake.requests if not seen.finished and seen.closed_at is None]
        (at_first, first), (at_last, last) = self.rss
        growth = last / first - 1
        self.figures |= {"before": before, "after": after, "sent": self.sent, "statuses": dict(self.statuses)}
        self.figures |= {"rss_mb": [round(first / 2**20, 1), round(last / 2**20, 1)], "rss_growth": round(growth, 4)}
        self.figures |= {"rss_after": [at_first, at_last], "engine_still_runs": len(running)}
        self.checks["no slot is held"] = after["slots"] == after["waiting"] == after["arm"] == 0
        self.checks["no task is left"] = after["tasks"] <= before["tasks"] + 1
        self.checks["no socket is left"] = after["descriptors"] <= before["descriptors"] + 2
        self.checks["the engine runs nothing"] = not running
        self.checks["memory grew by at most 10 %"] = growth <= 0.10
        self.counted = 0
        for family in text_string_to_metric_families(httpx.get(f"{self.admin}/metrics").text):
            for sample in family.samples:
                if sample.name == "eyas_requests_total":
                    self.counted += int(sample.value)

    def _check_log(self) -> None:
        lines = [json.loads(line) for line in (self.folder / "log").read_text().splitlines() if line.startswith("{")]
        told = collections.Counter(line["request_id"] for line in lines if line["logger"] == "eyas.requests")
        self.figures |= {"counted": self.counted, "logged": sum(told.values())}
        self.checks["each request is logged once"] = set(told.values()) == {1}
        self.checks["each answered request is logged"] = set(self.answered) <= set(told)
        self.checks["as many are counted as logged"] = self.counted == sum(told.values())
        self.checks["it ended well"] = self.figures["exit_code"] == 0
        self.checks["no traceback"] = "Traceback" not in (self.folder / "log").read_text()


async def _sent(_: aiohttp.ClientSession, context: Any, __: Any) -> None:
    context.trace_request_ctx.set()


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.server.soak", description=__doc__)
    arguments.add_argument("--requests", type=int, default=10_000)
    arguments.add_argument("--seed", type=int, default=1)
    told = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), told.requests, told.seed)
        soak.run()
        print(json.dumps({**soak.figures, "checks": soak.checks}, indent=1))
        if not all(soak.checks.values()):
            print(
                "\n".join(line for line in (Path(folder) / "log").read_text().splitlines() if '"info"' not in line)[
                    -3000:
                ]
            )
    return 0 if all(soak.checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
