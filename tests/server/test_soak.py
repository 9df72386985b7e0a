"""A sample of the soak; the whole is `python -m tests.server.soak --requests 10000`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.soak import TOGETHER, Soak


@pytest.mark.slow
def test_nothing_leaks(tmp_path: Path) -> None:
    soak = Soak(tmp_path, requests=500, seed=7)
    soak.run()
    assert all(soak.checks.values()), (soak.checks, soak.figures)
    assert soak.sent >= 500 + TOGETHER
    assert soak.statuses["200"] > 200 and soak.statuses["left"] > 200, soak.statuses
