"""The units, by systemd's own verifier, and what their commands and times are."""

import re
import shlex
import subprocess
import sys

import pytest

from server.cli import parser
from server.config import load_profile
from tests.deploy.tools import REPO, run, tool

pytestmark = pytest.mark.ops

UNITS = sorted((REPO / "deploy/systemd").glob("*.service"))
PYTHON = "/opt/eyas/bin/python"


def setting(unit, name):
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)


def seconds(text):
    number, unit = re.fullmatch(r"(\d+)(s|min|h)", text).groups()
    return int(number) * {"s": 1, "min": 60, "h": 3600}[unit]


@pytest.fixture
def here(tmp_path):
    """The units with a Python that exists on this machine, which the verifier looks for."""
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace(PYTHON, sys.executable))
    return tmp_path


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_it(here, unit):
    assert run("systemd-analyze", "verify", "--man=no", here / unit.name) == ""


def test_the_verifier_sees_what_is_wrong(here):
    unit = here / UNITS[0].name
    unit.write_text(unit.read_text().replace("TimeoutStopSec=60s", "TimeoutStopSec=soon"))
    shown = subprocess.run([tool("systemd-analyze"), "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert "Failed to parse time value" in shown.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_its_command_is_one(unit):
    (line,) = setting(unit, "ExecStart")
    words = shlex.split(line.replace("${CREDENTIALS_DIRECTORY}", "/run/credentials"))
    assert words[:3] == [PYTHON, "-m", "server"]
    parser().parse_args(words[3:])
    credentials = {word.rpartition("/")[2] for word in words if word.startswith("/run/credentials")}
    assert credentials <= {given.partition(":")[0] for given in setting(unit, "LoadCredential")}
    assert setting(unit, "Type") == ["notify"] and setting(unit, "Restart")


def test_the_engine_has_time():
    engine = REPO / "deploy/systemd/eyas-engine.service"
    (limit,) = setting(engine, "TimeoutStartSec")
    for profile in (REPO / "deploy/profiles").glob("kimi-*.toml"):
        assert seconds(limit) > load_profile(profile).engine.start_timeout_s + 600


def test_the_gateway_may_drain():
    gateway = REPO / "deploy/systemd/eyas-gateway.service"
    (limit,) = setting(gateway, "TimeoutStopSec")
    assert seconds(limit) > load_profile(REPO / "deploy/gateway/kimi-k2.5.toml").gateway.drain_timeout_s
