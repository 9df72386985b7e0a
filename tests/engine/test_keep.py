"""A gateway that is exchanged under a real engine: the engine goes on, is taken over, and answers the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from server.keep import read_record
from server.ports import free_port
from tests.engine.profiles import profile_text

pytestmark = pytest.mark.engine
REPO = Path(__file__).parents[2]


class Gateway:
    """`server serve` on the profile, waited for until it is ready."""

    def __init__(self, folder: Path, profile: Path, name: str) -> None:
        port = free_port()
        self.url, self.err = f"http://127.0.0.1:{port}", folder / f"{name}.err"
        command = [sys.executable, "-m", "server", "serve", "--profile", str(profile), "--port", str(port)]
        environment = {**os.environ, "EYAS_HOME": str(folder / "home")}
        begun = time.monotonic()
        with self.err.open("wb") as err:
            self.process = subprocess.Popen(command, cwd=REPO, env=environment, stderr=err, stdout=err)
        while not self._ready():
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() - begun < 200, self.err.read_text()
            time.sleep(0.1)
        self.seconds = time.monotonic() - begun

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, model: str) -> tuple[str, list[int]]:
        body = {"model": model, "prompt": "the eagle", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        more = {"return_spec_tokens_details": True}
        answer = httpx.post(f"{self.url}/v1/completions", json={**body, **more}, timeout=60).json()
        return answer["choices"][0]["text"], answer["sglext"]["spec_tokens_details"]["spec_correct_drafts_histogram"]


def test_a_gateway_is_exchanged_and_the_engine_goes_on(tmp_path: Path, tiny: Callable[[str], Any]) -> None:
    pair = tiny("llama")
    profile = tmp_path / "profile.toml"
    text = profile_text(pair, 8, ()).replace("[engine]", '[engine]\non_gateway_exit = "keep"', 1)
    profile.write_text(f'default_drafter = "mha_perfect"\n{text}')
    first = Gateway(tmp_path, profile, "first")
    (file,) = (tmp_path / "home/runs/kept").glob("*.json")
    kept = read_record(file)
    assert kept
    family = [psutil.Process(kept.pid), *psutil.Process(kept.pid).children(recursive=True)]
    try:
        wanted = first.ask("tiny-llama")
        first.process.send_signal(signal.SIGKILL)  # no orderly end: a crash must not cost the engine either
        first.process.wait()
        time.sleep(1)
        assert read_record(file) == kept
        second = Gateway(tmp_path, profile, "second")
        assert "taking over the engine that runs" in second.err.read_text()
        assert second.ask("tiny-llama") == wanted
        assert second.seconds < first.seconds
        second.process.send_signal(signal.SIGTERM)
        assert second.process.wait(30) == 0
        assert read_record(file) == kept and all(each.is_running() for each in family)
    finally:
        os.kill(kept.pid, signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, "an engine that is told to end leaves nothing behind"
