"""A profile, four prompts, and FakeEngine in the place of the engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bench.runner
import bench.variants
from bench.accept_len import main
from drafter.report import read_report
from tests.bench.fake_engine import FakeEngine, Script, Seen

PROMPTS = ("red", "green", "blue", "grey")


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.toml"
    path.write_text(
        "[target]\npath = '/nowhere'\nserved_name = 'fake'\n"
        "[engine]\ndevice = 'cpu'\ncontext_length = 512\nmax_running_requests = 4\n"
    )
    return path


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    categories = ("warm", "cold", "cold", "grey")
    lines = (
        {"prompt": prompt, "id": prompt, "category": category}
        for prompt, category in zip(PROMPTS, categories, strict=True)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeEngine]]:
    monkeypatch.setattr(FakeEngine, "scripts", {"none": Script(algorithm="NONE"), "good": Script(steps=(3, 2, 0))})
    monkeypatch.setattr(FakeEngine, "seen", Seen())
    monkeypatch.setattr(bench.variants, "Engine", FakeEngine)
    monkeypatch.setattr(bench.runner, "STATE_SETTLES_S", 0.2)
    yield FakeEngine
    assert sorted(FakeEngine.seen.stops) == sorted(FakeEngine.seen.starts), "an engine was left running"


@pytest.fixture
def running(engine: type[FakeEngine]) -> Iterator[Any]:
    """Starts engines that are nobody's of the bench."""
    made: list[FakeEngine] = []

    def start(name: str) -> FakeEngine:
        found = FakeEngine(None, name)
        found.start(lambda stage: None)
        made.append(found)
        return found

    yield start
    for each in made:
        each.stop()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "engine.yaml"
    path.write_text(json.dumps({"api-key": FakeEngine.api_key, "admin-api-key": FakeEngine.admin_key}))
    return path


@pytest.fixture(name="bench")
def run_bench(engine: type[FakeEngine], profile_file: Path, prompt_file: Path, tmp_path: Path, capsys: Any) -> Any:
    """Runs the command and gives (exit code, report or None, stdout, stderr)."""

    def run(*args: str) -> tuple[int, Any, str, str]:
        out = tmp_path / "out"
        shared = [
            "--profile",
            str(profile_file),
            "--prompts",
            str(prompt_file),
            "--max-tokens",
            "40",
            "--out",
            str(out),
        ]
        code = main([*shared, *args])
        printed = capsys.readouterr()
        report = read_report(out / "report.json") if (out / "report.json").exists() else None
        return code, report, printed.out, printed.err

    return run
