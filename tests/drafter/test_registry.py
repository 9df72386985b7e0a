"""Which drafters are known by name, and which of two goes first."""

from pathlib import Path

import pytest

from drafter import registry
from tests.server.drafters import write_drafter


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EYAS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(registry, "WITH_THE_PROJECT", tmp_path / "project")
    return tmp_path / "home"


def test_nothing_is_known_where_there_is_nothing(home: Path) -> None:
    assert registry.known() == {}


def test_those_of_this_machine_go_first(home: Path, tmp_path: Path) -> None:
    ours = write_drafter(tmp_path / "project" / "both")
    there = write_drafter(tmp_path / "project" / "there")
    mine = write_drafter(home / "drafters" / "both")
    (home / "drafters" / "not-one").mkdir()
    assert registry.known() == {"both": mine, "there": there}
    assert ours not in registry.known().values()
