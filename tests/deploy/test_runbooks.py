"""Every command in the runbooks, against the command line that would run it; none is passed over unread.

The requests to gateway, engine and Prometheus are sent for real in tests/engine/test_monitoring.py.
"""

import json
import re
import shlex
import shutil
import subprocess
from functools import cache

import pytest
import yaml

import bench.accept_len
import bench.gate
import drafter.__main__
import server.cli
from tests.deploy.tools import OPS, REPO, run, tool

pytestmark = pytest.mark.ops

RUNBOOKS = sorted((REPO / "deploy/runbooks").glob("*.md"))
# Tools of a GPU machine or an operator's laptop, which need not be on this one: exactly these words are known.
ELSEWHERE = {
    "nvidia-smi topo -m",
    "nvidia-smi --query-gpu=index,memory.used --format=csv",
    "nvidia-smi --query-gpu=index,memory.used,memory.total --format=csv",
    "iostat -x 5 3",
    "py-spy dump --pid 12345",
}
PARSERS = {
    ("-m", "server"): server.cli.parser,
    ("-m", "drafter"): drafter.__main__.parser,
    ("bench/accept_len.py",): bench.accept_len.parser,
    ("-m", "bench.gate"): bench.gate.parser,
}
PROFILES = {"/etc/eyas/engine.toml", "/etc/eyas/gateway.toml"}


def commands(file):
    """(line, words) of each command in the fenced blocks of a runbook."""
    for block in re.findall(r"^```sh\n(.*?)^```", file.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.strip():
                yield line, shlex.split(line.partition(" > ")[0])


ALL = [pytest.param(words, id=f"{file.stem}: {line[:60]}") for file in RUNBOOKS for line, words in commands(file)]


@cache
def help_of(*command):
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return shown.stdout + shown.stderr


def has_flags(help_text, words):
    """The long and short flags of a command that its own help does not name."""
    known = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", help_text))
    given = {word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)}
    return given - known


def check_python(words):
    for prefix, parser in PARSERS.items():
        if tuple(words[1 : 1 + len(prefix)]) == prefix:
            arguments = parser().parse_args(words[1 + len(prefix) :])  # SystemExit is a failure
            profile = getattr(arguments, "profile", None)
            assert profile is None or str(profile) in PROFILES or (REPO / profile).is_file(), profile
            return
    assert words[1:3] in (["-m", "pip"], ["-m", "zipfile"]), "no command of this project"
    text = help_of(tool("python3"), *words[1:4] if words[2] == "pip" else words[1:3])
    assert has_flags(text, words[3:]) == set()


def check_pip(words):
    assert words[0] == "/opt/eyas/bin/pip"
    assert has_flags(help_of("python3", "-m", "pip", words[1]), words[2:]) == set()


def check_kubectl(words):
    rest, namespace = words[1:], None
    if rest[0] == "--namespace":
        namespace, rest = rest[1], rest[2:]
    assert namespace in (None, "eyas")
    verbs = [rest[0]]
    if rest[0] in ("create", "set", "rollout"):
        verbs = rest[: 3 if rest[:2] == ["create", "secret"] else 2]
    text = help_of(tool("kubectl"), *verbs) + help_of(tool("kubectl"), "options")
    assert "Usage:" in text
    assert has_flags(text.replace("options\n", ""), [w for w in rest if w not in verbs]) <= options_of_all()
    names = made()
    for word in rest:
        kind, slash, name = word.partition("/")
        if slash and kind in ("deployment", "statefulset"):
            assert (kind, name) in names, word
        if word.startswith("deploy/k8s/"):
            assert (REPO / word / "kustomization.yaml").is_file()


@cache
def options_of_all():
    text = subprocess.run([tool("kubectl"), "options"], capture_output=True, text=True).stdout
    return set(re.findall(r"--[a-z][a-z-]*", text))


@cache
def made():
    documents = yaml.safe_load_all(run("kubectl", "kustomize", "deploy/k8s/one-node"))
    return {(each["kind"].lower(), each["metadata"]["name"]) for each in documents}


def check_systemd(words):
    assert has_flags(help_of(tool(words[0])), words[1:]) == set()
    verbs = set(re.findall(r"^  ([a-z][a-z-]+)", help_of(tool(words[0])), re.MULTILINE))
    if words[0] == "systemctl":
        verb = next(word for word in words[1:] if not word.startswith("-"))
        assert verb in verbs
    for word in words:
        if word.endswith(".service"):
            assert (REPO / "deploy/systemd" / word).is_file()


