"""The experiment of bench.transfer at its smallest, end to end: every step real, and walks are what engines count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.transfer import SCRATCH, TUNED, WRONG, main
from tests.engine.conftest import EnginePool
from tests.moved import build_moved

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(2400)]  # seven engine starts


def test_quick(engines: EnginePool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engines.stop()
    command = ["--moved", str(build_moved()), "--out", str(tmp_path / "out"), "--quick", "--json"]
    assert main(command) == 0, (tmp_path / "out" / "log.txt").read_text()[-3000:]
    found = json.loads(capsys.readouterr().out)
    rows = {(row["name"], row["steps"]): row for row in found["arms"]}
    assert {name for name, _ in rows} == {"as it is", "remapped (scaled)", TUNED, SCRATCH, WRONG}
    assert found["winner_by_budget"].keys() == {"20", "60"}
    # fp32, the same answers: what differs is which token an answer that is cut off ends with
    assert found["furthest_from_served"] < 0.1
    # the old drafter knows most of the new language; its rows in the wrong places know nothing, and are trained
    assert rows["as it is", 0]["acceptance_length"] > 1.2
    assert rows[TUNED, 60]["acceptance_length"] > rows[WRONG, 60]["acceptance_length"]
    assert rows[SCRATCH, 60]["tokens"] == rows[TUNED, 60]["tokens"]

    before = (tmp_path / "out" / "log.txt").stat().st_size
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["arms"] == found["arms"]
    assert (tmp_path / "out" / "log.txt").stat().st_size == before
