"""Speculation at a temperature samples what plain decoding samples: 20,000 continuations of every kind, on the real engine.

Each kind is compared with the engine's own plain decoding, and with a larger sample that transformers draws from the
same weights. Three prompts with three ways to sample travel side by side in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import server.engine
from bench.sampling import Case, Ranking, Samples, collect, compare
from drafter.acceptance import acceptance_length
from server.config import load_profile
from server.engine import Engine
from tests.engine.conftest import EnginePool
from tests.tiny import TinyPair

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SAMPLES, TOKENS = 20_000, 4
LEARNED, REFERENCE = 60_000, 180_000  # drawn by transformers: to rank tokens, and to compare with
CONCURRENCY = 128
PLAIN = ("none", {})
SPECULATIVE = {
    "chain": ("mha_noised_a", {"num_steps": 3}),
    "tree": ("mha_noised_a", {"num_steps": 3, "topk": 4, "draft_tokens": 8}),
    "ngram": ("ngram", {}),
}
HOW = {
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "top-k": {"temperature": 1.2, "top_k": 8},
}
# The chance that a right engine fails any comparison of this file, and of each: transformers with every kind, plain
# decoding with every speculative one.
FAMILY_ERROR_RATE = 0.001
ERROR_RATE = FAMILY_ERROR_RATE / (len(HOW) * (2 * len(SPECULATIVE) + 1))


class Reference:
    """What transformers draws: a ranking, and continuations that had no part in it."""

    def __init__(self, model: PreTrainedModel, case: Case, random: np.random.Generator) -> None:
        drawn = draw(model, case, LEARNED + REFERENCE, random)
        self.ranking, self.tokens = Ranking(drawn[:LEARNED]), drawn[LEARNED:]


def cut(logits: np.ndarray, case: Case) -> np.ndarray:
    """Distributions [B, V]: of the top_k likeliest tokens, those before which at most top_p of everything has passed."""
    shares = np.exp((logits - logits.max(axis=1, keepdims=True)) / case.temperature)
    shares /= shares.sum(axis=1, keepdims=True)
    order = np.argsort(-shares, axis=1, kind="stable")
    ranked = np.take_along_axis(shares, order, axis=1)
    top_k = case.top_k if case.top_k > 0 else shares.shape[1]
    ranked[(ranked.cumsum(axis=1) - ranked > case.top_p) | (np.arange(shares.shape[1]) >= top_k)] = 0.0
    np.put_along_axis(shares, order, ranked, axis=1)
    return shares / shares.sum(axis=1, keepdims=True)


@torch.inference_mode()
def draw(model: PreTrainedModel, case: Case, samples: int, random: np.random.Generator) -> np.ndarray:
    """Independent continuations [N, L]; each prefix that occurs is computed once and its successors are drawn at once."""
    rows, counts = np.empty((1, 0), np.int64), np.array([samples])
    for _ in range(TOKENS):
        longer, how_many = [], []
        for at in range(0, len(rows), 4096):
            some = rows[at : at + 4096]
            text = np.concatenate([np.tile(case.prompt, (len(some), 1)), some], axis=1)
            logits = model(torch.from_numpy(text), use_cache=False, logits_to_keep=1).logits[:, -1]
            drawn = random.multinomial(counts[at : at + 4096], cut(logits.double().numpy(), case))
            before, token = drawn.nonzero()
            longer.append(np.concatenate([some[before], token[:, None]], axis=1))
            how_many.append(drawn[before, token])
        rows, counts = np.concatenate(longer), np.concatenate(how_many)
    return random.permutation(np.repeat(rows, counts, axis=0))


@pytest.fixture(scope="module")
def pair(tiny: Callable[[str], TinyPair]) -> TinyPair:
    return tiny("llama")


@pytest.fixture(scope="module")
def cases(pair: TinyPair) -> dict[str, Case]:
    """Three prompts of different lengths; one repeats itself, so that NGRAM has drafts from the start."""
    encode = AutoTokenizer.from_pretrained(pair.target)
    texts = ("the eagle hunts over water", "it dives and sees a fish, it dives and sees a fish, it dives", "spring")
    return {
        name: Case(tuple(encode(text)["input_ids"]), **how)
        for text, (name, how) in zip(texts, HOW.items(), strict=True)
    }


@pytest.fixture(scope="module")
def references(pair: TinyPair, cases: dict[str, Case]) -> dict[str, Reference]:
    model = AutoModelForCausalLM.from_pretrained(pair.reference, dtype=torch.float32).eval()
    random = np.random.default_rng(23)
    return {name: Reference(model, case, random) for name, case in cases.items()}


@pytest.fixture(scope="module")
def sampled(
    engines: EnginePool, pair: TinyPair, cases: dict[str, Case]
) -> Iterator[Callable[[str], dict[str, Samples]]]:
    """`sampled("chain")["top-p"]`: that kind's continuations, drawn when they are first asked for."""
    drawn: dict[str, dict[str, Samples]] = {}

    def of(kind: str) -> dict[str, Samples]:
        if kind not in drawn:
            drafter, options = SPECULATIVE.get(kind, PLAIN)
            engine = engines.get(pair, drafter, requests=CONCURRENCY, **options)
            drawn[kind] = dict(zip(cases, draw_from(engine, list(cases.values()), kind), strict=True))
        return drawn[kind]

    yield of
    engines.stop()


