"""What is measured: drafters by name, NGRAM with parameters, and engines that already run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from bench.attached import Attached
from bench.load import Load, Sampling
from bench.schedule import Interleave
from drafter.checkpoint.manifest import MANIFEST
from drafter.data.prompts import Prompt
from drafter.report import file_sha256
from server.config import DrafterTable, NgramTable, Profile
from server.drafters import ActiveDrafter
from server.engine import Engine

AnyEngine = Engine | Attached
NGRAM_HINT = "write ngram:max_trie_depth=12,external_corpus_path=FILE"


class PlanError(ValueError):
    """A bench that cannot be run as asked; nothing was started."""


@dataclass(frozen=True)
class Plan:
    """What to measure. `drafters` as given by the user, the baseline among them or not.

    profile: of the engines that the bench starts; None where all of them run already. urls: NAME=URL or URL of each
    that does. baseline: None takes `none`, or without a drafter the first of the URLs. looks: so many parts of the
    prompts, with a look at the differences after each but the last, and a stop where all are clear. check_sampling:
    continuations of each prompt of the sampling check; 0 checks nothing.
    """

    profile: Profile | None
    drafters: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    baseline: str | None = None
    loads: tuple[Load, ...] = (Load(4),)
    num_steps: int | None = None
    repeats: int = 1
    urls: tuple[str, ...] = ()
    key_file: Path | None = None
    interleave: Interleave = "auto"
    looks: int = 1
    check_sampling: int = 0


@dataclass
class Variant:
    """One drafter and the engine to measure it on; an engine is started once, so `make` gives the next.

    facts: what the report says of it, known since the first start. error: why it failed.
    """

    name: str
    make: Callable[[], AnyEngine]
    engine: AnyEngine
    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What another run has to have in common with this one to be gone on with."""
        drafter = self.engine.drafter
        url = self.engine.url if isinstance(self.engine, Attached) else None
        found = {"name": self.name, "sha256": drafter.sha256, "url": url, "num_steps": drafter.num_steps}
        return found | {"draft_tokens": drafter.draft_tokens, "ngram": ngram_facts(drafter.table)}


def variants_of(plan: Plan) -> list[Variant]:
    """The variants in the order in which they run, the baseline first. Starts nothing.

    A variant is named as its drafter is, or as the user wrote it where two folders have one name. Raises PlanError,
    or what Engine raises for a drafter that it cannot find or serve.
    """
    _check(plan)
    for kind, given in (("drafter", plan.drafters), ("URL", plan.urls)):
        repeated = sorted({name for name in given if given.count(name) > 1})
        if repeated:
            raise PlanError(f"{kind} {repeated[0]!r} is given twice: give each once, use --repeats to repeat.")
    urls = dict(_named_url(given) for given in plan.urls)
    baseline = plan.baseline or ("none" if plan.drafters or "none" in urls else next(iter(urls)))
    typed = list(plan.drafters)
    both = sorted({*typed} & {*urls})
    if both or len(urls) < len(plan.urls):
        raise PlanError(f"{(both or [*urls])[0]!r} names two variants: give each URL a name of its own, NAME=URL.")
    if baseline not in urls:
        if plan.profile is None:
            raise PlanError(f"baseline {baseline!r} is none of the URLs ({', '.join(urls)}): name one of them.")
        typed = [baseline, *(name for name in typed if name != baseline)]
    running = [(name, _attaching(plan, name, url)) for name, url in urls.items()]
    starting = [(name, _starting(plan, name)) for name in typed]
    made = sorted(starting + running, key=lambda each: each[0] != baseline)
    engines = [make() for _, make in made]
    names = [engine.drafter.name for engine in engines]
    return [
        Variant(name if names.count(name) == 1 else as_typed, make, engine)
        for (as_typed, make), name, engine in zip(made, names, engines, strict=True)
    ]


def _check(plan: Plan) -> None:
    if plan.key_file is not None and not plan.urls:
        raise PlanError("--key-file is for engines that already run: name one by --url, or leave --key-file out.")
    if plan.num_steps is not None and not plan.drafters:
        raise PlanError("an engine that already runs keeps its draft steps: leave --num-steps out, or give --drafter.")
    most = max(load.concurrency for load in plan.loads)
    if plan.profile is not None:
        longest = plan.profile.engine.max_running_requests
        if most * plan.sampling.answers > longest:
            raise PlanError(
                f"concurrency is {most}{_times(plan.sampling.answers)}, but the profile runs {longest} requests at a "
                "time (engine.max_running_requests): the rest would only wait, so lower the one or raise the other."
            )
        if plan.sampling.max_tokens >= plan.profile.engine.context_length:
            raise PlanError(
                f"max tokens is {plan.sampling.max_tokens}, but the profile's context_length of "
                f"{plan.profile.engine.context_length} must hold the prompt too: lower it."
            )
    smallest = len(plan.prompts) // plan.looks
    if most > smallest:
        raise PlanError(
            f"concurrency is {most}, but a block has {smallest} prompts, so that many would never run at once: take "
            "more prompts, fewer looks, or a lower concurrency."
        )
    if plan.looks > 1 and len(plan.drafters) + len(plan.urls) < 2:
        raise PlanError("looks compare drafters with each other: name two, or leave --looks out.")
    if plan.looks > 1 and plan.interleave == "off":
        raise PlanError("a look compares what all variants have measured: leave --interleave off out, or --looks.")
    if plan.check_sampling and plan.sampling.temperature == 0:
        raise PlanError("greedy answers are not sampled: give --temperature with --check-sampling.")


