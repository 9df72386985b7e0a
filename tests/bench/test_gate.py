"""The gate: what is promoted, held, rejected and refused, from report files that the schema accepts."""

from __future__ import annotations

import hashlib
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
        "loop_share": 0.0, "categories": {}, "requests": requests, "blocks": blocks(speed),
    }  # fmt: skip
    if rate is not None:
        summed = add_histograms(request["histogram"] for request in requests)
        length = acceptance_length(summed)
        found |= {"acceptance_length": length, "acceptance_length_no_loops": length}
        found |= {"full_acc": full_acc(summed), "cond_acc": cond_acc(summed)}
    return found | changed


def blocks(speed: float) -> list[dict[str, Any]]:
    return [{"repeat": 0, "part": 0, "seconds": 64 * len(PROMPTS) / speed, "tokens": 64 * len(PROMPTS)}]


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
        (variant("new", 0.6, 15.0), "", 0, "tokens/s x1.50 (1.50 to 1.50) against none"),
        (variant("new", 0.6, 15.0), 'incumbent = "old"', 0, "against the incumbent"),
        (variant("new", 0.6, 15.0), 'incumbent = "old"\nmust_not_lose = "all"', 0, "writing: +"),
        (variant("new", 0.6, 9.0), "", 4, "tokens/s x0.90 (0.90 to 0.90) against none, at least x1.00"),
        (
            variant("new", 0.6, 12.0),
            'incumbent = "old"\nmin_speedup_vs_incumbent = 1.0',
            4,
            "x0.92 (0.92 to 0.92) against old",
        ),
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
    assert verdict["reasons"] == ["tokens/s x0.92 (0.92 to 0.92) against old, at least x1.00 is asked for"]
    assert {"promote", "reject"} == {check["decision"] for check in verdict["checks"]}


@pytest.mark.parametrize(("different", "code"), [(0, 0), (1, 4)])
@pytest.mark.parametrize("baseline", ["none", "new"])
def test_in_float32_answers_must_stay_equal(tmp_path: Path, different: int, code: int, baseline: str) -> None:
    new = variant("new", 0.6, 15.0, dtype="float32")
    for place in range(different):
        new["requests"][place]["output_sha256"] = "1" * 64
    found = report({**NONE, "dtype": "float32"}, new)
    found["provenance"]["baseline"] = baseline
    assert judge(tmp_path, found, "") == code


def test_answers_to_other_requests_are_not_compared(tmp_path: Path) -> None:
    new = variant("new", 0.6, 15.0, dtype="float32")
    for request in new["requests"]:
        request["repeat"] = 1
    new["blocks"][0]["repeat"] = 1
    assert judge(tmp_path, report({**NONE, "dtype": "float32"}, new), "") == 3


