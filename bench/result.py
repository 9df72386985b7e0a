"""The report of what a run has measured: a variant for each drafter and load, held against the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.evidence import comparisons, costs_of, has_interval, interval, load_of, speed_of
from bench.figures import figures, request_entries
from bench.journal import Journal
from bench.load import Load
from bench.lossless import Gaps, Pair, greedy_equal
from bench.sampling import ERROR_RATE, compare
from bench.sampling import Samples as Continuations
from bench.schedule import Unit
from bench.stats import looks_confidence
from bench.variants import Plan, Variant, engines_are_ours
from drafter.data.prompts import prompts_sha256
from drafter.report import FORMAT, Report, provenance

INTERNAL = ("offered", "simulated", "start_seconds", "target")  # facts that the report has elsewhere or not at all


def build_report(
    plan: Plan, variants: Sequence[Variant], journal: Journal, created: str, looks: int, gaps: Gaps | None
) -> Report:
    """The report of a run that is over, the baseline first. looks: after how many it ended. gaps: of what differed."""
    ran = [variant for variant in variants if variant.error is None]
    entries = measured(plan, variants, journal, gaps)
    confidence = looks_confidence(plan.looks)
    report: Report = {
        "format": FORMAT,
        "created": created,
        "simulated": any(variant.facts.get("simulated", False) for variant in variants),
        "provenance": {
            **provenance(
                target=_target(plan, ran),
                engine_version=ran[0].facts["engine_version"] if ran else None,
                engine_env="ours" if engines_are_ours(variants) else "unknown",
                argvs=[variant.facts["flags"] for variant in ran],
                profile_sha256=plan.profile.sha256 if plan.profile else None,
                prompts_sha256=prompts_sha256(plan.prompts),
            ),
            "baseline": variants[0].name,
            "order": journal.order,
            "resumed": journal.resumed,
        },
        "variants": entries,
        "comparisons": comparisons((entry for entry in entries if entry["status"] == "ok"), confidence),
    }
    if plan.looks > 1:
        report["sequential"] = {
            "looks": plan.looks,
            "done": looks,
            "level": 1 - confidence,
            "stopped": looks < plan.looks,
        }
    return report


def measured(
    plan: Plan, variants: Sequence[Variant], journal: Journal, gaps: Gaps | None = None
) -> list[dict[str, Any]]:
    """An entry for each variant and load, from the blocks that are there."""
    entries: list[dict[str, Any]] = []
    for variant in variants:
        if variant.error is not None:
            entries.append({"status": "failed", "drafter": variant.name, "error": variant.error})
        else:
            entries += [_entry(plan, variant, variants[0], load, journal, gaps) for load in plan.loads]
    ok = [entry for entry in entries if entry["status"] == "ok"]
    baselines = {load_of(entry): entry for entry in ok if entry["drafter"] == variants[0].name}
    for entry in ok:
        plain = baselines.get(load_of(entry), entry)
        if entry is not plain:
            entry |= speed_of(entry, plain, looks_confidence(plan.looks)) | costs_of(entry, plain)
    return entries


def speculates(variant: Variant) -> bool:
    """Whether the engine of a variant that has started speculates."""
    return bool(variant.facts.get("algorithm", "NONE") != "NONE")


def units_of(plan: Plan) -> list[Unit]:
    """Everything that each variant is to measure at each load, in order."""
    return [Unit(repeat, part) for part in range(plan.looks) for repeat in range(plan.repeats)]


def pairs_of(plan: Plan, journal: Journal, variant: Variant, baseline: Variant, load: Load) -> list[Pair]:
    """The answers of a variant beside the baseline's, request by request."""
    found = []
    for unit in units_of(plan):
        mine, theirs = (journal.blocks.get((each.name, unit, load)) for each in (variant, baseline))
        if mine is not None and theirs is not None:
            both = zip(mine.answers, theirs.answers, strict=True)
            found += [Pair(unit.repeat, *pair) for pair in both]
    assert all((pair.mine.prompt_id, pair.mine.answer) == (pair.theirs.prompt_id, pair.theirs.answer) for pair in found)
    return found


def _entry(
    plan: Plan, variant: Variant, baseline: Variant, load: Load, journal: Journal, gaps: Gaps | None
) -> dict[str, Any]:
    units = [unit for unit in units_of(plan) if (variant.name, unit, load) in journal.blocks]
    blocks = [journal.blocks[variant.name, unit, load] for unit in units]
    entry: dict[str, Any] = {
        "status": "ok",
        "drafter": variant.name,
        **{name: value for name, value in variant.facts.items() if name not in INTERNAL},
        "temperature": plan.sampling.temperature,
        "max_tokens": plan.sampling.max_tokens,
        "seed": plan.sampling.seed,
        "answers_each": plan.sampling.answers,
        "flushed": all(block.flushed for block in blocks),
        **asdict(load),
        **figures(blocks, variant.facts["offered"]),
        "blocks": [
            {**asdict(unit), "seconds": block.seconds, "tokens": sum(answer.tokens for answer in block.answers)}
            for unit, block in zip(units, blocks, strict=True)
        ],
    }
    if plan.sampling.temperature == 0 and variant is not baseline and baseline.error is None:
        pairs = pairs_of(plan, journal, variant, baseline, load)
        entry["greedy_equal"] = greedy_equal(pairs, load.thinking, gaps, entry["dtype"])
    checked = _sampling(journal, variant, baseline) if plan.check_sampling and variant is not baseline else None
    if checked:
        entry["sampling"] = checked
    entry["requests"] = [
        row for unit, block in zip(units, blocks, strict=True) for row in request_entries(block, unit.repeat)
    ]
    if has_interval(entry):
        entry["acceptance_length_ci95"] = interval(entry, looks_confidence(plan.looks))
    for name, part in entry["categories"].items():
        own = {**part, "requests": [row for row in entry["requests"] if row["category"] == name]}
        if has_interval(own):
            part["acceptance_length_ci95"] = interval(own, looks_confidence(plan.looks))
    return entry


def _sampling(journal: Journal, variant: Variant, baseline: Variant) -> dict[str, Any] | None:
    """Whether a variant samples what the baseline samples, over the prompts that were sampled; None where nothing
    varied enough to tell. The smallest p-value counts, times the number of prompts (Bonferroni)."""
    mine, theirs = (journal.samples.get(each.name) for each in (variant, baseline))
    if mine is None or theirs is None:
        return None
    found = []
    for sample, reference in zip(mine, theirs, strict=True):
        try:
            found.append(compare(Continuations(reference).tokens, Continuations(sample).tokens))
        except ValueError:  # a prompt after which one token all but always follows
            continue
    if not found:
        return None
    p_value = min(1.0, len(found) * min(each.p_value for each in found))
    return {
        "differs": p_value < ERROR_RATE,
        "p_value": p_value,
        "error_rate": ERROR_RATE,
        "samples": sum(each.samples for each in found),
        "reference_samples": sum(each.reference_samples for each in found),
        "prompts": len(found),
    }


def _target(plan: Plan, ran: Sequence[Variant]) -> dict[str, Any]:
    """The target by the profile, or by what an engine that ran already says of itself."""
    if plan.profile is not None:
        return plan.profile.target.model_dump(exclude_none=True)
    return dict(ran[0].facts["target"]) if ran else {"served_name": "?", "path": "?"}
