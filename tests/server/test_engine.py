"""The engine process from the outside, with a fake `sglang.launch_server` that misbehaves on cue."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from server.config import load_profile
from server.drafters import LaunchError
from server.engine import Engine, EngineError
from tests.server.fake_profile import FAKE, PROFILE


@pytest.fixture
def make_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    (tmp_path / "model").mkdir()
    (tmp_path / "profile.toml").write_text(PROFILE)
    made = []

    def make(cues="", drafter="none", edit=("", ""), **options):
        monkeypatch.setenv("FAKE_SGLANG", cues)
        (tmp_path / "profile.toml").write_text(PROFILE.replace(*edit))
        engine = Engine(load_profile(tmp_path / "profile.toml"), drafter, run_dir=tmp_path / "run", **options)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.stop()


def group_of(engine):
    """The guard and everything under it."""
    guard = psutil.Process(engine._process.pid)
    return [guard, *guard.children(recursive=True)]


def gone(processes, within=3.0):
    _, alive = psutil.wait_procs(processes, timeout=within)
    return not [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_start_and_stop(make_engine):
    engine = make_engine()
    stages = []
    engine.start(stages.append)
    assert engine.state == "ready"
    assert engine.version == "0.0.fake"
    assert stages[0] == "starting the process" and stages[-1] == "generating one token"
    processes = group_of(engine)
    assert len(processes) >= 2
    engine.stop()
    assert engine.state == "stopped"
    assert gone(processes)


def test_context_manager_stops_on_error(make_engine):
    engine = make_engine()
    with pytest.raises(ZeroDivisionError), engine:
        processes = group_of(engine)
        raise ZeroDivisionError
    assert gone(processes)


def test_keys_stay_private(make_engine):
    with make_engine() as engine:
        command_lines = [" ".join(process.cmdline()) for process in group_of(engine)]
        assert not any(key in line for line in command_lines for key in (engine.api_key, engine.admin_key))
        assert stat.S_IMODE(engine.key_file.stat().st_mode) == 0o600
        assert stat.S_IMODE(engine.log_file.stat().st_mode) == 0o600
        raw = engine.log_file.read_text()
        assert engine.api_key in raw, "the fake logs its keys as SGLang does"
        tail = "\n".join(engine.log_tail(1000))
        assert "***" in tail and engine.api_key not in tail and engine.admin_key not in tail
        shown = json.dumps(engine.resolved) + json.dumps(engine.argv)
        assert engine.api_key not in shown and engine.admin_key not in shown and "environment" not in engine.resolved
    assert not engine.key_file.exists()


def test_death_during_start_shows_the_last_lines_without_keys(make_engine):
    engine = make_engine("die")
    with pytest.raises(EngineError, match=r"died \(exit code 3\) while") as caught:
        engine.start()
    assert "RuntimeError: the fake was told to die" in str(caught.value)
    assert engine.api_key not in str(caught.value)
    assert engine.state == "dead"
    assert not engine.key_file.exists()


def test_never_ready_times_out(make_engine):
    engine = make_engine("never-ready", edit=("start_timeout_s = 20.0", "start_timeout_s = 1.5"))
    with pytest.raises(EngineError, match=r"not ready after 2 s .*start_timeout_s"):
        engine.start()
    assert engine._process.poll() is not None


def test_ready_without_a_token_is_not_ready(make_engine):
    with pytest.raises(EngineError, match="said ready but answered 500"):
        make_engine("no-token").start()


@pytest.mark.parametrize(
    ("cue", "line"),
    [
        ("change:context_length=256", "context_length: asked for 512, the engine runs with 256"),
        ("change:max_running_requests=48", "max_running_requests: asked for 4, the engine runs with 48"),
        ('change:served_model_name="other"', "served_model_name: asked for 'fake'"),
        ('change:speculative_algorithm="EAGLE3"', "speculative_algorithm: asked for None"),
        ("change:speculative_accept_threshold_single=0.5", "speculative_accept_threshold_single: asked for 1.0"),
    ],
)
def test_a_silent_change_is_refused(make_engine, cue, line):
    engine = make_engine(cue)
    with pytest.raises(EngineError) as caught:
        engine.start()
    assert line in str(caught.value)
    assert engine._process.poll() is not None


def test_ngram_draft_tokens_are_compared(make_engine):
    engine = make_engine("change:speculative_num_draft_tokens=12", "ngram")
    engine.start()  # nothing was asked for, so the engine's own default stands
    assert engine.drafter.draft_tokens == 12


def test_a_stubborn_engine_and_its_children_are_killed(make_engine):
    engine = make_engine("stubborn")
    engine.start()
    processes = group_of(engine)
    assert len(processes) >= 3
    engine.stop()
    assert gone(processes)


def test_the_engine_does_not_outlive_a_killed_starter(tmp_path):
    """kill -9 of the starter: the guard's pipe closes and the group ends."""
    (tmp_path / "model").mkdir()
    (tmp_path / "profile.toml").write_text(PROFILE)
    code = (
        "import pathlib, time\n"
        "from server.config import load_profile\n"
        "from server.engine import Engine\n"
        f"engine = Engine(load_profile({str(tmp_path / 'profile.toml')!r}), 'none', "
        f"run_dir=pathlib.Path({str(tmp_path / 'run')!r}))\n"
        "engine.start()\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(FAKE), "FAKE_SGLANG": "stubborn"}
    starter = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=env, cwd=Path(__file__).parents[2]
    )
    assert starter.stdout.readline() == b"up\n"
    processes = psutil.Process(starter.pid).children(recursive=True)
    assert len(processes) >= 3
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    assert gone(processes, within=10)