def test_in_bfloat16_they_need_not(tmp_path: Path) -> None:
    new = variant("new", 0.6, 15.0, greedy_equal={"equal": 0, "total": 60})
    assert judge(tmp_path, report(NONE, new), "") == 0


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (report(NONE, variant("new", 0.6, 15.0), simulated=True), "was simulated"),
        (report(NONE, variant("new", 0.6, 15.0, engine_version="0.5.24")), 'engine_version "0.5.23" and "0.5.24"'),
        (report(NONE, variant("new", 0.6, 15.0, dtype="float32")), "with dtype"),
        (report(NONE, variant("new", 0.6, 15.0, concurrency=8)), "with concurrency 4 (thinking default) and 8"),
        (report(NONE, variant("new", 0.6, 15.0, thinking="on")), "with concurrency 4 (thinking default) and 4 (th"),
        (report(NONE, variant("new", 0.6, 15.0, flags=["x", "--tp", "2"])), "with other flags (--tp 2)"),
        (
            report({**NONE, "flags": ["x", "--page-size", "1"]}, variant("new", 0.6, 15.0, flags=["--page-size", "2"])),
            "with other flags (--page-size 1, --page-size 2)",
        ),
        (report({**NONE, "answers_each": 1}, variant("new", 0.6, 15.0, answers_each=2)), "with answers_each 1 and 2"),
    ],
)
def test_what_is_no_evidence(
    tmp_path: Path, found: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judge(tmp_path, found, "") == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("gate: ") and reason in shown.err


def test_flags_of_the_drafter_and_the_process_may_differ(tmp_path: Path) -> None:
    shared = ["python", "--port", "1", "--tp", "2", "--config", "a"]
    new = variant(
        "new", 0.6, 15.0, flags=["python", "--port", "2", "--config", "b", "--tp", "2", "--speculative-x", "3"]
    )
    assert judge(tmp_path, report({**NONE, "flags": shared}, new), "") == 0


@pytest.mark.parametrize(("speed", "code"), [(15.0, 3), (9.0, 4)])
def test_engines_of_others_hold_whatever_they_show(
    tmp_path: Path, speed: float, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(NONE, variant("new", 0.6, speed))
    found["provenance"]["engine_env"] = "unknown"
    assert judge(tmp_path, found, "") == code
    assert "faked acceptance cannot be excluded" in capsys.readouterr().out


def at(count: int, found: dict[str, Any], speed: float) -> dict[str, Any]:
    return {**found, "concurrency": count, "tokens_per_second": speed, "blocks": blocks(speed)}


@pytest.mark.parametrize(
    ("speeds", "policy", "code", "reason"),
    [
        ((15.0, 15.0), "", 0, "x1.50 (1.50 to 1.50) against none, at least x1.00 is asked for, at concurrency 8"),
        ((15.0, 9.0), "", 4, "x0.90 (0.90 to 0.90) against none, at least x1.00 is asked for, at concurrency 8"),
        ((15.0, 9.0), "must_win_at = [1]", 0, "at concurrency 1"),
        ((9.0, 15.0), "must_win_at = [1]", 4, "at concurrency 1"),
        ((15.0, 15.0), "must_win_at = [1, 4]", 2, "asks for concurrency [4], the report has [1, 8]: measure there too"),
        ((15.0, 15.0), "must_win_at = []", 2, "must_win_at"),
    ],
)
def test_loads_that_must_win(
    tmp_path: Path,
    speeds: tuple[float, float],
    policy: str,
    code: int,
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    new = variant("new", 0.6, 1.0)
    pairs = zip((1, 8), speeds, strict=True)
    found = report(at(1, NONE, 10.0), at(8, NONE, 10.0), *(at(count, new, speed) for count, speed in pairs))
    assert judge(tmp_path, found, policy) == code
    shown = capsys.readouterr()
    assert reason in shown.out + shown.err
    if "[1]" in policy:
        assert "concurrency 8" not in shown.out


def test_a_speed_that_other_prompts_could_undo_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = variant("new", 0.6, 10.2)
    for place, request in enumerate(new["requests"]):
        request["seconds"] = 0.4 if place % 2 else 1.6
    assert judge(tmp_path, report(NONE, new), "") == 3
    assert "hold     tokens/s x1.02 (0." in capsys.readouterr().out


@pytest.mark.parametrize(("differs", "code"), [(False, 0), (True, 4)])
def test_a_drafter_that_changes_what_is_sampled_is_rejected(tmp_path: Path, differs: bool, code: int) -> None:
    checked = {
        "differs": differs, "p_value": 0.0001 if differs else 0.4, "error_rate": 0.001, "samples": 10,
        "reference_samples": 10, "prompts": 1,
    }  # fmt: skip
    new = variant("new", 0.6, 15.0, sampling=checked, temperature=1.0)
    assert judge(tmp_path, report({**NONE, "temperature": 1.0}, new), "") == code


@pytest.mark.parametrize(("near", "code"), [([True, True], 0), ([True, False], 3), ([None, True], 0)])
def test_in_bfloat16_a_change_without_a_near_tie_holds(tmp_path: Path, near: list[bool | None], code: int) -> None:
    rows = [
        {"prompt_id": "coding/1", "repeat": 0, "position": 7}
        | ({} if each is None else {"gap": 0.3 if each else 0.7, "near_tie": each})
        for each in near
    ]
    equal = {"equal": 58, "total": 60, "near_ties": near.count(True), "differences": rows}
    assert judge(tmp_path, report(NONE, variant("new", 0.6, 15.0, greedy_equal=equal)), "") == code


@pytest.mark.parametrize(
    ("shift", "margin", "code", "reason"),
    [
        (0.0, 0.0, 0, "mean score +0.000"),
        (-0.2, 0.0, 4, "mean score -0.200"),
        (-0.2, 0.3, 0, "against no speculation, -0.300 is allowed"),
        (None, 0.0, 2, "are not of the same prompts of this report"),
        ("bad", 0.0, 2, "are not {variant: {prompt id: score}}"),
    ],
)
def test_a_quality_check_that_must_not_drop(
    tmp_path: Path, shift: Any, margin: float, code: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(3)
    plain = {prompt: float(random.random()) for prompt in PROMPTS}
    mine = {prompt: score + shift for prompt, score in plain.items()} if isinstance(shift, float) else dict(plain)
    if shift is None:
        del mine[PROMPTS[0]]
    (tmp_path / "scores.json").write_text(json.dumps([] if shift == "bad" else {"none": plain, "new": mine}))
    policy = f"scores = 'scores.json'\nscores_margin = {margin}"
    assert judge(tmp_path, report(NONE, variant("new", 0.6, 15.0)), policy) == code
    shown = capsys.readouterr()
    assert reason in shown.out + shown.err and "Traceback" not in shown.err


def test_a_corpus_that_has_changed_since(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("eagles")
    ngram = {
        "external_corpus_path": str(corpus),
        "external_corpus_sha256": hashlib.sha256(b"eagles").hexdigest(),
    }
    found = report(NONE, variant("new", 0.6, 15.0, ngram=ngram))
    assert judge(tmp_path, found, "") == 0
    corpus.write_text("owls")
    assert judge(tmp_path, found, "") == 1
    assert "has changed since it was measured" in capsys.readouterr().err


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
        ("incumbent = 'new'", "drafter and incumbent are both 'new'"),
        ("margin = nan", "margin: "),
        ("min_speedup = nan", "min_speedup: "),
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
