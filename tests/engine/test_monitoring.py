"""A real Prometheus scrapes a real gateway and a real engine, with the rules and the dashboard that deploy/ ships."""

from __future__ import annotations

import json
import math
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

from server.engine import free_port
from tests.deploy.tools import tool
from tests.engine.conftest import EnginePool
from tests.server.fake_engine import wait_until

pytestmark = pytest.mark.engine

REPO = Path(__file__).parents[2]
DASHBOARD = json.loads((REPO / "deploy/grafana/dashboards/eyas.json").read_text())
QUERIES = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", [])] + [
    ("variable", "eyas_engine_up")
]
PATIENCE_S = 240


class Watched:
    """A Prometheus and what it scrapes."""

    def __init__(self, prometheus: str, gateway: str, model: str) -> None:
        self.prometheus, self.gateway, self.model = prometheus, gateway, model

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
        with httpx.Client(base_url=self.gateway, timeout=60) as client:
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
    port, prometheus_port = free_port(), free_port()
    processes = []

    def start(*argv: object) -> None:
        with (folder / "log").open("ab") as log:
            processes.append(subprocess.Popen([str(word) for word in argv], stdout=log, stderr=log, cwd=REPO))

    start(
        *(sys.executable, "-m", "server", "serve", "--profile", engine.profile.source, "--port", port),
        *("--engine-url", engine.url, "--engine-keys", engine.key_file),
    )
    config = yaml.safe_load((REPO / "deploy/prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(REPO / "deploy/prometheus/rules/*.yml")]
    at = {"eyas-gateway": f"127.0.0.1:{port + 1}", "eyas-engine": engine.url.removeprefix("http://")}
    for job in config["scrape_configs"]:
        (found,) = job.pop("dns_sd_configs")
        assert found["port"] == {"eyas-gateway": 8001, "eyas-engine": 30000}[job["job_name"]]
        job["static_configs"] = [{"targets": [at[job["job_name"]]]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    start(
        *(tool("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
        f"--web.listen-address=127.0.0.1:{prometheus_port}",
    )
    watched = Watched(f"http://127.0.0.1:{prometheus_port}", f"http://127.0.0.1:{port}", engine.served_name)
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
    assert sample["metric"]["arm"] == "default"
    (whole,) = watched.query("1 + sum(eyas_spec_accepted_tokens_total) / sum(eyas_spec_verify_steps_total)")
    assert 1.2 < float(whole["value"][1]) < 3.9
    assert float(sample["value"][1]) == pytest.approx(float(whole["value"][1]), abs=0.35)
