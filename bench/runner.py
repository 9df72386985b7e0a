"""Runs every variant with the same prompts and loads, block by block in turns, and makes the report of it.

The baseline runs first, so that each drafter's greedy answers can be compared with it, token for token. What is done
is in the journal: a run that was killed goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from bench.attached import Attached
from bench.evidence import all_clear
from bench.journal import Journal, Key
from bench.load import Block, Endpoint, Load, LoadError, flush, send_block, warm_up
from bench.lossless import Gaps, ask_gaps, prompt_ids, question_of
from bench.progress import Progress
from bench.result import build_report, measured, pairs_of, speculates, units_of
from bench.sampling import Case, SamplingError, collect
from bench.schedule import Unit, in_order, parts_of, rounds
from bench.stats import looks_confidence
from bench.variants import Plan, PlanError, Variant, facts_of, offered, variants_of
from drafter.data.prompts import prompts_sha256
from drafter.report import Report, machine, now
from server.engine import EngineError

__all__ = ["Plan", "PlanError", "Variant", "fingerprint", "run", "variants_of"]

STATE_SETTLES_S = 5.0  # an engine's watcher notices a death within 2 s
SAMPLED_PROMPTS = 4
SAMPLED_TOKENS = 4
REFERENCE_TIMES = 4  # the baseline is sampled so much more often, since all others are held against it


def fingerprint(plan: Plan, variants: Sequence[Variant]) -> dict[str, Any]:
    """Everything that a block depends on: a run can only be gone on with where all of it is the same."""
    return {
        "profile": plan.profile.sha256 if plan.profile else None,
        "prompts": prompts_sha256(plan.prompts),
        "sampling": asdict(plan.sampling),
        "concurrency and thinking": [asdict(load) for load in plan.loads],
        "drafters": [variant.identity for variant in variants],
        "repeats": plan.repeats,
        "looks": plan.looks,
        "check-sampling": plan.check_sampling,
        "machine": machine(),
    }


def run(plan: Plan, variants: Sequence[Variant], progress: Progress, journal: Journal) -> Report:
    """Measure every variant and make the report. A variant that fails is reported as failed; the others go on.

    KeyboardInterrupt passes through after the engine that was running has stopped; the journal stays.
    """
    created = now()
    bench = _Bench(plan, variants, progress, journal)
    try:
        looks = bench.measure()
        gaps = bench.look_into_differences()
    finally:
        bench.down()
    return build_report(plan, variants, journal, created, looks, gaps)


class _Bench:
    """One run: the engine that is up, if any, and what is left to do."""

    def __init__(self, plan: Plan, variants: Sequence[Variant], progress: Progress, journal: Journal) -> None:
        self.plan, self.variants, self.progress, self.journal = plan, variants, progress, journal
        self.parts = parts_of(plan.prompts, plan.looks)
        self.up: Variant | None = None
        self.endpoint: Endpoint | None = None
        for variant in variants:
            variant.facts = dict(journal.facts.get(variant.name, {}))

    def measure(self) -> int:
        """Send every block that the journal lacks; returns after how many looks it stopped."""
        plan = self.plan
        for look in range(plan.looks):
            units = [Unit(repeat, look) for repeat in range(plan.repeats)]
            self._measure_units(units)
            if look + 1 < plan.looks and self._clear(look + 1):
                return look + 1
        return plan.looks

    def _measure_units(self, units: Sequence[Unit]) -> None:
        first = self.variants[0]
        if not first.facts and first.error is None:
            with self._watched(first):
                self._bring_up(first)
        seconds = max((each.facts.get("start_seconds", 0.0) for each in self.variants), default=0.0)
        for number, some in enumerate(rounds(units, self.plan.interleave, seconds)):
            for place in in_order(len(self.variants), number, self.plan.interleave, seconds):
                self._measure(self.variants[place], some)

    def _measure(self, variant: Variant, units: Sequence[Unit]) -> None:
        """What is missing of these blocks, and of the sampling check, on this variant's engine."""
        wanted = [(variant.name, unit, load) for unit in units for load in self.plan.loads]
        missing = [key for key in wanted if key not in self.journal.blocks]
        unsampled = self.plan.check_sampling > 0 and variant.name not in self.journal.samples
        if variant.error is not None or not (missing or unsampled):
            return
        with self._watched(variant):
            endpoint = self._bring_up(variant)
            for key in missing:
                self.journal.add(key, self._send(endpoint, variant, key[1], key[2]))
            if unsampled:
                self._sample(endpoint, variant)
        if variant.error is not None or all(key in self.journal.blocks for key in self._keys(variant)):
            self.progress.finished(variant.name, variant.error)

    def _keys(self, variant: Variant) -> list[Key]:
        """Every block that is asked for of a variant."""
        return [(variant.name, unit, load) for unit in units_of(self.plan) for load in self.plan.loads]

    def _send(self, endpoint: Endpoint, variant: Variant, unit: Unit, load: Load) -> Block:
        plan, places = self.plan, self.parts[unit.part]
        self.progress.stage(variant.name, self._words(unit, load))
        flushed = self._flush(endpoint, variant)
        block = send_block(
            endpoint,
            [plan.prompts[place] for place in places],
            replace(plan.sampling, thinking=load.thinking),
            load.concurrency,
            [unit.repeat * len(plan.prompts) + place for place in places],
            self.progress.answered,
        )
        return replace(block, flushed=flushed)

    def _flush(self, endpoint: Endpoint, variant: Variant) -> bool:
        """Empty the caches; an engine of others that will not is measured all the same, and the report says so."""
        try:
            flush(endpoint)
        except LoadError as error:
            if not isinstance(variant.engine, Attached):
                raise
            self.progress.stage(variant.name, f"its caches were not emptied: {error}")
            return False
        return True

    def _words(self, unit: Unit, load: Load) -> str:
        plan = self.plan
        of = [f"repeat {unit.repeat + 1} of {plan.repeats}"] if plan.repeats > 1 else []
        of += [f"part {unit.part + 1} of {plan.looks}"] if plan.looks > 1 else []
        of += [f"concurrency {load.concurrency}"] if len({each.concurrency for each in plan.loads}) > 1 else []
        of += [f"thinking {load.thinking}"] if len({each.thinking for each in plan.loads}) > 1 else []
        return ", ".join(of) or "measuring"

    def _bring_up(self, variant: Variant) -> Endpoint:
        """The variant's engine, up and warm; the one before is stopped. Raises EngineError or LoadError."""
        if self.up is variant and self.endpoint is not None:
            return self.endpoint
        self.down()
        plan, began = self.plan, time.perf_counter()
        if variant.engine.state != "new":
            variant.engine = variant.make()
        engine, self.up = variant.engine, variant
        engine.start(lambda stage: self.progress.stage(variant.name, stage))
        endpoint = Endpoint(
            url=engine.url,
            model=engine.served_name,
            speculates=engine.drafter.algorithm != "NONE",
            headers=engine.headers,
            admin_headers=engine.admin_headers,
        )
        self._recognise(variant)
        self.progress.stage(variant.name, "sending warm-up requests")
        for load in plan.loads:
            warm_up(endpoint, replace(plan.sampling, thinking=load.thinking), load.concurrency)
        seconds = time.perf_counter() - began
        self.progress.started(seconds)
        self.journal.started(variant.name)
        if variant.name not in self.journal.facts:
            variant.facts["start_seconds"] = seconds
            self.journal.know(variant.name, variant.facts)
        self.endpoint = endpoint
        return endpoint

    def _recognise(self, variant: Variant) -> None:
        """A second engine of a variant must be what the first one was, or its blocks are of two things."""
        found = facts_of(variant.engine) | {"offered": offered(variant.engine), "simulated": variant.engine.simulated}
        for key in ("engine_version", "dtype", "drafter_sha256", "ngram", "steps", "topk", "draft_tokens"):
            if variant.facts and variant.facts.get(key) != found.get(key):
                raise EngineError(
                    f"its engine came up with {key} {found.get(key)!r}, the one before had {variant.facts.get(key)!r}: "
                    "its blocks cannot be put together, so measure anew in another --out."
                )
        variant.facts = {**found, **variant.facts}

    def down(self) -> None:
        """Stop the engine that is up."""
        up, self.up, self.endpoint = self.up, None, None
        if up is not None:
            up.engine.stop()

    @contextmanager
    def _watched(self, variant: Variant) -> Iterator[None]:
        """What goes wrong is the variant's error; its engine is stopped then."""
        try:
            yield
        except EngineError as error:
            variant.error = str(error)
        except (LoadError, SamplingError) as error:
            variant.error = _with_engine(variant, str(error))
        if variant.error is not None:
            self.down()

    def _clear(self, looks: int) -> bool:
        """Whether every difference between drafters is clear after so many looks."""
        found = measured(self.plan, self.variants, self.journal)
        ok = [entry for entry in found if entry["status"] == "ok"]
        clear = all_clear(ok, looks_confidence(self.plan.looks))
        if clear:
            self.progress.stage("all", f"every difference is clear after {looks} of {self.plan.looks} parts")
        return clear

    def look_into_differences(self) -> Gaps | None:
        """Ask the baseline's engine how near a tie was, wherever a greedy answer is not the baseline's.

        None where nothing can be asked: at temperature, or with a baseline that speculates or failed.
        """
        baseline = self.variants[0]
        if self.plan.sampling.temperature > 0 or baseline.error is not None or speculates(baseline):
            return None
        questions = [
            question
            for variant in self.variants[1:]
            if variant.error is None
            for load in self.plan.loads
            for pair in pairs_of(self.plan, self.journal, variant, baseline, load)
            if (question := question_of(pair, load.thinking))
        ]
        if not questions:
            return {}
        try:
            endpoint = self._bring_up(baseline)
            self.progress.stage(baseline.name, f"asking how near {len(set(questions))} ties were")
            prompts = {prompt.id: prompt for prompt in self.plan.prompts}
            return ask_gaps(endpoint, questions, prompts, self.plan.sampling)
        except (EngineError, LoadError) as error:
            self.progress.stage(baseline.name, f"the differences were not looked into: {str(error).splitlines()[0]}")
            return None

    def _sample(self, endpoint: Endpoint, variant: Variant) -> None:
        """Continuations for the sampling check, drawn at the temperature of the run."""
        plan = self.plan
        chosen = plan.prompts[:: max(1, len(plan.prompts) // SAMPLED_PROMPTS)][:SAMPLED_PROMPTS]
        ids = prompt_ids(endpoint, chosen, plan.sampling)
        cases = [Case(tuple(prompt), temperature=plan.sampling.temperature) for prompt in ids]
        times = REFERENCE_TIMES if variant is self.variants[0] else 1
        self.progress.stage(variant.name, "sampling continuations")
        found = collect(
            endpoint.url,
            endpoint.headers,
            cases,
            samples=plan.check_sampling * times,
            tokens=SAMPLED_TOKENS,
            concurrency=max(load.concurrency for load in plan.loads),
            title=f"{variant.name}: samples",
        )
        self.journal.sampled(variant.name, [each.rows for each in found])


def _with_engine(variant: Variant, what: str) -> str:
    """What went wrong, what became of the engine meanwhile, and the last lines of its log."""
    engine, deadline = variant.engine, time.monotonic() + STATE_SETTLES_S
    if isinstance(engine, Attached):
        return what
    while engine.state == "ready" and time.monotonic() < deadline:
        time.sleep(0.1)
    fate = "" if engine.state == "ready" else f"; the engine is {engine.state}"
    tail = "\n  ".join(engine.log_tail(20))
    return f"{what.removesuffix('.')}{fate}. Its last log lines:\n  {tail}"
