"""Rules and scrape configuration by promtool, and what they name."""

import json
import re

import pytest
import yaml

from drafter.__main__ import main as drafter
from server import check_engine
from server.metrics import Metrics
from tests.deploy.tools import REPO, run

pytestmark = pytest.mark.ops

RULES = sorted((REPO / "deploy/prometheus/rules").glob("*.yml"))
RULE_TESTS = sorted((REPO / "deploy/prometheus").glob("*_test.yml"))
DASHBOARD = REPO / "deploy/grafana/dashboards/eyas.json"


def rules():
    return [rule for file in RULES for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}


def test_promtool_accepts_the_configuration():
    run("promtool", "check", "config", "deploy/prometheus/prometheus.yml")
    run("promtool", "check", "rules", *RULES)


def test_each_alert_fires_on_its_fault_and_not_without_it():
    run("promtool", "test", "rules", *RULE_TESTS)


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_is_tested_and_has_a_runbook(name):
    tests = [test for file in RULE_TESTS for test in yaml.safe_load(file.read_text())["tests"]]
    expected = [case["exp_alerts"] for test in tests for case in test["alert_rule_test"] if case["alertname"] == name]
    assert any(expected), f"no test sees {name} fire"
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert name in (REPO / rule["annotations"]["runbook"]).read_text()


def test_break_even_is_what_the_command_writes(tmp_path, capsys):
    shipped = (REPO / "deploy/prometheus/rules/break_even.yml").read_text()
    command = re.search(r"python -m drafter (.*) FILE", shipped).group(1).split()
    assert drafter([*command, str(tmp_path / "rules.yml")]) == 0
    assert (tmp_path / "rules.yml").read_text() == shipped


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--break-even-rules", "x.yml"], "are for one machine"),
        (["--machine", "8xb200", "--break-even-rules", "x.yml", "--num-steps", "40"], "no cycle of 40 draft steps"),
    ],
)
def test_rules_of_what_is_not_known(argv, reason, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert drafter(["speedup", *argv]) == 1
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def exported():
    """Every name that the gateway's /metrics or the engine's can have."""
    names = set()
    for metric in Metrics("x").registry.collect():
        names |= {metric.name, f"{metric.name}_total"}
        names |= {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
    return names | {need.what for need in check_engine.METRICS}


@pytest.mark.parametrize("file", [*RULES, DASHBOARD], ids=lambda file: file.name)
def test_every_metric_is_one_that_is_exported(file):
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    named = set(re.findall(r"\beyas_\w+|\b(?:sglang|eyas):[\w:]+", file.read_text()))
    assert named - exported() - recorded == set()


def test_the_dashboard():
    """The ids and the layout: that each query has data is seen in tests/engine/test_monitoring.py."""
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"], panel["title"]
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) <= variables | {"__rate_interval"}


def test_grafana_finds_the_dashboard_and_the_data():
    folder = REPO / "deploy/grafana/provisioning"
    (provider,) = yaml.safe_load((folder / "dashboards/eyas.yaml").read_text())["providers"]
    compose = yaml.safe_load((REPO / "deploy/compose.yaml").read_text())["services"]
    mounts = dict(mount.split(":")[:2] for mount in compose["grafana"]["volumes"])
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
