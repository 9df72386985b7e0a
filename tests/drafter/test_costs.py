"""Measured costs: written and read again, put together from reports, and refused where they cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest

from drafter.costs import CostsError, costs_of_reports, read_costs, to_document, write_costs
from drafter.speedup import Costs

MEASURED = Costs({1: 10.0, 8: 14.0}, {1: {1: 12.0, 3: 15.0}, 8: {1: 20.0, 3: 30.5}}, "measured: small")


def variant(drafter: str, concurrency: int, **more: Any) -> dict[str, Any]:
    return {"status": "ok", "drafter": drafter, "concurrency": concurrency, **more}


def test_there_and_back(tmp_path: Path):
    file = tmp_path / "costs.json"
    write_costs(to_document(MEASURED, simulated=True, provenance={"machine": "m"}), file)
    assert read_costs(file) == MEASURED
    document = json.loads(file.read_text())
    assert document["simulated"] is True and document["provenance"] == {"machine": "m"}


def test_from_variants_at_several_loads():
    report = {
        "variants": [
            variant("none", 1, decode_step_ms=10.0),
            variant("new", 1, steps=3, verify_step_ms=15.0),
            variant("none", 8, decode_step_ms=14.0),
            variant("new", 8, steps=3, verify_step_ms=30.5),
            variant("ngram", 8, verify_step_ms=99.0),  # has no draft steps
            variant("none", 16, decode_step_ms=20.0),  # nothing to hold against it
            {"status": "failed", "drafter": "x", "error": "e"},
        ]
    }
    second = {"variants": [variant("new", 1, steps=1, verify_step_ms=12.0)]}
    found = costs_of_reports([report, second], "two reports")
    assert found == Costs({1: 10.0, 8: 14.0}, {1: {1: 12.0, 3: 15.0}, 8: {3: 30.5}}, "two reports")


def test_reports_that_hold_no_costs():
    with pytest.raises(CostsError, match="measure `none` beside the drafter"):
        costs_of_reports([{"variants": [variant("new", 1, steps=3, verify_step_ms=15.0)]}], "r")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no costs"),
        ('{"kind": "step_cost", "format": 2}', "holds no costs"),
        ('{"kind": "step_cost", "format": 1}', "is broken"),
        ('{"kind": "step_cost", "format": 1, "source": "s", "decode_ms": {"1": "fast"}, "step_ms": {}}', "is broken"),
        ('{"kind": "step_cost", "format": 1, "source": "s", "decode_ms": {"1": 0}, "step_ms": {"1": {}}}', "is broken"),
        ('{"kind": "step_cost", "format": 1, "source": "s", "decode_ms": [1], "step_ms": []}', "is broken"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, says: str):
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(CostsError, match=says):
        read_costs(file)


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(CostsError, match="check the path"):
        read_costs(tmp_path / "no.json")
