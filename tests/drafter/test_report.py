"""The report's schema: what is written whole, what is read back, and what is refused."""

import copy
import hashlib
import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter import report as module
from drafter.report import ReportError, read_report, write_report


def request(histogram: list[int], looping: bool = False, **changed: Any) -> dict[str, Any]:
    return {
        "prompt_id": "p",
        "category": "c",
        "histogram": histogram,
        "tokens": 5,
        "seconds": 1.5,
        "ttft_s": 1,
        "looping": looping,
        "output_sha256": "0" * 64,
        **changed,
    }


def honest() -> dict[str, Any]:
    measured = {
        "status": "ok",
        "drafter": "d",
        "engine_version": "0",
        "flags": ["--x"],
        "dtype": "float32",
        "temperature": 0.0,
        "max_tokens": 16,
        "thinking": "default",
        "concurrency": 1,
        "tokens_per_second": 3.5,
        "loop_share": 0.5,
        "categories": {},
        # 3 steps accepted 0, 1, 1 and the looping answer 3: 1 + 5/4, and 1 + 2/3 without it
        "requests": [request([1, 2]), request([0, 0, 0, 1], looping=True)],
        "acceptance_length": 2.25,
        "acceptance_length_no_loops": 1 + 2 / 3,
        "full_acc": [0.75, 0.25, 0.25],
        "cond_acc": [0.75, 1 / 3, 1.0],
        "flatness": (1 / 3) / 0.75,
    }
    plain = {**copy.deepcopy(measured), "drafter": "none", "requests": [request([])], "loop_share": 0.0}
    for name in ("acceptance_length", "acceptance_length_no_loops", "full_acc", "cond_acc", "flatness"):
        del plain[name]
    return {
        "format": 1,
        "created": "2026-01-01T00:00:00+00:00",
        "simulated": False,
        "provenance": module.provenance(
            target={"served_name": "t"},
            engine_version="0",
            engine_env="ours",
            argvs=[["x", "--a", "1"]],
            profile_sha256="1" * 64,
            prompts_sha256="2" * 64,
        ),
        "variants": [plain, measured, {"status": "failed", "drafter": "f", "error": "died"}],
    }


