"""The gate: what is promoted, held, rejected and refused, from report files that the schema accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.gate import main
from drafter.acceptance import acceptance_length, add_histograms, cond_acc, full_acc
from drafter.report import provenance, write_report
from tests.server.drafters import write_drafter

PROMPTS = [f"{name}/{n}" for name in ("coding", "writing") for n in range(30)]


def variant(name: str, rate: float | dict[str, float] | None, speed: float, **changed: Any) -> dict[str, Any]:
    """A drafter whose drafts are accepted with this chance (by category); None does not speculate."""
    random = np.random.default_rng(list(name.encode()))
    hardness = np.random.default_rng(7).normal(0, 0.05, len(PROMPTS))
    requests = []
    for prompt, hard in zip(PROMPTS, hardness, strict=True):
        category = prompt.split("/")[0]
        histogram: list[int] = []
        if rate is not None:
            chance = min((rate[category] if isinstance(rate, dict) else rate) + hard, 0.99)
            counts = random.multinomial(60, [1 - chance, chance * (1 - chance), chance**2])
            histogram = [int(count) for count in counts]
        requests.append(
            {
                "prompt_id": prompt, "category": category, "histogram": histogram, "tokens": 64, "seconds": 1.0,
                "ttft_s": 0.1, "looping": False, "output_sha256": "0" * 64,
            }
        )  # fmt: skip
    found: dict[str, Any] = {
        "status": "ok", "drafter": name, "engine_version": "0.5.23", "flags": [], "dtype": "bfloat16",
        "temperature": 0.0, "max_tokens": 64, "thinking": "default", "concurrency": 4, "tokens_per_second": speed,
        "loop_share": 0.0, "categories": {}, "requests": requests,
    }  # fmt: skip
    if rate is not None:
        summed = add_histograms(request["histogram"] for request in requests)
        length = acceptance_length(summed)
        found |= {"acceptance_length": length, "acceptance_length_no_loops": length}
        found |= {"full_acc": full_acc(summed), "cond_acc": cond_acc(summed)}
    return found | changed


def report(*variants: dict[str, Any], **changed: Any) -> dict[str, Any]:
    where = provenance(
        target={"served_name": "t"},
        engine_version="0.5.23",
        engine_env="ours",
        argvs=[["x"]],
        profile_sha256="1" * 64,
        prompts_sha256="2" * 64,
    )
    whole = {"format": 1, "created": "2026-01-01T00:00:00+00:00", "simulated": False, "provenance": where}
    return {**whole, "variants": list(variants), **changed}


NONE = variant("none", None, 10.0)
OLD = variant("old", 0.5, 13.0)


def judge(tmp_path: Path, found: dict[str, Any], policy: str, *args: str) -> int:
    write_report(found, tmp_path / "report.json")
    (tmp_path / "policy.toml").write_text('drafter = "new"\n' + policy)
    return main([str(tmp_path / "report.json"), "--policy", str(tmp_path / "policy.toml"), *args])


@pytest.mark.parametrize(
    ("new", "policy", "code", "reason"),
    [
        (variant("new", 0.6, 15.0), "", 0, "tokens/s x1.50 against none"),
        (variant("new", 0.6, 15.0), 'incumbent = "old"', 0, "against the incumbent"),
        (variant("new", 0.6, 15.0), 'incumbent = "old"\nmust_not_lose = "all"', 0, "writing: +"),
        (variant("new", 0.6, 9.0), "", 4, "tokens/s x0.90 against none, at least x1.00"),
        (variant("new", 0.6, 12.0), 'incumbent = "old"\nmin_speedup_vs_incumbent = 1.0', 4, "x0.92 against old"),
        (variant("new", 0.4, 15.0), 'incumbent = "old"', 4, "against the incumbent, -0.000 is allowed"),
        (variant("new", 0.5, 15.0), 'incumbent = "old"', 3, "against the incumbent"),
        (variant("new", 0.495, 15.0), 'incumbent = "old"\nmargin = 0.2', 0, "-0.200 is allowed"),
        (variant("new", 0.6, 15.0), "min_acceptance_length = 1.8", 0, "floor 1.8"),
        (variant("new", 0.6, 15.0), "min_acceptance_length = 2.2", 4, "floor 2.2"),
        (variant("new", 0.6, 15.0), "min_acceptance_length = 1.95", 3, "floor 1.95"),
        (
            variant("new", {"coding": 0.4, "writing": 0.75}, 15.0),
            'incumbent = "old"\nmust_not_lose = ["coding"]',
            4,
            "coding: -",
        ),
        (variant("new", {"coding": 0.4, "writing": 0.75}, 15.0), 'incumbent = "old"', 0, "acceptance length +"),
    ],
)
def test_verdicts(
    tmp_path: Path, new: dict[str, Any], policy: str, code: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judge(tmp_path, report(NONE, OLD, new), policy) == code
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == {0: "promote", 3: "hold", 4: "reject"}[code]
    assert reason in shown


def test_more_acceptance_at_less_speed_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(NONE, OLD, variant("new", 0.9, 12.0))
    assert judge(tmp_path, found, 'incumbent = "old"\nmin_speedup_vs_incumbent = 1.0', "--json") == 4
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["decision"] == "reject"
    assert verdict["reasons"] == ["tokens/s x0.92 against old, at least x1.00 is asked for"]
    assert {"promote", "reject"} == {check["decision"] for check in verdict["checks"]}


@pytest.mark.parametrize(
    ("equal", "code"), [({"equal": 60, "total": 60}, 0), ({"equal": 59, "total": 60}, 4), (None, 3)]
)
def test_in_float32_answers_must_stay_equal(tmp_path: Path, equal: dict[str, int] | None, code: int) -> None:
    changed: dict[str, Any] = {"dtype": "float32"} | ({"greedy_equal": equal} if equal else {})
    found = report({**NONE, "dtype": "float32"}, variant("new", 0.6, 15.0, **changed))
    assert judge(tmp_path, found, "") == code


def test_in_bfloat16_they_need_not(tmp_path: Path) -> None:
    new = variant("new", 0.6, 15.0, greedy_equal={"equal": 0, "total": 60})
    assert judge(tmp_path, report(NONE, new), "") == 0


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (report(NONE, variant("new", 0.6, 15.0), simulated=True), "was simulated"),
        (report(NONE, variant("new", 0.6, 15.0, engine_version="0.5.24")), 'engine_version "0.5.23" and "0.5.24"'),
        (report(NONE, variant("new", 0.6, 15.0, dtype="float32")), "with dtype"),
        (report(NONE, variant("new", 0.6, 15.0, concurrency=8)), "with concurrency 4 and 8"),
    ],
)
def test_what_is_no_evidence(
    tmp_path: Path, found: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judge(tmp_path, found, "") == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("gate: ") and reason in shown.err


def test_an_engine_of_others_is_no_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(NONE, variant("new", 0.6, 15.0))
    found["provenance"]["engine_env"] = "unknown"
    assert judge(tmp_path, found, "") == 1
    assert "faked acceptance cannot be excluded" in capsys.readouterr().err


def test_a_drafter_that_has_changed_since(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from drafter.checkpoint.preflight import read_folder

    folder = write_drafter(tmp_path / "new")
    flags = ["x", "--speculative-draft-model-path", str(folder)]
    found = report(NONE, variant("new", 0.6, 15.0, flags=flags, drafter_sha256=read_folder(folder).sha256))
    assert judge(tmp_path, found, "") == 0
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"note": "touched"}))
    assert judge(tmp_path, found, "") == 1
    assert "it has changed since" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("incumbant = 'old'", "incumbant: extra inputs"),
        ("min_speedup = 'fast'", "min_speedup: "),
        ("min_acceptance_length = 0.5", "min_acceptance_length: "),
        ("x = [", "cannot be read"),
        ("incumbent = 'gone'", "has no variant 'gone', only none, old, new"),
        ("incumbent = 'none'", "did not speculate"),
        ("incumbent = 'old'\nmust_not_lose = ['maths']", "must_not_lose names ['maths']"),
    ],
)
def test_a_policy_that_cannot_be_meant(
    tmp_path: Path, policy: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judge(tmp_path, report(NONE, OLD, variant("new", 0.6, 15.0)), policy) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and reason in shown.err and shown.err.count("\n") == 1


def test_a_report_without_plain_decoding_cannot_be_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(tmp_path, report(variant("new", 0.6, 15.0)), "") == 2
    assert "has no variant 'none'" in capsys.readouterr().err


def test_a_failed_variant_cannot_be_promoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"status": "failed", "drafter": "new", "error": "the engine died\nits log"}
    assert judge(tmp_path, report(NONE, failed), "") == 2
    assert "variant 'new' failed: the engine died" in capsys.readouterr().err
