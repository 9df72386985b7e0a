"""A gateway and an engine as two processes that share a key file, and systemd."""

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from server.cli import main
from server.enginekeys import KeyFileError, read_keys, write_new_keys
from server.health import drafter_of
from server.ports import free_port
from tests.server.fake_engine import wait_until
from tests.server.test_engine import PROFILE
from tests.server.test_serve import Served

REPO = Path(__file__).parents[2]


@pytest.fixture
def home(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "profile.toml").write_text(PROFILE)
    write_new_keys(tmp_path / "keys.json")
    return tmp_path


@pytest.fixture
def start(home):
    """Starts `python -m server …` in a folder of its own."""
    started = []

    def start(command, *argv, **options):
        folder = home / f"run-{len(started)}"
        folder.mkdir()
        started.append(Served(folder, command, "--profile", str(home / "profile.toml"), *map(str, argv), **options))
        return started[-1]

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.terminate()
            served.process.wait(30)


def responds(url):
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def test_a_gateway_before_an_engine_of_another_process(start, home):
    port, engine_port, keys = free_port(), free_port(), home / "keys.json"
    remote = f"http://127.0.0.1:{engine_port}"
    gateway = start("serve", "--port", port, "--engine-url", remote, "--engine-keys", keys)
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: responds(f"{url}/healthz"), timeout=60)
    assert httpx.get(f"{url}/healthz").status_code == 200
    waiting = httpx.get(f"{url}/readyz")
    assert waiting.status_code == 503 and waiting.json()["reason"]

    engine = start("engine", "--port", engine_port, "--host", "127.0.0.1", "--keys", keys).wait_for(
        "engine ready", within=60
    )
    wait_until(lambda: httpx.get(f"{url}/readyz").status_code == 200, timeout=30)
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200 and answer.headers["x-eyas-drafter"] == "none"

    engine.process.terminate()
    engine.process.wait(30)
    wait_until(lambda: httpx.get(f"{url}/readyz").status_code == 503, timeout=30)
    assert 'eyas_engine_up{arm="default"} 0.0' in httpx.get(f"http://127.0.0.1:{port + 1}/metrics").text
    gateway.process.terminate()
    assert gateway.process.wait(60) == 0
    assert "Traceback" not in gateway.text + engine.text
    for key in json.loads(keys.read_text()).values():
        assert key not in gateway.text + engine.text


def test_a_key_file_is_private_and_never_overwritten(tmp_path, capsys):
    file = tmp_path / "keys.json"
    assert main(["engine-keys", str(file)]) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    keys = read_keys(file)
    assert len(keys.api) == len(keys.admin) == 48 and keys.api != keys.admin
    assert keys.api not in repr(keys)
    assert main(["engine-keys", str(file)]) == 1
    assert "is there already" in capsys.readouterr().err
    assert read_keys(file) == keys
    assert main(["engine-keys", str(tmp_path / "no" / "folder")]) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"api-key": ""}', '{"api-key": 7}'])
def test_a_file_without_a_key(tmp_path, content):
    (tmp_path / "keys.json").write_text(content)
    with pytest.raises(KeyFileError, match=r"key file .*keys\.json"):
        read_keys(tmp_path / "keys.json")


@pytest.mark.parametrize("abstract", [False, True])
@pytest.mark.parametrize("command", ["serve", "engine", "remote"])
def test_systemd_is_told(start, home, command, abstract):
    address = f"\0eyas-test-{os.getpid()}" if abstract else str(home / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(address)
        told.settimeout(120)
        argv = ["--port", free_port()]
        if command == "remote":
            argv += ["--engine-url", "http://127.0.0.1:9"]
        served = start("engine" if command == "engine" else "serve", *argv, NOTIFY_SOCKET=address.replace("\0", "@"))
        lines = []
        while "READY=1" not in lines:
            lines += told.recv(4096).decode().split("\n")
        if command != "remote":
            assert "STATUS=starting the process" in lines
        served.process.terminate()
        while "STOPPING=1" not in lines:
            lines += told.recv(4096).decode().split("\n")
        served.process.wait(30)


def test_a_systemd_that_has_gone_is_told(home, tmp_path):
    """Better a unit that fails than one that waits an hour for a word that cannot come."""
    argv = [sys.executable, "-c", "from server.notify import notify; notify('READY=1')"]
    environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "nobody")}
    shown = subprocess.run(argv, cwd=REPO, env=environment, capture_output=True, text=True)
    assert (shown.returncode == 1 and "OSError" in shown.stderr) or "FileNotFoundError" in shown.stderr


@pytest.mark.parametrize(
    ("said", "drafter"),
    [
        ({"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/d/little-eagle"}, "little-eagle"),
        ({"speculative_algorithm": "NGRAM", "speculative_draft_model_path": None}, "ngram"),
        ({"speculative_algorithm": None}, "none"),
    ],
)
def test_an_engine_says_what_drafts(said, drafter):
    assert drafter_of(said) == drafter
