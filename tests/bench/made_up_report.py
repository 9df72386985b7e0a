"""A report of the whole schema with made-up figures: what the pages are drawn from in tests."""

import random
from collections.abc import Sequence
from typing import Any

from bench.evidence import comparisons, interval
from drafter.acceptance import acceptance_length, add_histograms, cond_acc, flatness, full_acc

CATEGORIES = ("coding", "humanities", "math", "roleplay", "writing")
RATES = {"none": 0.0, "ngram": 0.25, "runs/new <drafter> & more": 0.7, "old": 0.55}
STEPS = 3


def request(dice: random.Random, rate: float, place: int) -> dict[str, Any]:
    category = CATEGORIES[place % len(CATEGORIES)]
    chance = rate * (0.8 + 0.05 * (place % len(CATEGORIES)))
    histogram = [0] * (STEPS + 1) if rate else []
    for _ in range(40 if rate else 0):
        histogram[next((each for each in range(STEPS) if dice.random() >= chance), STEPS)] += 1
    return {
        "prompt_id": f"{category}/{place}",
        "category": category,
        "histogram": histogram,
        "tokens": 128,
        "seconds": 2.0,
        "ttft_s": 0.1,
        "looping": place % 11 == 0,
        "output_sha256": "0" * 64 if place or not rate else "1" * 64,
        "repeat": 0,
    }


def acceptance(requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    whole = add_histograms(each["histogram"] for each in requests)
    if not whole:
        return {}
    calm = add_histograms(each["histogram"] for each in requests if not each["looping"])
    found = {
        "acceptance_length": acceptance_length(whole),
        "acceptance_length_no_loops": acceptance_length(calm),
        "full_acc": full_acc(whole),
        "cond_acc": cond_acc(whole),
        "flatness": flatness(whole),
    }
    return {key: value for key, value in found.items() if value is not None}


def variant(drafter: str, concurrency: int, thinking: str) -> dict[str, Any]:
    rate = RATES[drafter]
    dice = random.Random(f"{drafter}{concurrency}{thinking}")
    requests = [request(dice, rate, place) for place in range(30)]
    made: dict[str, Any] = {
        "status": "ok",
        "drafter": drafter,
        "engine_version": "0.5.23",
        "flags": ["--x"],
        "dtype": "float32",
        "temperature": 0.0,
        "max_tokens": 128,
        "thinking": thinking,
        "concurrency": concurrency,
        "loop_share": sum(each["looping"] for each in requests) / len(requests),
        "requests": requests,
        "categories": {
            category: acceptance([each for each in requests if each["category"] == category]) for category in CATEGORIES
        },
        "ttft_ms_p50": 80.0 + concurrency,
        "tpot_ms_p50": 9.0 + concurrency,
        "itl_ms_p99": 40.0,
        **acceptance(requests),
    }
    plain_ms = 8.0 + concurrency
    made["tokens_per_second"] = 1000 * concurrency / plain_ms
    if not rate:
        return made | {"decode_step_ms": plain_ms}
    if drafter != "ngram":
        made["steps"] = STEPS
    made |= {"draft_tokens": STEPS + 1, "drafter_sha256": "a" * 64, "step_cost": 1.3 + 0.08 * concurrency}
    gain = made["acceptance_length"] / made["step_cost"]
    made |= {
        "speedup": gain,
        "speedup_ci95": [0.93 * gain, 1.06 * gain],
        "verify_step_ms": plain_ms * made["step_cost"],
    }
    made["tokens_per_second"] *= gain
    if not made["speedup_ci95"][0] < 1 < made["speedup_ci95"][1]:
        made["loses"] = gain < 1
    made["acceptance_length_ci95"] = interval(made)
    made["greedy_equal"] = {"equal": 29, "total": 30, "near_ties": 1}
    length = made["acceptance_length"]
    for key, slope in (("by_answer_position", -0.1), ("by_context_length", -0.2)):
        made[key] = [
            {"from": 64 * each, "to": 64 * each + 64, "steps": 40, "acceptance_length": max(1.0, length + slope * each)}
            for each in range(5)
        ]
    return made


def made_up(
    drafters: Sequence[str] = tuple(RATES), loads: Sequence[int] = (1, 4, 8), thinking: Sequence[str] = ("default",)
) -> dict[str, Any]:
    """A report of every drafter at every load, and one that failed."""
    variants = [variant(name, load, each) for each in thinking for load in loads for name in drafters]
    if "none" not in drafters:  # nothing to hold them against
        for made in variants:
            for key in ("speedup", "speedup_ci95", "loses", "step_cost", "greedy_equal"):
                made.pop(key, None)
    compared: list[dict[str, Any]] = []
    for each in thinking:
        for load in loads:
            alike = [made for made in variants if (made["concurrency"], made["thinking"]) == (load, each)]
            compared += [row | {"concurrency": load, "thinking": each} for row in comparisons(alike)]
    return {
        "format": 1,
        "created": "2026-01-01T00:00:00+00:00",
        "simulated": False,
        "provenance": {
            "target": {"served_name": "small-model", "path": "some/where"},
            "engine_version": "0.5.23",
            "engine_env": "ours",
            "flags": ["--dtype", "float32", "--max-running-requests", "16"],
            "profile_sha256": "1" * 64,
            "prompts_sha256": "2" * 64,
            "machine": {"processor": "a CPU", "cores": 2, "gpus": [], "memory_gib": 16.0},
            "command": "python bench/accept_len.py --drafter 'runs/new <drafter> & more'",
            "baseline": "none",
        },
        "variants": [*variants, {"status": "failed", "drafter": "broken", "error": "it died.\n  <last line>"}],
        "comparisons": compared,
        "verdict": {
            "decision": "hold",
            "reasons": ["too few answers <without> loops", "coding: -0.1 acceptance length"],
        },
    }
