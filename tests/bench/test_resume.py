"""A run of the bench that was interrupted or killed: what it leaves, and who may go on with it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import runner
from tests.bench.fake_engine import FakeEngine, Script

ROOT = Path(__file__).parents[2]


def unfinished(bench: Any, engine: type[FakeEngine], tmp_path: Path, *args: str) -> None:
    """A run whose last engine never came up: its journal is kept, as a killed run leaves it."""

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    engine.scripts["late"] = Script(steps=(1,))
    original, FakeEngine.start = FakeEngine.start, die  # type: ignore[method-assign, assignment]
    try:
        FakeEngine.start = (  # type: ignore[method-assign]
            lambda self, progress: die() if self.given == "late" else original(self, progress)
        )
        code, _, _, _ = bench("--drafter", "good", "--drafter", "late", *args)
    finally:
        FakeEngine.start = original  # type: ignore[method-assign]
    engine.seen.stops.remove("late")
    assert code == 130 and (tmp_path / "out" / "blocks.jsonl").exists()


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--seed", "3"], "sampling"),
        (["--max-tokens", "30"], "sampling"),
        (["--concurrency", "2"], "concurrency and thinking"),
        (["--repeats", "2"], "repeats"),
        (["--num-steps", "2"], "drafters"),
        (["--limit", "3", "--concurrency", "3"], "concurrency and thinking, prompts"),
    ],
)
def test_another_run_does_not_go_on_with_it(
    bench: Any, engine: type[FakeEngine], tmp_path: Path, args: list[str], what: str
):
    unfinished(bench, engine, tmp_path)
    before = list(engine.seen.starts)
    code, report, _, err = bench("--drafter", "good", "--drafter", "late", *args)
    assert code == 2 and report is None and engine.seen.starts == before
    assert f"is of an unfinished run that differs in {what}: give the same command" in err and err.count("\n") == 1


def test_a_journal_that_is_none(bench: Any, engine: type[FakeEngine], tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "blocks.jsonl").write_text("[]\n")
    code, _, _, err = bench("--drafter", "good")
    assert code == 2 and "is not the journal of a run" in err and engine.seen.starts == []


HELD = """
import sys
from pathlib import Path
import bench.variants
from bench.accept_len import main
from bench.journal import Journal
from tests.bench.fake_engine import FakeEngine, Script
FakeEngine.scripts = {"none": Script(algorithm="NONE"), "slow": Script(steps=(1,), delay_s=0.1, fault=sys.argv.pop(1))}
bench.variants.Engine = FakeEngine
sys.exit(main(sys.argv[1:]))
"""


def interrupt(process: subprocess.Popen[str], at: str, signal_: int) -> tuple[str, str]:
    """Wait until the command says `at`, send the signal, and give what it printed and said after that."""
    assert process.stderr
    said = ""
    while at not in said:
        line = process.stderr.readline()
        assert line, f"it ended too early: {said}"
        said += line
    time.sleep(0.5)
    process.send_signal(signal_)
    return process.communicate(timeout=30)


@pytest.fixture
def held(profile_file: Path, prompt_file: Path, tmp_path: Path) -> Any:
    """Starts the command in a process of its own, with a slow drafter."""

    def start(fault: str, *args: str) -> subprocess.Popen[str]:
        shared = ["--profile", str(profile_file), "--prompts", str(prompt_file), "--max-tokens", "40"]
        return subprocess.Popen(
            [sys.executable, "-u", "-c", HELD, fault, *shared, *args],
            cwd=ROOT,
            env={**os.environ, "FAKE_ENGINE_STOPS": str(tmp_path / "stops")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def test_ctrl_c_before_anything_was_measured_leaves_nothing(held: Any, tmp_path: Path):
    out, stops = tmp_path / "deep" / "out", tmp_path / "stops"
    process = held("", "--drafter", "none", "--baseline", "slow", "--out", str(out))
    printed, said = interrupt(process, "slow: measuring", signal.SIGINT)
    assert process.returncode == 130
    assert printed == "" and "Traceback" not in said
    assert said.endswith("accept_len: interrupted; the engine was stopped and no report was written.\n")
    assert stops.read_text().split() == ["slow"]
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize(("fault", "at"), [("", "slow: measuring"), ("start hangs", "slow: starting the process")])
def test_ctrl_c_stops_the_engine_and_keeps_what_was_measured(held: Any, tmp_path: Path, fault: str, at: str):
    out, stops = tmp_path / "deep" / "out", tmp_path / "stops"
    process = held(fault, "--drafter", "slow", "--out", str(out))
    printed, said = interrupt(process, at, signal.SIGINT)
    assert process.returncode == 130
    assert printed == "" and "Traceback" not in said
    assert said.endswith(f"1 blocks are kept: the same command with --out {out} goes on.\n")
    assert stops.read_text().split() == ["none", "slow"]
    assert [path.name for path in out.iterdir()] == ["blocks.jsonl"]


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_run_goes_on_where_it_stopped(
    held: Any, bench: Any, engine: type[FakeEngine], tmp_path: Path, signal_: int
):
    out = tmp_path / "out"
    process = held("", "--drafter", "slow", "--repeats", "2", "--out", str(out))
    interrupt(process, "slow: repeat 2 of 2", signal_)
    journal = (out / "blocks.jsonl").read_text()
    assert journal.count('"answers":[') == 3
    (out / "blocks.jsonl").write_text(journal + '{"variant":"slow","unit":{"re')  # as a kill amid a write leaves it
    engine.scripts["slow"] = Script(steps=(1,))
    code, report, _, err = bench("--drafter", "slow", "--repeats", "2")
    assert code == 0 and "going on with the run" in err and "3 blocks done" in err
    assert engine.seen.starts == ["slow"], "only the missing block is measured"
    assert [body["seed"] for _, body in engine.seen.bodies] == [4, 5, 6, 7]
    for variant in report["variants"]:
        assert [request["repeat"] for request in variant["requests"]] == [0] * 4 + [1] * 4
    assert report["provenance"]["resumed"] == 1
    assert report["provenance"]["order"] == ["none", "slow", "none", "slow", "slow"]
    assert report["variants"][1]["greedy_equal"]["equal"] == 8
    assert not (out / "blocks.jsonl").exists()


def test_a_run_on_engines_of_others_that_was_killed_at_the_end_knows_its_target(
    bench: Any, engine: type[FakeEngine], monkeypatch: Any, tmp_path: Path
):
    served = FakeEngine(None, "good")
    served.start(lambda what: None)
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"api-key": FakeEngine.api_key, "admin-api-key": FakeEngine.admin_key}))
    args = ["--url", f"good={served.url}", "--key-file", str(keys), "--temperature", "0.5"]

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    try:
        with monkeypatch.context() as patched:
            patched.setattr(runner, "build_report", killed)
            assert bench(*args)[0] == 130
        code, report, _, _ = bench(*args)
    finally:
        served.stop()
    assert code == 0 and report["provenance"]["resumed"] == 1
    assert report["provenance"]["target"] == {"served_name": "fake", "path": "/elsewhere"}
