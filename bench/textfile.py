"""A report as a Prometheus textfile, for node_exporter's textfile collector: the figures of each variant as gauges."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from drafter.report import Report

LABELS = ("target", "drafter", "concurrency", "thinking", "simulated")
# key of a variant -> (name of the metric, what it is, factor to base units)
METRICS: dict[str, tuple[str, str, float]] = {
    "acceptance_length": ("acceptance_length", "Tokens a verify step gives, the target's own included", 1.0),
    "acceptance_length_no_loops": (
        "acceptance_length_no_loops",
        "The same without answers that repeat themselves",
        1.0,
    ),
    "flatness": ("flatness", "Conditional acceptance at the second position over that at the first", 1.0),
    "loop_share": ("loop_share", "Share of answers that repeat themselves", 1.0),
    "tokens_per_second": ("tokens_per_second", "Tokens per second over all requests together", 1.0),
    "speedup": ("speedup", "Tokens per second over the baseline's at the same load", 1.0),
    "step_cost": ("break_even_acceptance_length", "Time of a verify step over that of a decode step", 1.0),
    "verify_step_ms": ("verify_step_seconds", "Time of a verify step with its drafting", 1e-3),
    "decode_step_ms": ("decode_step_seconds", "Time of a decode step without speculation", 1e-3),
    "ttft_ms_p50": ("ttft_p50_seconds", "Median time to the first piece of text", 1e-3),
    "tpot_ms_p50": ("tpot_p50_seconds", "Median time per token after it", 1e-3),
    "itl_ms_p99": ("itl_p99_seconds", "99th percentile of the time between two pieces", 1e-3),
}
INTERVALS = ("acceptance_length", "speedup")


def textfile(report: Report) -> str:
    """The text. Every sample says whether its acceptance was simulated, so that no dashboard takes it for evidence."""
    registry = CollectorRegistry()
    target = str(report["provenance"]["target"].get("served_name", "?"))
    simulated = str(report["simulated"]).lower()

    def gauge(name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"eyas_bench_{name}", what, labels, registry=registry)

    gauge("created_timestamp_seconds", "When the measurement began", "target", "simulated").labels(
        target, simulated
    ).set(datetime.fromisoformat(report["created"]).timestamp())
    failed = gauge("variant_failed", "Whether a variant gave no figures", "target", "drafter")
    for variant in report["variants"]:
        failed.labels(target, variant["drafter"]).set(variant["status"] != "ok")
    measured = [variant for variant in report["variants"] if variant["status"] == "ok"]
    for key, (name, what, factor) in METRICS.items():
        holders = [variant for variant in measured if key in variant]
        if not holders:
            continue
        value = gauge(name, what, *LABELS)
        bounds = (
            gauge(f"{name}_ci95", f"{what}: bounds of the 95 % interval", *LABELS, "bound")
            if key in INTERVALS
            else None
        )
        for variant in holders:
            at = _at(variant, target, simulated)
            value.labels(*at).set(variant[key] * factor)
            if bounds is not None and f"{key}_ci95" in variant:
                for bound, limit in zip(("low", "high"), variant[f"{key}_ci95"], strict=True):
                    bounds.labels(*at, bound).set(limit * factor)
    _positions(
        gauge("accepted_share", "Share of verify steps that accept up to a position", *LABELS, "position"),
        measured,
        target,
        simulated,
    )
    if "verdict" in report:
        verdict = gauge("verdict", "The gate's decision: 1 for the one that was taken", "target", "decision")
        for decision in ("promote", "hold", "reject"):
            verdict.labels(target, decision).set(decision == report["verdict"]["decision"])
    return generate_latest(registry).decode()


def _positions(share: Gauge, measured: list[Mapping[str, Any]], target: str, simulated: str) -> None:
    for variant in measured:
        for position, value in enumerate(variant.get("full_acc", [])):
            share.labels(*_at(variant, target, simulated), str(position)).set(value)


def _at(variant: Mapping[str, Any], target: str, simulated: str) -> tuple[str, ...]:
    return (target, variant["drafter"], str(variant["concurrency"]), variant["thinking"], simulated)
