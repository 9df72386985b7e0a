"""Compose and the images: by the specification's schema, by hadolint, and by what they must not do."""

import copy
import json
import re

import jsonschema
import pytest
import yaml

from server.cli import parser
from server.config import load_profile
from tests.deploy.tools import REPO, run

pytestmark = pytest.mark.ops

COMPOSE = yaml.safe_load((REPO / "deploy/compose.yaml").read_text())
SCHEMA = json.loads((REPO / "tests/deploy/schemas/compose-spec.json").read_text())
DOCKERFILES = sorted((REPO / "deploy/docker").glob("Dockerfile.*"))


def refused(document):
    return list(jsonschema.Draft7Validator(SCHEMA).iter_errors(document))


def test_compose_is_as_specified():
    assert refused(COMPOSE) == []


@pytest.mark.parametrize(
    "change",
    [
        {"restart": 3},
        {"port": ["8000:8000"]},
        {"secrets": [{"sources": "x"}]},
        {"healthcheck": {"cmd": "x"}},
        {"volumes": [{"type": 1}]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_schema_sees_what_is_wrong(change):
    broken = copy.deepcopy(COMPOSE)
    broken["services"]["gateway"].update(change)
    assert refused(broken)


def test_only_loopback_is_published():
    for name, service in COMPOSE["services"].items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name
    assert "ports" not in COMPOSE["services"]["engine"]
    assert COMPOSE["services"]["engine"]["networks"] == ["inside"] and COMPOSE["networks"]["inside"]["internal"]


def test_secrets_are_files():
    text = (REPO / "deploy/compose.yaml").read_text()
    for name, secret in COMPOSE["secrets"].items():
        assert secret["file"].startswith("./secrets/"), name
    for service in COMPOSE["services"].values():
        for source in service.get("secrets", []):
            assert (source if isinstance(source, str) else source["source"]) in COMPOSE["secrets"]
        for variable, value in service.get("environment", {}).items():
            assert ("KEY" not in variable and "PASSWORD" not in variable) or value.startswith("/run/secrets/")
    assert "deploy/secrets/" in (REPO / ".gitignore").read_text().split()
    assert not re.search(r"--?(api-)?key[ =]", text)


def test_what_is_mounted_is_there():
    for service in COMPOSE["services"].values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert source in COMPOSE["volumes"] or (REPO / "deploy" / source).exists(), mount


def plain(words):
    """Words of a command with the defaults of their ${VARIABLE:-default}."""
    return [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in words]


def test_the_engines_command_is_one():
    arguments = parser().parse_args(plain(COMPOSE["services"]["engine"]["command"]))
    assert arguments.command == "engine" and arguments.host == "0.0.0.0" and arguments.port == 30000
    assert load_profile(REPO / arguments.profile).engine.tp == 8
    target = COMPOSE["services"]["engine"]["secrets"][0]["target"]
    assert str(arguments.keys) == target == load_profile(GATEWAY).arms["engine"].engine_keys_file


GATEWAY = REPO / "deploy/gateway/kimi-k2.5.toml"


def test_the_gateways_profile():
    profile = load_profile(GATEWAY)
    engine = load_profile(REPO / "deploy/profiles/kimi-k2.5-nvfp4-8xb200.toml")
    assert profile.target.served_name == engine.target.served_name and profile.target.path == engine.target.path
    assert profile.engine.context_length == engine.engine.context_length
    assert profile.engine.max_running_requests == engine.engine.max_running_requests
    assert profile.arms["engine"].url == "http://engine:30000" and "engine" in COMPOSE["services"]
    grace = COMPOSE["services"]["gateway"]["stop_grace_period"]
    assert int(grace.removesuffix("m")) * 60 > profile.gateway.drain_timeout_s
    jobs = yaml.safe_load((REPO / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    ports = {job["job_name"]: job["dns_sd_configs"][0]["port"] for job in jobs}
    assert ports == {"eyas-gateway": profile.gateway.admin_port, "eyas-engine": 30000}


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_hadolint_has_nothing_to_say(file):
    run("hadolint", file)


def instructions(file):
    text = re.sub(r"\\\n", " ", "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#")))
    return [line.split(None, 1) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_what_an_image_copies_is_there_and_sent(file):
    allowed = [line[1:] for line in (REPO / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for word, rest in instructions(file):
        if word != "COPY" or rest.startswith("--from"):
            continue
        *sources, _ = rest.split()
        for source in sources:
            assert list(REPO.glob(source)), source
            assert any(source == entry or source.startswith(f"{entry}/") for entry in allowed), source


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_the_command_of_an_image_is_one(file):
    found = {word: rest for word, rest in instructions(file) if word in ("ENTRYPOINT", "CMD")}
    assert json.loads(found["ENTRYPOINT"])[1:] == ["-m", "server"]
    arguments = parser().parse_args(json.loads(found["CMD"]))
    assert list(REPO.glob(f"deploy/*/{arguments.profile.name}"))


def test_the_gateways_image_has_no_torch():
    text = (REPO / "deploy/docker/Dockerfile.gateway").read_text()
    assert "[engine]" not in text and "[drafter]" not in text and "USER 10001" in text


def test_the_engines_image_checks_its_engine():
    text = (REPO / "deploy/docker/Dockerfile.engine").read_text()
    assert "-m server check-engine" in text and "ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23" in text
