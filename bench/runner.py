"""Runs every variant on an engine of its own, with the same prompts, and makes the report of it.

The baseline runs first, so that each drafter's greedy answers can be compared with it, token for token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from bench.evidence import comparisons, has_interval, interval
from bench.load import Answer, Block, Endpoint, LoadError, Sampling, send_block, warm_up
from bench.progress import Progress
from drafter.acceptance import acceptance_length, add_histograms, cond_acc, flatness, full_acc
from drafter.data.prompts import Prompt, prompts_sha256
from drafter.report import FORMAT, Report, now, provenance
from server.config import Profile
from server.engine import Engine, EngineError

STATE_SETTLES_S = 5.0  # an engine's watcher notices a death within 2 s


class PlanError(ValueError):
    """A bench that cannot be run as asked; nothing was started."""


@dataclass(frozen=True)
class Plan:
    """What to measure. `drafters` as given by the user, the baseline among them or not."""

    profile: Profile
    drafters: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    baseline: str = "none"
    concurrency: int = 4
    num_steps: int | None = None
    repeats: int = 1


@dataclass
class Variant:
    """One drafter, its engine, and what was measured on it: one block for each repeat, or an error."""

    name: str
    engine: Engine
    blocks: list[Block] = field(default_factory=list)
    error: str | None = None

    @property
    def answers(self) -> list[Answer]:
        return [answer for block in self.blocks for answer in block.answers]


def variants_of(plan: Plan) -> list[Variant]:
    """The variants in the order in which they run, the baseline first. Starts nothing.

    A variant is named as its drafter is, or as the user wrote it where two folders have one name. Raises PlanError,
    or what Engine raises for a drafter that it cannot find or serve.
    """
    longest = plan.profile.engine.max_running_requests
    if plan.concurrency > longest:
        raise PlanError(
            f"concurrency is {plan.concurrency}, but the profile runs {longest} requests at a time "
            "(engine.max_running_requests): the rest would only wait, so lower the one or raise the other."
        )
    if plan.sampling.max_tokens >= plan.profile.engine.context_length:
        raise PlanError(
            f"max tokens is {plan.sampling.max_tokens}, but the profile's context_length of "
            f"{plan.profile.engine.context_length} must hold the prompt too: lower it."
        )
    typed = [plan.baseline, *(name for name in plan.drafters if name != plan.baseline)]
    repeated = {name for name in plan.drafters if plan.drafters.count(name) > 1}
    if repeated:
        raise PlanError(f"drafter {sorted(repeated)[0]!r} is given twice: give each once, use --repeats to repeat.")
    engines = [Engine(plan.profile, drafter=name, num_steps=plan.num_steps) for name in typed]
    names = [engine.drafter.name for engine in engines]
    return [
        Variant(name if names.count(name) == 1 else as_typed, engine)
        for as_typed, name, engine in zip(typed, names, engines, strict=True)
    ]


def run(plan: Plan, variants: Sequence[Variant], progress: Progress) -> Report:
    """Measure every variant and make the report. A variant that fails is reported as failed; the others go on.

    KeyboardInterrupt passes through after the engine that was running has stopped.
    """
    created = now()
    for variant in variants:
        _measure(plan, variant, progress)
    return build_report(plan, variants, created)


def _measure(plan: Plan, variant: Variant, progress: Progress) -> None:
    engine = variant.engine
    began = time.perf_counter()
    try:
        engine.start(lambda stage: progress.stage(variant.name, stage))
        endpoint = Endpoint(
            url=engine.url,
            model=engine.served_name,
            speculates=engine.drafter.algorithm != "NONE",
            headers=engine.headers,
            admin_headers=engine.admin_headers,
        )
        progress.stage(variant.name, "sending warm-up requests")
        warm_up(endpoint, plan.sampling, plan.concurrency)
        progress.started(time.perf_counter() - began)
        for repeat in range(plan.repeats):
            progress.stage(variant.name, f"repeat {repeat + 1} of {plan.repeats}" if plan.repeats > 1 else "measuring")
            variant.blocks.append(
                send_block(endpoint, plan.prompts, plan.sampling, plan.concurrency, repeat, progress.answered)
            )
    except EngineError as error:
        variant.error = str(error)
    except LoadError as error:
        variant.error = _with_engine(engine, str(error))
    finally:
        engine.stop()
    progress.finished(variant.name, variant.error)


def _with_engine(engine: Engine, what: str) -> str:
    """What went wrong, what became of the engine meanwhile, and the last lines of its log."""
    deadline = time.monotonic() + STATE_SETTLES_S
    while engine.state == "ready" and time.monotonic() < deadline:
        time.sleep(0.1)
    fate = "" if engine.state == "ready" else f"; the engine is {engine.state}"
    tail = "\n  ".join(engine.log_tail(20))
    return f"{what.removesuffix('.')}{fate}. Its last log lines:\n  {tail}"


def build_report(plan: Plan, variants: Sequence[Variant], created: str) -> Report:
    """The report of variants that were measured, the baseline first."""
    ran = [variant for variant in variants if variant.error is None]
    target = plan.profile.target.model_dump(exclude_none=True)
    entries = [_entry(plan, variant, variants[0]) for variant in variants]
    return {
        "format": FORMAT,
        "created": created,
        "simulated": any(variant.engine.simulated for variant in variants),
        "provenance": {
            **provenance(
                target=target,
                engine_version=ran[0].engine.version if ran else None,
                engine_env="ours",
                argvs=[variant.engine.argv for variant in ran],
                profile_sha256=plan.profile.sha256,
                prompts_sha256=prompts_sha256(plan.prompts),
            ),
            "baseline": variants[0].name,
        },
        "variants": entries,
        "comparisons": comparisons(entry for entry in entries if entry["status"] == "ok"),
    }


def _entry(plan: Plan, variant: Variant, baseline: Variant) -> dict[str, Any]:
    drafter = variant.engine.drafter
    entry: dict[str, Any] = {"status": "ok", "drafter": variant.name}
    if variant.error is not None:
        return {**entry, "status": "failed", "error": variant.error}
    described = {
        "algorithm": drafter.algorithm,
        "drafter_sha256": drafter.sha256,
        "engine_version": variant.engine.version,
        "flags": variant.engine.argv,
        "dtype": variant.engine.resolved["dtype"],
        "temperature": plan.sampling.temperature,
        "max_tokens": plan.sampling.max_tokens,
        "seed": plan.sampling.seed,
        "thinking": plan.sampling.thinking,
        "steps": drafter.num_steps or None,  # the engine says 0 for NGRAM, which has none
        "topk": drafter.topk,
        "draft_tokens": drafter.draft_tokens,
        "concurrency": plan.concurrency,
    }
    entry |= {name: value for name, value in described.items() if value is not None}
    entry |= figures(variant.blocks, offered(variant.engine))
    if plan.sampling.temperature == 0 and variant is not baseline and baseline.error is None:
        entry["greedy_equal"] = greedy_equal(variant.answers, baseline.answers)
    entry["requests"] = [
        {
            "prompt_id": answer.prompt_id,
            "category": answer.category,
            "repeat": repeat,
            "histogram": list(answer.histogram),
            "tokens": answer.tokens,
            "seconds": answer.seconds,
            "ttft_s": answer.ttft_s,
            "looping": answer.looping,
            "output_sha256": answer.output_sha256,
        }
        for repeat, block in enumerate(variant.blocks)
        for answer in block.answers
    ]
    if has_interval(entry):
        entry["acceptance_length_ci95"] = interval(entry)
    return entry


def offered(engine: Engine) -> int:
    """The most draft tokens that one verify step can accept: the depth of the chain or tree; 0 without speculation."""
    drafter = engine.drafter
    if drafter.algorithm == "NONE" or drafter.draft_tokens is None:
        return 0
    if drafter.algorithm == "NGRAM" or drafter.num_steps is None:
        return drafter.draft_tokens - 1
    return drafter.num_steps


def figures(blocks: Sequence[Block], positions: int) -> dict[str, Any]:
    """The figures of one variant, from its answers. A figure that is not defined is left out.

    positions: draft positions a step offered, so that one where nothing was ever accepted counts as 0.
    Speed is over the wall time of the blocks; TPOT is (seconds - ttft) / (tokens - 1) of a request of two tokens or
    more; ITL is the time between two pieces of a stream, each of which may carry several tokens.
    """
    answers = [answer for block in blocks for answer in block.answers]
    seconds = sum(block.seconds for block in blocks)
    result: dict[str, Any] = {
        **_acceptance(answers, positions),
        "tokens_per_second": sum(answer.tokens for answer in answers) / seconds,
    }
    for name, share, values in (
        ("ttft_ms_p50", 50, [answer.ttft_s for answer in answers]),
        ("tpot_ms_p50", 50, [(a.seconds - a.ttft_s) / (a.tokens - 1) for a in answers if a.tokens > 1]),
        ("itl_ms_p99", 99, [gap for answer in answers for gap in answer.gaps_s]),
    ):
        if values:
            result[name] = 1000 * float(numpy.percentile(values, share))
    categories = dict.fromkeys(answer.category for answer in answers)
    result["categories"] = {
        category: _acceptance([answer for answer in answers if answer.category == category], positions)
        for category in categories
    }
    result["blocks"] = [
        {"repeat": repeat, "seconds": block.seconds, "tokens": sum(answer.tokens for answer in block.answers)}
        for repeat, block in enumerate(blocks)
    ]
    return result


def _acceptance(answers: Sequence[Answer], positions: int) -> dict[str, Any]:
    """What the histograms of some answers say, and how many of them loop."""
    summed = add_histograms(answer.histogram for answer in answers)
    calm = add_histograms(answer.histogram for answer in answers if not answer.looping)
    padded = summed + [0] * (positions + 1 - len(summed)) if summed else []
    found: dict[str, Any] = {
        "acceptance_length": acceptance_length(summed),
        "acceptance_length_no_loops": acceptance_length(calm),
        "full_acc": full_acc(padded) or None,
        "cond_acc": cond_acc(padded) or None,
        "flatness": flatness(padded),
        "loop_share": sum(answer.looping for answer in answers) / len(answers),
        "answers": len(answers),
        "tokens": sum(answer.tokens for answer in answers),
    }
    return {name: value for name, value in found.items() if value is not None}


def greedy_equal(answers: Sequence[Answer], baseline: Sequence[Answer]) -> dict[str, int]:
    """How many answers have exactly the baseline's token ids, prompt by prompt and repeat by repeat."""
    pairs = list(zip(answers, baseline, strict=True))
    assert all(mine.prompt_id == theirs.prompt_id for mine, theirs in pairs)
    return {"equal": sum(mine.output_ids == theirs.output_ids for mine, theirs in pairs), "total": len(pairs)}