def test_death_is_noticed(make_engine):
    engine = make_engine("die-later")
    ended = []
    engine.on_end = ended.append
    engine.start()
    deadline = time.monotonic() + 15
    while not ended and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended == [engine]
    assert engine.state == "dead" and "exit code 9" in engine.detail
    assert "fake: dying now" in engine.log_tail()


def test_a_hang_is_noticed(make_engine):
    engine = make_engine("hang")
    ended = []
    engine.on_end = ended.append
    engine.start()
    deadline = time.monotonic() + 15
    while not ended and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engine.state == "hung" and "without a token" in engine.detail


def test_an_idle_engine_is_not_hung(make_engine):
    engine = make_engine()
    engine.start()
    time.sleep(3)  # three times hang_timeout_s
    assert engine.state == "ready"


def test_port_taken(make_engine):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        engine = make_engine(port=taken.getsockname()[1])
        with pytest.raises(EngineError, match="is taken"):
            engine.start()
        assert engine._process is None


def test_run_folder_that_cannot_be_made(make_engine, tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(EngineError, match="cannot be written"):
        make_engine().start()


def test_unknown_drafter_starts_nothing(make_engine):
    with pytest.raises(LaunchError, match="neither known by name"):
        make_engine(drafter="no-such-drafter")


def test_faked_acceptance_cannot_leak_in(make_engine, monkeypatch):
    """SGLANG_SIMULATE_* of the caller never reaches the child; the argument of Engine does."""
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3.5")
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_METHOD", "fixed")
    monkeypatch.setenv("EYAS_CAPTURE_DIR", "/nowhere")

    with make_engine() as engine:
        inherited = psutil.Process(group_of(engine)[1].pid).environ()
        assert not [name for name in inherited if name.startswith(("SGLANG_SIMULATE", "EYAS_"))]
        assert not engine.simulated
    with make_engine(simulate_accept_len=1.0) as engine:
        inherited = psutil.Process(group_of(engine)[1].pid).environ()
        assert inherited["SGLANG_SIMULATE_ACC_LEN"] == "1.0"
        assert "SGLANG_SIMULATE_ACC_METHOD" not in inherited
        assert engine.simulated