def check_docker(words):
    if words[1] == "build":
        assert has_flags(help_of(tool("docker"), "build"), words[2:]) == set()
        assert (REPO / words[words.index("-f") + 1]).is_file()
        return
    assert words[1:3] == ["compose", "-f"] and (REPO / words[3]).is_file()
    services = yaml.safe_load((REPO / words[3]).read_text())["services"]
    # The plugin is on few machines: podman-compose reads the same command line.
    program = "import sys; from podman_compose import podman_compose as p; print(p._parse_args(sys.argv[1:]))"
    tool("podman-compose")
    shown = subprocess.run([OPS / "python", "-c", program, *words[2:]], capture_output=True, text=True, cwd=REPO)
    assert shown.returncode == 0, shown.stderr
    named = [word for word in words[5:] if not word.startswith("-") and not word.isdecimal()]
    assert set(named) <= set(services)


def check_curl(words):
    text = subprocess.run([tool("curl"), "--help", "all"], capture_output=True, text=True).stdout
    assert has_flags(text, words[1:]) == set()
    assert [word for word in words if word.startswith("http://127.0.0.1:")]
    for at, word in enumerate(words):
        if word == "-d":
            json.loads(words[at + 1])


def check_plain(words):
    assert shutil.which(words[0]), f"{words[0]} is not on this machine, and not among ELSEWHERE"
    assert has_flags(help_of(words[0]), words[1:]) <= {"-hex", "-m", "-p", "-h"}
    for word in words[1:]:
        if word.startswith("deploy/") and not word.startswith("deploy/secrets"):
            assert (REPO / word).exists(), word


CHECKS = {
    "python": check_python,
    "/opt/eyas/bin/pip": check_pip,
    "kubectl": check_kubectl,
    "systemctl": check_systemd,
    "journalctl": check_systemd,
    "docker": check_docker,
    "curl": check_curl,
    "promtool": lambda words: run("promtool", *words[1:]),
    **dict.fromkeys(("mkdir", "chmod", "chown", "cp", "install", "df", "openssl", "pgrep"), check_plain),
}


@pytest.mark.parametrize("words", ALL)
def test_each_command_is_one(words):
    if " ".join(words) in ELSEWHERE:
        return
    assert words[0] in CHECKS, f"nobody knows what {words[0]} is: add how to check it"
    CHECKS[words[0]](words)


@pytest.mark.parametrize(
    "line",
    [
        "python -m server serves --profile deploy/profiles/cpu-smollm2.toml",
        "python -m server plan --profile deploy/profiles/none.toml",
        "python -m drafter preflights X",
        "python -m http.server",
        "kubectl --namespace eyas rollout status deployment/gate",
        "kubectl --namespace eyas logs --tails=3 statefulset/engine",
        "systemctl restarts eyas-engine.service",
        "systemctl restart eyas-engines.service",
        "docker compose -f deploy/compose.yaml restart engines",
        "docker compose -f deploy/compose.yaml up --detached",
        "curl --fails http://127.0.0.1:8000/readyz",
        "promtool check rules deploy/prometheus/none.yml",
        "cp --preserves a b",
        "nvidia-smi --reset",
    ],
)
def test_a_wrong_command_is_seen(line):
    words = shlex.split(line)
    with pytest.raises((AssertionError, SystemExit)):
        assert " ".join(words) in ELSEWHERE or words[0] in CHECKS
        CHECKS[words[0]](words)


def test_there_is_one_for_each_case():
    names = {file.stem for file in RUNBOOKS}
    assert names == {
        "first-start",
        "slow-load",
        "drafter-change",
        "acceptance-drop",
        "out-of-memory",
        "hang",
        "gateway-upgrade",
        "sglang-upgrade",
    }
    assert len(ALL) > 80


@pytest.mark.parametrize("file", RUNBOOKS, ids=lambda file: file.stem)
def test_links_and_alerts_are_there(file):
    text = file.read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (file.parent / target).is_file(), target
    rules = "".join(each.read_text() for each in (REPO / "deploy/prometheus/rules").glob("*.yml"))
    for alert in re.findall(r"`(Eyas[A-Z]\w+)`", text):
        assert f"alert: {alert}\n" in rules
