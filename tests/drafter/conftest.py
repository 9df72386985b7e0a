"""What tests of remap share: the command, and a verifier."""

from pathlib import Path

import pytest

from tests.drafter.remapping import Remap, normal, verifier_of
from tests.server.drafters import HIDDEN, VOCAB


@pytest.fixture
def remap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Remap:
    return Remap(tmp_path, capsys)


@pytest.fixture
def verifier(tmp_path: Path) -> Path:
    return verifier_of(tmp_path / "verifier", normal(VOCAB, HIDDEN, seed=7))
