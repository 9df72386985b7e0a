"""What several tests share: an engine that captures, the remap command, and a verifier."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drafter.capturing import write_target
from tests.drafter.fake_capturing_engine import FakeCapturingEngine
from tests.drafter.remapping import Remap, normal, verifier_of
from tests.server.drafters import HIDDEN, VOCAB


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeCapturingEngine]:
    """An engine that captures what it is asked to prefill."""
    engine = FakeCapturingEngine(tmp_path / "engine", write_target(tmp_path / "target")).start()
    yield engine
    engine.stop()


@pytest.fixture
def remap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Remap:
    return Remap(tmp_path, capsys)


@pytest.fixture
def verifier(tmp_path: Path) -> Path:
    return verifier_of(tmp_path / "verifier", normal(VOCAB, HIDDEN, seed=7))
