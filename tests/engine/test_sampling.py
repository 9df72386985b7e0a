"""Speculation at a temperature samples what plain decoding samples: 20,000 continuations a kind, on the real engine.

Each kind is compared with the engine's own plain decoding, and with a larger sample that transformers draws from the
same weights. Three prompts with three ways to sample travel side by side in every batch. Two engines run at a time,
each on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bench.sampling import Case, Comparison, Ranking, Samples, collect, compare
from drafter.acceptance import acceptance_length
from server.config import load_profile
from server.engine import Engine
from tests.engine.pool import EnginePool
from tests.engine.profiles import profile_text
from tests.tiny import TinyPair

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SAMPLES, TOKENS = 20_000, 4  # prefill draws the first token, verify steps the others
LEARNED, REFERENCE = 60_000, 180_000  # drawn by transformers: to rank tokens, and to compare with
RUNNING, LANES = 256, 2
HOW = {
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "top-k": {"temperature": 1.2, "top_k": 8},
}


@dataclass(frozen=True)
class Kind:
    """An engine to sample from, and how."""

    drafter: str = "none"
    options: dict[str, int] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    how: tuple[str, ...] = tuple(HOW)


SPECULATIVE = {
    "tree": Kind("mha_noised_a", {"num_steps": 3, "topk": 4, "draft_tokens": 8}),
    "chain": Kind("mha_noised_a", {"num_steps": 3}),
    "ngram": Kind("ngram"),
}
# SGLang's own switch to trade exactness for speed: every child is taken with its probability divided by 0.97.
LOSSY = Kind("mha_perfect", {"num_steps": 3}, ("--speculative-accept-threshold-acc", "0.97"), ("temperature",))
KINDS = {"none": Kind(), **SPECULATIVE, "lossy": LOSSY}  # in the order of their start
# The chance that a right engine fails any comparison of this file, and of each: transformers with every kind, plain
# decoding with every speculative one.
FAMILY_ERROR_RATE = 0.001
ERROR_RATE = FAMILY_ERROR_RATE / (len(HOW) * (2 * len(SPECULATIVE) + 1))


class Unchecked(Engine):
    """An engine that may run with flags that Eyas refuses because they change the samples."""

    def _compare(self) -> None:
        pass


class Reference:
    """What transformers draws: a ranking, and continuations that had no part in it."""

    def __init__(self, model: PreTrainedModel, case: Case, random: np.random.Generator) -> None:
        drawn = draw(model, case, LEARNED + REFERENCE, random)
        self.ranking, self.tokens = Ranking(drawn[:LEARNED]), drawn[LEARNED:]


def cut(logits: np.ndarray, case: Case) -> np.ndarray:
    """Distributions [B, V]: of the top_k likeliest tokens, those before which at most top_p of all has passed."""
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
    """Independent continuations [N, L]; a prefix is computed once, and all its successors are drawn at once."""
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
    prompts = (tuple(encode(text)["input_ids"]) for text in texts)
    return {name: Case(prompt, **how) for prompt, (name, how) in zip(prompts, HOW.items(), strict=True)}


Drawn = dict[str, Future[dict[str, Samples]]]


@pytest.fixture(scope="module")
def drawn(
    engines: EnginePool, pair: TinyPair, cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Drawn]:
    """`drawn["chain"].result()["top-p"]`: that kind's continuations. All kinds start at once, as lanes become free."""
    engines.stop()
    folder = tmp_path_factory.mktemp("sampling")

    def samples_of(name: str) -> dict[str, Samples]:
        kind = KINDS[name]
        file = folder / f"{name}.toml"
        file.write_text(profile_text(pair, RUNNING, kind.flags))
        drafter = str(pair.drafters[kind.drafter]) if kind.drafter in pair.drafters else kind.drafter
        kind_of_engine = Unchecked if kind.flags else Engine
        with kind_of_engine(load_profile(file), drafter, run_dir=folder / name, **kind.options) as engine:
            found = collect(
                engine.url,
                engine.headers,
                [cases[how] for how in kind.how],
                samples=SAMPLES,
                tokens=TOKENS,
                concurrency=2 * RUNNING,
                title=name,
            )
        return dict(zip(kind.how, found, strict=True))

    with ThreadPoolExecutor(LANES) as lanes:
        yield {name: lanes.submit(samples_of, name) for name in KINDS}
        lanes.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def references(drawn: Drawn, pair: TinyPair, cases: dict[str, Case]) -> dict[str, Reference]:
    model = AutoModelForCausalLM.from_pretrained(pair.reference, dtype=torch.float32).eval()
    random = np.random.default_rng(23)
    return {name: Reference(model, case, random) for name, case in cases.items()}


def judge(what: str, reference: np.ndarray, samples: Samples, ranking: Ranking) -> Comparison:
    """The comparison, said aloud: its figures are the evidence where the test passes, too."""
    found = compare(reference, samples.tokens, error_rate=ERROR_RATE, ranking=ranking)
    length = acceptance_length(samples.histogram)
    tv = ", ".join(f"{a:.4f} ({b:.4f})" for a, b in zip(found.tv_by_position, found.tv_floor_by_position, strict=True))
    accepted = f", acceptance length {length:.2f}" if length else ""
    print(f"{what}: p {found.p_ranks:.3g} (ranks), {found.p_novel:.3g} (novel){accepted}; TV (floor) {tv}")
    return found


@pytest.mark.parametrize("how", HOW)
def test_plain_decoding_samples_the_model(drawn: Drawn, references: dict[str, Reference], how: str) -> None:
    plain, reference = drawn["none"].result()[how], references[how]
    found = judge(f"plain {how}, transformers", reference.tokens, plain, reference.ranking)
    assert not found.differs, found
    assert not plain.histogram
    # Nothing would be shown by continuations that are nearly all the same.
    _, counts = np.unique(plain.tokens, axis=0, return_counts=True)
    assert counts.max() < SAMPLES / 2
    assert len(counts) > 50


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", SPECULATIVE)
def test_speculation_samples_what_plain_decoding_samples(
    drawn: Drawn, references: dict[str, Reference], kind: str, how: str
) -> None:
    plain, speculated, reference = drawn["none"].result()[how], drawn[kind].result()[how], references[how]
    for name, tokens in (("transformers", reference.tokens), ("plain decoding", plain.tokens)):
        found = judge(f"{kind} {how}, {name}", tokens, speculated, reference.ranking)
        assert not found.differs, (name, found)
    length = acceptance_length(speculated.histogram)
    assert length is not None
    assert length > 1.05, "hardly a draft was accepted, so this shows nothing about speculation"


def test_a_verify_that_accepts_a_little_too_much_is_found(drawn: Drawn, references: dict[str, Reference]) -> None:
    lossy, reference = drawn["lossy"].result()["temperature"], references["temperature"]
    found = judge("lossy temperature, transformers", reference.tokens, lossy, reference.ranking)
    assert found.differs, found
    assert 0.01 < max(found.tv_by_position) < 0.04, "the bias is not the small one that this test is about"