def test_what_is_written_is_read_back(tmp_path: Path):
    path = tmp_path / "deep" / "report.json"
    write_report(honest(), path)
    assert read_report(path) == honest()
    assert [entry.name for entry in path.parent.iterdir()] == ["report.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_keys_of_later_work_are_let_through():
    report = honest()
    report["verdict"] = {"decision": "promote", "reasons": [], "checks": [{"later": 1}]}
    report["variants"][1]["energy_j"] = [2.0, 2.5]
    module.check_report(report)


@pytest.mark.parametrize("missing", ["a", "b", "delta_acceptance_length", "ci95", "p_adjusted", "speedup"])
def test_a_comparison_is_whole(missing: str):
    report = honest()
    whole = {"a": "d", "b": "d", "delta_acceptance_length": 0.0, "ci95": [0.0, 0.2], "p_adjusted": 0.04, "speedup": 1.0}
    report["comparisons"] = [whole]
    module.check_report(report)
    report["comparisons"] = [whole, {name: value for name, value in whole.items() if name != missing}]
    with pytest.raises(ReportError, match=rf"comparisons\[1\] has no '{missing}'"):
        module.check_report(report)


def test_a_report_that_breaks_the_schema_is_not_written(tmp_path: Path):
    path = tmp_path / "report.json"
    for value in (math.nan, math.inf):
        broken = honest()
        broken["variants"][1]["tokens_per_second"] = value
        with pytest.raises(ReportError, match="tokens_per_second"):
            write_report(broken, path)
    assert list(tmp_path.iterdir()) == []


def test_writing_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "report.json"
    module.write_text(path, "old")

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        module.write_text(path, "new" * 1000)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_a_file_is_replaced_never_rewritten(tmp_path: Path):
    path = tmp_path / "report.json"
    module.write_text(path, "old")
    with path.open() as reader:
        module.write_text(path, "new" * 1000)
        assert reader.read() == "old"
    assert path.read_text() == "new" * 1000


def change(report: dict[str, Any], where: str, value: Any) -> None:
    *parents, last = [int(part) if part.isdigit() else part for part in where.split(".")]
    table: Any = report
    for part in parents:
        table = table[part]
    if value is KeyError:
        del table[last]
    else:
        table[last] = value


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("format", 2, "has format 2, expected 1: read it with the version that wrote it"),
        ("format", KeyError, "has no 'format': it is not a report"),
        ("variants", KeyError, "has no 'variants': the report is incomplete"),
        ("variants", [], "'variants' is empty"),
        ("variants", {}, "'variants' is {}, expected list"),
        ("simulated", 0, "'simulated' is 0, expected bool"),
        ("provenance.prompts_sha256", KeyError, "provenance has no 'prompts_sha256'"),
        ("provenance.command", 3, "provenance: 'command' is 3, expected str"),
        ("variants.0", "none", r"variants\[0\] is str, expected an object"),
        ("variants.1.status", "fine", r"variants\[1\]: 'status' is 'fine', expected 'ok' or 'failed'"),
        ("variants.2.error", KeyError, r"variants\[2\] has no 'error'"),
        (
            "variants.1.tokens_per_second",
            "fast",
            r"variants\[1\]: 'tokens_per_second' is 'fast', expected int or float",
        ),
        ("variants.1.tokens_per_second", True, "'tokens_per_second' is True"),
        ("variants.1.concurrency", 1.5, "'concurrency' is 1.5, expected int"),
        ("variants.1.flatness", None, "'flatness' is None, expected int or float"),
        ("variants.1.full_acc", KeyError, r"variants\[1\] has no 'full_acc'"),
        ("variants.1.greedy_equal", {"equal": 1}, r"variants\[1\]: greedy_equal has no 'total'"),
        ("variants.1.requests", [], r"variants\[1\]: 'requests' is empty"),
        ("variants.1.requests.0.looping", KeyError, r"variants\[1\].requests\[0\] has no 'looping'"),
        ("variants.1.requests.0.histogram", [1, -2], r"requests\[0\]: histogram\[1\] is -2, expected a count"),
        ("variants.1.acceptance_length", 2.5, r"'acceptance_length' is 2.5, but its requests give 2.25"),
        ("variants.1.acceptance_length", KeyError, "'acceptance_length' is absent, but its requests give 2.25"),
        ("variants.1.acceptance_length_no_loops", 2.25, "'acceptance_length_no_loops' is 2.25, but .* give 1.66"),
        ("variants.0.acceptance_length", 1.0, "'acceptance_length' is 1.0, but its requests give None"),
        ("variants.1.requests.0.histogram", [0, 3], "'acceptance_length' is 2.25, but its requests give 2.5"),
    ],
)
def test_what_is_refused_and_how(tmp_path: Path, where: str, value: Any, message: str):
    report = honest()
    change(report, where, value)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    with pytest.raises(ReportError, match=message) as raised:
        read_report(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("text", ["", '{"format": 1', '{"format": NaN}', "\xff"])
def test_what_is_not_json(tmp_path: Path, text: str):
    path = tmp_path / "report.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ReportError, match="is not JSON"):
        read_report(path)


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}"])
def test_json_that_is_no_report(tmp_path: Path, text: str):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ReportError, match="not a report"):
        read_report(path)


def test_a_report_that_is_not_there(tmp_path: Path):
    with pytest.raises(ReportError, match="cannot be read"):
        read_report(tmp_path / "report.json")


def test_hashes(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"abc" * 100_000)
    assert module.file_sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()


@given(st.lists(st.integers(-1, 2**40)), st.lists(st.integers(-1, 2**40)))
def test_the_hash_of_ids_is_that_of_little_endian_int64(ids: list[int], others: list[int]):
    assert module.ids_sha256(ids) == hashlib.sha256(struct.pack(f"<{len(ids)}q", *ids)).hexdigest()
    assert (module.ids_sha256(ids) == module.ids_sha256(others)) == (ids == others)


def test_common_flags_are_those_with_the_same_value_everywhere():
    first = ["python", "-m", "engine", "--port", "1", "--dtype", "bf16", "--on", "--list", "a", "b"]
    second = ["python", "-m", "engine", "--on", "--port", "2", "--dtype", "bf16", "--list", "a", "c", "--more", "x"]
    assert module.common_flags([first, second]) == ["--dtype", "bf16", "--on"]
    assert module.common_flags([first]) == first[3:]
    assert module.common_flags([]) == []


def test_provenance_says_where_figures_come_from():
    block = honest()["provenance"]
    assert block["engine_version"] == "0"
    assert block["machine"]["cores"] == os.cpu_count()
    assert block["machine"]["memory_gib"] > 0.1
    assert block["command"].startswith("python ")
    without = module.provenance(
        target={}, engine_version=None, engine_env="ours", argvs=[], profile_sha256="", prompts_sha256=""
    )
    assert "engine_version" not in without


def test_gpus_are_named_by_their_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'GPU A, 80 GiB, 1.2\\nGPU B, 80 GiB, 1.2\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module.machine()["gpus"] == ["GPU A, 80 GiB, 1.2", "GPU B, 80 GiB, 1.2"]
    tool.write_text("#!/bin/sh\nexit 9\n")
    (gpu,) = module.machine()["gpus"]
    assert gpu.startswith("unknown (nvidia-smi:")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert module.machine()["gpus"] == []
