"""What kustomize makes of deploy/k8s, by Kubernetes' own schemas, and whether its parts mean each other."""

import copy
import json
import subprocess

import jsonschema
import pytest
import yaml

from server.cli import parser
from server.config import load_profile
from tests.deploy.tools import REPO, run, tool

pytestmark = pytest.mark.ops

OVERLAYS = ("one-node", "two-nodes")
OWN = {"LeaderWorkerSet": "leaderworkerset", "ServiceMonitor": "servicemonitor"}
VERSIONS = ("1.30", "1.37")
COMPONENT = "app.kubernetes.io/component"


def built(overlay):
    return list(yaml.safe_load_all(run("kubectl", "kustomize", f"deploy/k8s/{overlay}")))


@pytest.fixture(scope="module")
def made():
    return {overlay: built(overlay) for overlay in OVERLAYS}


def strict(schema):
    """A custom resource's schema that also refuses what it does not name, as the API server's strict mode does."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(part) for key, part in schema.items()}
    named = isinstance(made.get("properties"), dict) and made.get("type") == "object"
    if named and "additionalProperties" not in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = False
    return made


def refused(document, version, tmp_path):
    """Why a document is refused; empty where it is fine."""
    if document["kind"] in OWN:
        schema = strict(json.loads((REPO / f"tests/deploy/schemas/{OWN[document['kind']]}.json").read_text()))
        return "\n".join(error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(document))
    file = tmp_path / "document.yaml"
    file.write_text(yaml.safe_dump(document))
    shown = subprocess.run(
        [tool("kubernetes-validate"), "-k", version, "--strict", "--quiet", str(file)], capture_output=True, text=True
    )
    return shown.stdout + shown.stderr if shown.returncode or "WARN" in shown.stdout + shown.stderr else ""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_resource_is_as_its_schema_says(made, overlay, version, tmp_path):
    others = [document for document in made[overlay] if document["kind"] not in OWN]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(others))
    shown = run("kubernetes-validate", "-k", version, "--strict", tmp_path / "all.yaml")
    assert shown.count(" passed for resource ") == len(others) >= 15, shown
    for document in made[overlay]:
        if document["kind"] in OWN:
            assert refused(document, version, tmp_path) == ""


def put(document, path, value):
    """A copy with another value at a path."""
    changed = copy.deepcopy(document)
    *way, last = path
    at = changed
    for step in way:
        at = at[step]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return changed


POD = ("spec", "template", "spec", "containers", 0)
GROUP = ("spec", "leaderWorkerTemplate")
BROKEN = {
    "a misspelt field": ("one-node", "Deployment", (*POD, "readynessProbe"), {}),
    "replicas in words": ("one-node", "Deployment", ("spec", "replicas"), "two"),
    "no selector": ("one-node", "Deployment", ("spec", "selector"), None),
    "a port that is text": ("one-node", "Deployment", (*POD, "ports", 0, "containerPort"), "http"),
    "a strategy of another kind": ("one-node", "StatefulSet", ("spec", "updateStrategy"), {"rolling": {}}),
    "a probe without a port": ("one-node", "StatefulSet", (*POD, "startupProbe", "httpGet"), {"path": "/ready"}),
    "an unknown policy key": ("one-node", "NetworkPolicy", ("spec", "ingres"), []),
    "a budget in a list": ("one-node", "PodDisruptionBudget", ("spec", "minAvailable"), [1]),
    "an unknown group key": ("two-nodes", "LeaderWorkerSet", (*GROUP, "sizes"), 2),
    "a group's size in words": ("two-nodes", "LeaderWorkerSet", (*GROUP, "size"), "two"),
    "no worker": ("two-nodes", "LeaderWorkerSet", (*GROUP, "workerTemplate"), None),
    "an endpoint key": ("one-node", "ServiceMonitor", ("spec", "endpoints", 0, "every"), "15s"),
}


@pytest.mark.parametrize(("overlay", "kind", "path", "value"), BROKEN.values(), ids=BROKEN)
def test_the_schemas_see_what_is_wrong(made, tmp_path, overlay, kind, path, value):
    document = next(each for each in made[overlay] if each["kind"] == kind)
    assert refused(put(document, path, value), VERSIONS[-1], tmp_path)


def pods(documents):
    """(owner's name, pod template) of everything that makes pods."""
    for document in documents:
        spec = document.get("spec", {})
        if document["kind"] in ("Deployment", "StatefulSet"):
            yield document["metadata"]["name"], spec["template"]
        elif document["kind"] == "LeaderWorkerSet":
            group = spec["leaderWorkerTemplate"]
            yield "engine/leader", group["leaderTemplate"]
            yield "engine/worker", group["workerTemplate"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_its_parts_mean_each_other(made, overlay):
    documents = made[overlay]
    named = {(each["kind"], each["metadata"]["name"]) for each in documents}
    templates = dict(pods(documents))
    labels = [template["metadata"]["labels"] for template in templates.values()]

    def selects(selector):
        return [each for each in labels if selector.items() <= each.items()]

    for document in documents:
        assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == "eyas"
        if document["kind"] == "Service":
            assert len(selects(document["spec"]["selector"])) == 1, document["metadata"]["name"]
        if document["kind"] == "NetworkPolicy":
            assert selects(document["spec"]["podSelector"]["matchLabels"])
    for owner, template in templates.items():
        for volume in template["spec"]["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in named, owner
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in named, owner


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_commands_are_those_of_the_command_line(made, overlay):
    documents = {(each["kind"], each["metadata"]["name"]): each for each in made[overlay]}
    for owner, template in pods(made[overlay]):
        (container,) = template["spec"]["containers"]
        words = [word.replace("$(LWS_WORKER_INDEX)", "1") for word in container["args"]]
        arguments = parser().parse_args(words)
        (profiles,) = [each["configMap"]["name"] for each in template["spec"]["volumes"] if "configMap" in each]
        assert arguments.profile.name in documents["ConfigMap", profiles]["data"], owner
        ports = {port["containerPort"] for port in container["ports"]}
        assert ports == ({8000, 8001} if owner == "gateway" else {arguments.port})


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_engine_has_an_hour_and_a_gateway_drains(made, overlay):
    for owner, template in pods(made[overlay]):
        (container,) = template["spec"]["containers"]
        probe = container["startupProbe"]
        if owner != "gateway":
            assert probe["periodSeconds"] * probe["failureThreshold"] >= 3600
            assert probe["httpGet"]["path"] == ("/health" if owner == "engine/worker" else "/ready")
            assert "livenessProbe" not in container
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert {"/var/lib/eyas/drafters", "/models", "/dev/shm"} <= mounts
            continue
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
        drain = load_profile(REPO / "deploy/gateway/kimi-k2.5.toml").gateway.drain_timeout_s
        settle = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert template["spec"]["terminationGracePeriodSeconds"] > drain + settle


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_the_gateway_and_prometheus_reach_the_engine(made, overlay):
    policies = [each for each in made[overlay] if each["kind"] == "NetworkPolicy"]
    engine = [each for each in policies if each["spec"]["podSelector"]["matchLabels"].get(COMPONENT) == "engine"]
    assert len(engine) == 1
    sources = [peer for rule in engine[0]["spec"]["ingress"] for peer in rule["from"]]
    components = sorted(peer["podSelector"]["matchLabels"].get(COMPONENT, "prometheus") for peer in sources)
    assert components == ["engine", "gateway", "prometheus"]
    closed = [each for each in policies if "ingress" not in each["spec"]]
    assert [each["spec"]["podSelector"]["matchLabels"] for each in closed] == [{"app.kubernetes.io/name": "eyas"}]
