"""A fake engine, and the gateway before it under a real uvicorn, each on a loopback port."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from server.app import create_app
from server.arms import Arm
from server.auth import KeyRing
from server.cli import main
from server.config import GatewayTable
from server.connection import Connection
from server.gateway import Gateway as Core
from tests.server.fake_engine import ADMIN_KEY, API_KEY, MODEL, FakeEngine, wait_until


class Gateway:
    """A running gateway: its arm, its address, and what it counts."""

    def __init__(self, arm: Arm, table: GatewayTable, *others: Arm, **told: Any) -> None:
        self.arm = arm
        self.core = Core(table, [arm, *others], version="0.0.test", **told)
        self.app = create_app(self.core)
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(self.app, http=Connection, ws="none", log_level="warning", timeout_graceful_shutdown=5)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)

    def start(self) -> Gateway:
        self.thread.start()
        wait_until(lambda: self.server.started)
        self.client = httpx.Client(base_url=self.url, timeout=30)
        return self

    def stop(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()

    def ask(self, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None, **body: Any) -> Any:
        """POST a request; the answer whole, also where it is a stream."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", **body}
        return self.client.post(path, json=body, headers=headers)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels, 0 where it has none."""
        total = 0.0
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    total += sample.value
        return total


@pytest.fixture
def fake() -> Iterator[FakeEngine]:
    engine = FakeEngine().start()
    yield engine
    engine.stop()


@pytest.fixture
def gateways(fake: FakeEngine) -> Iterator[Callable[..., Gateway]]:
    """Starts gateways before the fake, with changes to the gateway's table."""
    running = []

    def start(keys: KeyRing | None = None, **changes: Any) -> Gateway:
        arm = Arm("main", fake.url, API_KEY, ADMIN_KEY, MODEL, "little-eagle", state="ready")
        running.append(Gateway(arm, GatewayTable(**changes), keys=keys).start())
        return running[-1]

    yield start
    for each in running:
        each.stop()


@pytest.fixture
def gate(gateways: Callable[..., Gateway]) -> Gateway:
    return gateways()


@pytest.fixture(scope="module")
def shared_fake() -> Iterator[FakeEngine]:
    engine = FakeEngine().start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def shared_gate(shared_fake: FakeEngine) -> Iterator[Gateway]:
    """One gateway for all tests of a file that leave it as they found it, but for what it has counted and seen."""
    arm = Arm("main", shared_fake.url, API_KEY, ADMIN_KEY, MODEL, "little-eagle", state="ready", vocab_size=512)
    gateway = Gateway(arm, GatewayTable()).start()
    yield gateway
    gateway.stop()


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`python -m server` from the repository's folder, without the second that a process of its own takes."""

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(Path(__file__).parents[2])
        capsys.readouterr()
        try:
            code = main(list(argv))
        except SystemExit as end:  # argparse
            code = int(str(end.code))
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(argv, code, shown.out, shown.err)

    return run
