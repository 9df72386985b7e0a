"""A real Prometheus scrapes a real gateway and a real engine, with the rules and the dashboard that deploy/ ships."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from server.auth import add_key
from server.config import Limits
from server.ports import free_port
from tests.deploy.test_runbooks import RUNBOOKS, commands
from tests.deploy.tools import tool
from tests.engine.conftest import EnginePool
from tests.server.fake_engine import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.ops]

REPO = Path(__file__).parents[2]
DASHBOARD = json.loads((REPO / "deploy/grafana/dashboards/eyas.json").read_text())
QUERIES = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", [])] + [
    ("variable", "eyas_engine_up")
]
PATIENCE_S = 240
ADMIN_KEY = "the admin key of this test"
REQUESTS = [
    pytest.param(line, id=f"{file.stem}: {line[-60:]}")
    for file in RUNBOOKS
    for line, words in commands(file)
    if words[0] == "curl"
]


class Watched:
    """A Prometheus and what it scrapes. `ports`: where the ports of deploy/ are here."""

    def __init__(self, ports: dict[int, str], model: str, key: str, admin_key: str) -> None:
        self.ports, self.model, self.key, self.admin_key = ports, model, key, admin_key
        self.gateway, self.prometheus = f"http://127.0.0.1:{ports[8000]}", f"http://127.0.0.1:{ports[9090]}"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now."""
        asked = expression.replace("$__rate_interval", "1m").replace("$arm", ".*")
        answer = httpx.get(f"{self.prometheus}/api/v1/query", params={"query": asked}, timeout=30)
        assert answer.status_code == 200, f"{asked}: {answer.text}"
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return found

    def use(self, stop: threading.Event) -> None:
        """What clients do, until told to stop: whole answers, streams, nonsense, and leaving."""
        body = {"model": self.model, "messages": [{"role": "user", "content": "The eagle"}], "max_tokens": 24}
        headers = {"authorization": f"Bearer {self.key}"}
        with httpx.Client(base_url=self.gateway, timeout=60, headers=headers) as client:
            while not stop.is_set():
                client.post("/v1/chat/completions", json=body)
                client.post("/v1/chat/completions", json={**body, "stream": True})
                client.post("/v1/chat/completions", content=b"{")
                with client.stream(
                    "POST", "/v1/chat/completions", json={**body, "stream": True, "max_tokens": 600, "ignore_eos": True}
                ) as stream:
                    next(stream.iter_bytes())
                stop.wait(0.5)