def draw_from(engine: Engine, cases: list[Case], title: str) -> list[Samples]:
    return collect(
        engine.url, engine.headers, cases, samples=SAMPLES, tokens=TOKENS, concurrency=2 * CONCURRENCY, title=title
    )


@pytest.mark.parametrize("how", HOW)
def test_plain_decoding_samples_the_model(
    sampled: Callable[[str], dict[str, Samples]], references: dict[str, Reference], how: str
) -> None:
    plain, reference = sampled("none")[how], references[how]
    found = compare(reference.tokens, plain.tokens, error_rate=ERROR_RATE, ranking=reference.ranking)
    print(f"plain {how}: {found}")
    assert not found.differs, found
    assert not plain.histogram
    # Nothing would be shown by continuations that are nearly all the same.
    _, counts = np.unique(plain.tokens, axis=0, return_counts=True)
    assert counts.max() < SAMPLES / 2
    assert len(counts) > 50


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", SPECULATIVE)
def test_speculation_samples_what_plain_decoding_samples(
    sampled: Callable[[str], dict[str, Samples]], references: dict[str, Reference], kind: str, how: str
) -> None:
    plain, speculated, reference = sampled("none")[how], sampled(kind)[how], references[how]
    accepted = acceptance_length(speculated.histogram)
    for name, tokens in (("transformers", reference.tokens), ("plain decoding", plain.tokens)):
        found = compare(tokens, speculated.tokens, error_rate=ERROR_RATE, ranking=reference.ranking)
        print(f"{kind} {how} against {name}, acceptance length {accepted:.2f}: {found}")
        assert not found.differs, (name, found)
    assert accepted is not None
    assert accepted > 1.05, "hardly a draft was accepted, so this shows nothing about speculation"


def test_a_verify_that_accepts_a_little_too_much_is_found(
    engines: EnginePool,
    pair: TinyPair,
    cases: dict[str, Case],
    references: dict[str, Reference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang's own switch to trade exactness for speed: every child is taken with its probability divided by 0.97."""
    engines.stop()
    text = engines.profile(pair, CONCURRENCY).source.read_text()
    lossy = 'device = "cpu"\nextra_args = ["--speculative-accept-threshold-acc", "0.97"]'
    profile_file = tmp_path / "lossy.toml"
    profile_file.write_text(text.replace('device = "cpu"', lossy))
    # Eyas would refuse to run it.
    monkeypatch.setattr(server.engine, "changed_arguments", lambda expected, resolved: [])
    drafter, options = SPECULATIVE["chain"]
    with Engine(load_profile(profile_file), str(pair.drafters[drafter]), run_dir=tmp_path / "run", **options) as engine:
        (speculated,) = draw_from(engine, [cases["temperature"]], "lossy")
    reference = references["temperature"]
    found = compare(reference.tokens, speculated.tokens, error_rate=ERROR_RATE, ranking=reference.ranking)
    print(f"lossy: {found}")
    assert found.differs, found
    assert 0.01 < max(found.tv_by_position) < 0.04, "the bias is not the small one that this test is about"