def _times(answers: int) -> str:
    return f" with {answers} answers each" if answers > 1 else ""


def _starting(plan: Plan, name: str) -> Callable[[], AnyEngine]:
    assert plan.profile is not None
    profile = _with_ngram(plan.profile, name)
    return lambda: Engine(profile, drafter=name, num_steps=plan.num_steps)


def _attaching(plan: Plan, name: str, url: str) -> Callable[[], AnyEngine]:
    return lambda: Attached(name, url, plan.key_file)


def _named_url(given: str) -> tuple[str, str]:
    name, equals, url = given.partition("=")
    if not equals or "://" in name:
        name, url = given, given
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # half of an IPv6 address, or a port beyond all ports
        whole = False
    if not whole:
        raise PlanError(f"--url {given!r} is no address: write http://HOST:PORT, or NAME=http://HOST:PORT.")
    return name, url


def _with_ngram(profile: Profile, name: str) -> Profile:
    """The profile with a drafter of this name, where the name is NGRAM with parameters of its own.

    `ngram:key=value,…` starts from the profile's [drafters.ngram]; a corpus is taken from the current folder.
    """
    base, colon, text = name.partition(":")
    if base != "ngram" or not colon or name in profile.drafters:
        return profile
    given: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key in given:
            raise PlanError(f"drafter {name!r}: {part!r} is no key=value, or is there twice: {NGRAM_HINT}.")
        given[key] = int(value) if value.isdecimal() else value
    corpus = given.get("external_corpus_path")
    if corpus is not None:
        path = Path(str(corpus)).expanduser().absolute()
        if not path.is_file():
            raise PlanError(f"drafter {name!r}: the corpus {path} is not a file: correct the path.")
        given["external_corpus_path"] = str(path)
    before = profile.drafters["ngram"].ngram.model_dump() if "ngram" in profile.drafters else {}
    try:
        table = NgramTable(**{**before, **given})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        known = ", ".join(NgramTable.model_fields)
        raise PlanError(
            f"drafter {name!r}: {first['loc'][0]}: {first['msg'].lower()} (keys are {known}): {NGRAM_HINT}."
        ) from None
    drafters = {**profile.drafters, name: DrafterTable(algorithm="NGRAM", ngram=table)}
    return profile.model_copy(update={"drafters": drafters})


def ngram_facts(table: DrafterTable | None) -> dict[str, Any] | None:
    """NGRAM's parameters where it has any, and the hash of its corpus, which is part of what it is."""
    if table is None or table.algorithm != "NGRAM":
        return None
    found = table.ngram.model_dump(exclude_none=True)
    corpus = table.ngram.external_corpus_path
    if corpus is not None and Path(corpus).is_file():
        found["external_corpus_sha256"] = file_sha256(Path(corpus))
    return found


def facts_of(engine: AnyEngine) -> dict[str, Any]:
    """What the report says of an engine that has started."""
    drafter = engine.drafter
    found = {
        "algorithm": drafter.algorithm,
        "drafter_sha256": drafter.sha256,
        "foreign_vocabulary": _foreign(drafter),
        "ngram": ngram_facts(drafter.table),
        "engine_version": engine.version,
        "flags": engine.argv,
        "dtype": engine.resolved["dtype"],
        "steps": drafter.num_steps or None,  # the engine says 0 for NGRAM, which has none
        "topk": drafter.topk,
        "draft_tokens": drafter.draft_tokens,
    }
    if isinstance(engine, Attached):
        found["target"] = {"served_name": engine.served_name, "path": str(engine.resolved.get("model_path", "?"))}
    return {name: value for name, value in found.items() if value is not None}


def _foreign(drafter: ActiveDrafter) -> bool | None:
    """Whether a drafter's own vocabulary was chosen elsewhere: it has one, and no manifest of ours."""
    if drafter.folder is None:
        return None
    rows = drafter.folder.config.get("draft_vocab_size")
    return rows not in (None, drafter.folder.config["vocab_size"]) and not (drafter.folder.path / MANIFEST).exists()


def offered(engine: AnyEngine) -> int:
    """The most draft tokens that one verify step can accept: the depth of the chain or tree; 0 without speculation."""
    drafter = engine.drafter
    if drafter.algorithm == "NONE" or drafter.draft_tokens is None:
        return 0
    if drafter.algorithm == "NGRAM" or drafter.num_steps is None:
        return drafter.draft_tokens - 1
    return drafter.num_steps


def engines_are_ours(variants: Sequence[Variant]) -> bool:
    """Whether the bench started every engine itself."""
    return not any(isinstance(variant.engine, Attached) for variant in variants)