@pytest.fixture(scope="module")
def watched(
    engines: EnginePool, tiny: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("monitoring")
    engine = engines.get(tiny("llama"), "mha_noised_a", num_steps=3)
    engine_port = engine.url.rpartition(":")[2]
    ports = {8000: str(free_port()), 8001: str(free_port()), 9090: str(free_port()), 30000: engine_port}
    profile = (REPO / "deploy/gateway/kimi-k2.5.toml").read_text()
    for shipped, here in (
        ('served_name = "kimi-k2.5"', f'served_name = "{engine.served_name}"'),
        ('host = "0.0.0.0"', 'host = "127.0.0.1"'),
        ("port = 8000", f"port = {ports[8000]}"),
        ("admin_port = 8001", f"admin_port = {ports[8001]}"),
        ("http://engine:30000", engine.url),
        ("/run/secrets/eyas/engine-keys.json", str(engine.key_file)),
        ("drain_timeout_s = 600.0", "drain_timeout_s = 5.0"),
    ):
        assert shipped in profile
        profile = profile.replace(shipped, here)
    (folder / "gateway.toml").write_text(profile)
    (folder / "admin-key").write_text(ADMIN_KEY)
    (folder / "admin-key").chmod(0o600)
    _, key = add_key(folder / "keys.json", "test", Limits())
    keys = {"EYAS_KEYS_FILE": f"{folder}/keys.json", "EYAS_ADMIN_KEY_FILE": f"{folder}/admin-key"}
    processes = []

    def start(*argv: object) -> None:
        words = [str(word) for word in argv]
        with (folder / "log").open("ab") as log:
            processes.append(subprocess.Popen(words, stdout=log, stderr=log, cwd=REPO, env={**os.environ, **keys}))

    start(sys.executable, "-m", "server", "serve", "--profile", folder / "gateway.toml")
    config = yaml.safe_load((REPO / "deploy/prometheus/prometheus.yml").read_text())
    # A scrape that takes longer than the interval fails, and the engine's takes over a second on a busy machine.
    config["global"] = {"scrape_interval": "5s", "evaluation_interval": "5s"}
    config["rule_files"] = [str(REPO / "deploy/prometheus/rules/*.yml")]
    at = {"eyas-gateway": f"127.0.0.1:{ports[8001]}", "eyas-engine": f"127.0.0.1:{ports[30000]}"}
    for job in config["scrape_configs"]:
        (found,) = job.pop("dns_sd_configs")
        assert found["port"] == {"eyas-gateway": 8001, "eyas-engine": 30000}[job["job_name"]]
        job["static_configs"] = [{"targets": [at[job["job_name"]]]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    start(
        *(tool("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
        *("--web.enable-lifecycle", f"--web.listen-address=127.0.0.1:{ports[9090]}"),
    )
    watched = Watched(ports, engine.served_name, key, ADMIN_KEY)
    stop = threading.Event()
    clients = threading.Thread(target=watched.use, args=(stop,), daemon=True)
    try:
        wait_until(lambda: _answers(f"{watched.gateway}/readyz"), timeout=90)
        wait_until(lambda: _answers(f"{watched.prometheus}/-/ready"), timeout=90)
        clients.start()
        yield watched
    finally:
        stop.set()
        clients.join(90)
        for process in reversed(processes):
            process.terminate()
            process.wait(60)
        print((folder / "log").read_text()[-4000:], file=sys.stderr)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def _data(samples: list[dict[str, Any]]) -> list[float]:
    return [number for sample in samples if not math.isnan(number := float(sample["value"][1]))]


def test_both_are_scraped(watched: Watched) -> None:
    wait_until(lambda: len(_data(watched.query("up == 1"))) == 2, timeout=60)
    assert {sample["metric"]["job"] for sample in watched.query("up")} == {"eyas-gateway", "eyas-engine"}


def test_every_query_of_the_dashboard_returns_data(watched: Watched) -> None:
    assert len(QUERIES) > 25
    missing, until = list(QUERIES), time.monotonic() + PATIENCE_S
    while missing and time.monotonic() < until:
        missing = [(title, query) for title, query in missing if not _data(watched.query(query))]
        time.sleep(2)
    assert not missing


def test_every_metric_of_the_rules_is_there(watched: Watched) -> None:
    """A rule over a metric that nobody exports would never fire."""
    text = "".join(file.read_text() for file in (REPO / "deploy/prometheus/rules").glob("*.yml"))
    named = set(re.findall(r"\b(?:eyas_\w+|sglang:\w+)\b", text))
    # These have no series before their first event.
    named -= {"eyas_stream_errors_total", "eyas_engine_restarts_total", "eyas_spec_unreported_requests_total"}
    named -= {"sglang:num_retracted_requests_total"}
    assert len(named) > 10
    wait_until(lambda: all(watched.query(f'{{__name__="{name}"}}') for name in named), timeout=60)


def test_every_rule_is_evaluated(watched: Watched) -> None:
    groups = httpx.get(f"{watched.prometheus}/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 30
    wait_until(lambda: not _unhealthy(watched), timeout=30)


def _unhealthy(watched: Watched) -> list[str]:
    groups = httpx.get(f"{watched.prometheus}/api/v1/rules").json()["data"]["groups"]
    return [
        f"{rule['name']}: {rule.get('lastError')}"
        for group in groups
        for rule in group["rules"]
        if rule["health"] != "ok"
    ]


def test_the_acceptance_length_is_the_gateways(watched: Watched) -> None:
    """What Prometheus computes over everything so far is what the counters say."""
    wait_until(lambda: bool(watched.query("eyas:acceptance_length:5m")), timeout=60)
    (sample,) = watched.query("eyas:acceptance_length:5m")
    assert sample["metric"]["arm"] == "engine"
    (whole,) = watched.query("1 + sum(eyas_spec_accepted_tokens_total) / sum(eyas_spec_verify_steps_total)")
    assert 1.2 < float(whole["value"][1]) < 3.9
    assert float(sample["value"][1]) == pytest.approx(float(whole["value"][1]), abs=0.35)


@pytest.mark.parametrize("line", REQUESTS)
def test_the_requests_of_the_runbooks(watched: Watched, line: str) -> None:
    for shipped, here in watched.ports.items():
        line = line.replace(f"127.0.0.1:{shipped}/", f"127.0.0.1:{here}/")
    line = line.replace("kimi-k2.5", watched.model)
    environment = {**os.environ, "EYAS_KEY": watched.key, "EYAS_ADMIN_KEY": watched.admin_key}
    shown = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment, timeout=60)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    if "/api/v1/query" in line:
        assert json.loads(shown.stdout)["data"]["result"], shown.stdout
    if "/weight" in line:  # what the runbook takes out, the next test needs
        back = line.replace('{"weight": 0}', '{"weight": 1}')
        subprocess.run(["bash", "-c", back], check=True, capture_output=True, env=environment, timeout=60)
