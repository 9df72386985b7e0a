"""`python -m server serve` and `engine` from the outside, over a fake SGLang: signals, deaths, and what is printed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from server.ports import free_port
from tests.server.fake_profile import FAKE, PROFILE
from tests.server.test_engine import gone

REPO = Path(__file__).parents[2]


class Served:
    """A server process whose output goes to files."""

    def __init__(self, folder, *argv, cues="", **env):
        self.out, self.err = folder / "out", folder / "err"
        environment = {
            **os.environ,
            "PYTHONPATH": str(FAKE),
            "FAKE_SGLANG": cues,
            "EYAS_HOME": str(folder / "home"),
            **env,
        }
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "server", *argv], stdout=out, stderr=err, cwd=REPO, env=environment
            )

    def wait_for(self, text, within=20.0):
        deadline = time.monotonic() + within
        while text not in self.text and time.monotonic() < deadline and self.process.poll() is None:
            time.sleep(0.05)
        assert text in self.text, self.text
        return self

    @property
    def text(self):
        return self.out.read_text() + self.err.read_text()

    @property
    def family(self):
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def end(self, number=None, within=20):
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(within)


@pytest.fixture
def start(tmp_path):
    (tmp_path / "model").mkdir()
    profile = tmp_path / "profile.toml"
    profile.write_text(PROFILE)
    port = free_port()
    started = []

    def start(command="serve", *argv, **options):
        ports = [] if any(word.startswith("--port") for word in argv) else ["--port", str(port)]
        served = Served(tmp_path, command, "--profile", str(profile), *ports, *argv, **options)
        served.url = f"http://127.0.0.1:{port}"
        started.append(served)
        return served

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait()


def test_ready_lines_and_ctrl_c(start):
    served = start().wait_for("Ctrl-C stops everything")
    text = served.out.read_text()
    assert "ready after" in text and f"{served.url}/v1" in text
    assert f"curl {served.url}/v1/chat/completions" in text
    assert "no speculation" in text and "limits   CPU" in text
    assert "starting the process" in served.err.read_text()
    assert httpx.get(f"{served.url}/readyz").status_code == 200
    assert httpx.get(f"{served.url}/v1/models").json()["data"][0]["id"] == "fake"
    family = served.family
    assert len(family) >= 3
    assert served.end(signal.SIGINT) == 130
    assert gone(family)
    assert "Traceback" not in served.text


def test_live_before_ready_and_ctrl_c_while_it_starts(start):
    served = start(cues="never-ready").wait_for("warming up")
    assert httpx.get(f"{served.url}/healthz").status_code == 200
    waiting = httpx.get(f"{served.url}/readyz")
    assert waiting.status_code == 503 and waiting.headers["retry-after"]
    family = served.family
    assert served.end(signal.SIGINT) == 130
    assert gone(family)
    assert "Traceback" not in served.text and "died" not in served.text


@pytest.mark.parametrize("after_s", [0.0, 0.2, 0.6, 1.2])
def test_ctrl_c_at_any_moment(start, after_s):
    """After so much CPU time, that a busy machine meets it at the same place; at the latest when it serves."""
    served = start()
    used = psutil.Process(served.process.pid).cpu_times
    while sum(used()[:2]) < after_s and "Ctrl-C stops everything" not in served.text:
        time.sleep(0.01)
    family = served.family
    assert served.end(signal.SIGINT) in (130, -signal.SIGINT)
    assert gone(family)
    assert "Traceback" not in served.text


def test_sigterm_ends_it_cleanly(start):
    served = start().wait_for("Ctrl-C stops everything")
    family = served.family
    assert served.end(signal.SIGTERM) == 0
    assert gone(family)
    assert "Traceback" not in served.text


def test_two_ctrl_c_leave_nothing_behind(start):
    served = start(cues="stubborn").wait_for("Ctrl-C stops everything")
    family = served.family
    served.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    served.end(signal.SIGINT)
    assert gone(family, within=10)
    assert "Traceback" not in served.text


def test_kill_9_leaves_nothing_behind(start):
    served = start(cues="stubborn").wait_for("Ctrl-C stops everything")
    family = served.family
    served.end(signal.SIGKILL)
    assert gone(family, within=12)


def test_an_engine_that_dies_during_start(start):
    served = start(cues="die")
    assert served.end() == 1
    error = served.err.read_text()
    assert "eyas: the engine died (exit code 3)" in error
    assert "the fake was told to die" in error
    assert "Traceback" not in error


def test_an_engine_that_dies_later(start):
    served = start(cues="die-later").wait_for("Ctrl-C stops everything")
    assert served.end() == 1
    assert "eyas: the engine died (exit code 9)" in served.err.read_text()


def test_port_taken(start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        served = start("serve", "--port", port)
        assert served.end() == 1
        assert f"eyas: port {port} of 127.0.0.1 is taken" in served.err.read_text()
        served = start("engine", "--port", port)
        assert served.end() == 1
        assert f"eyas: port {port} is taken" in served.err.read_text()


def test_ngram_without_a_compiler_serves_plainly_and_says_so(start):
    served = start("serve", "--drafter", "ngram", CXX="no-such-compiler").wait_for("Ctrl-C stops everything")
    assert "no-such-compiler was not found" in served.err.read_text()
    assert "serving without speculation" in served.err.read_text()
    assert "no speculation" in served.out.read_text()
    assert served.end(signal.SIGINT) == 130


@pytest.mark.parametrize("drafter", ["no-such-drafter", "tests"])
def test_a_drafter_that_is_none(start, drafter):
    served = start("serve", "--drafter", drafter)
    assert served.end() == 1
    assert served.err.read_text().startswith("eyas: drafter ") or "config.json is missing" in served.err.read_text()


def test_one_engine_without_a_gateway(start):
    served = start("engine").wait_for("Ctrl-C stops it")
    text = served.out.read_text()
    assert served.url in text
    key_file = Path(text.partition("its keys are in ")[2].partition(",")[0])
    assert key_file.exists()
    family = served.family
    assert served.end(signal.SIGINT) == 130
    assert gone(family) and not key_file.exists()
    assert start("engine", cues="die").end() == 1


def run_beside(start, program, cues="", **env):
    return start("engine", "--", sys.executable, "-c", program, "{url}", "{key_file}", cues=cues, **env)


def test_an_engine_for_as_long_as_a_command_runs(start):
    program = "import sys, httpx; print(httpx.get(sys.argv[1] + '/ready').status_code, sys.argv[2]); sys.exit(7)"
    served = run_beside(start, program)
    assert served.end() == 7
    said, key_file = served.out.read_text().split()
    assert said == "200" and key_file.endswith("engine.yaml") and not Path(key_file).exists()


def test_a_command_beside_an_engine_that_dies_is_ended(start):
    served = run_beside(start, "import time; print('began', flush=True); time.sleep(60)", cues="die-later")
    assert served.wait_for("began").end() == 1
    assert "eyas: the engine died (exit code 9)" in served.err.read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_beside_an_engine_ends_with_it(start, number, code):
    served = run_beside(start, "import time; print('began', flush=True); time.sleep(60)").wait_for("began")
    family = served.family
    assert served.end(number) == code
    assert gone(family)


def test_a_command_that_is_none(start):
    served = start("engine", "--", "no-such-command")
    assert served.end() == 1
    assert "eyas: no-such-command cannot be run" in served.err.read_text()


@pytest.mark.parametrize("verb", ["serve", "engine"])
@pytest.mark.parametrize("port", ["0", "-1", "65536", "many"])
def test_a_port_that_is_none(command, verb, port):
    shown = command(verb, "--profile", "p.toml", f"--port={port}")
    assert shown.returncode == 2
    assert f"'{port}' is no port, expected 1 to 65535" in shown.stderr


@pytest.mark.parametrize("host", ["nosuch.invalid", "192.0.2.1"])
def test_a_host_that_is_not_here(start, host):
    served = start("serve", "--host", host)
    assert served.end() == 1
    assert f"eyas: {host} is no address of this machine" in served.err.read_text()


def test_a_variable_that_cannot_be_meant(start):
    served = start(EYAS_LOG="loud")
    assert served.end() == 1
    assert served.err.read_text().startswith("eyas: EYAS_LOG is 'loud', expected one of")


@pytest.mark.parametrize("command", ["serve", "engine"])
def test_a_target_that_is_not_there(start, tmp_path, command):
    (tmp_path / "model").rmdir()
    served = start(command)
    assert served.end() == 1
    expected = f"eyas: the target's folder {tmp_path / 'model'} does not exist: correct target.path in the profile."
    assert expected in served.err.read_text()
    assert not (tmp_path / "home" / "runs").exists()


def test_whatever_ends_the_start_ends_the_service(start):
    served = start(HOME="/dev/null/x", EYAS_HOME="/dev/null/x")
    assert served.end() == 1
    assert "eyas: " in served.err.read_text() and "Traceback" not in served.err.read_text()
