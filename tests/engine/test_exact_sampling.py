"""The real SGLang samples through drafts as the target's own distribution says: chain, tree and NGRAM.

The first four tokens of 800 answers are counted against their exact probabilities, which transformers gives.
"""

import math
from collections import Counter

import httpx
import pytest
import torch
from scipy import stats

from tests.engine.served import on

pytestmark = pytest.mark.engine

SAMPLES, TOKENS, VOCABULARY = 800, 4, 512
# Over the 6 cases a right sampler fails with a chance of 6 in a million.
LEVEL = 1e-6
PARAMETERS = {
    "top-k, top-p": {"temperature": 1.7, "top_k": 6, "top_p": 0.8},
    "min-p": {"temperature": 1.4, "min_p": 0.1},
}


@pytest.fixture(scope="session", name="pair")
def _pair(tiny):
    return tiny("llama")


@pytest.fixture(scope="session", name="prompt")
def _prompt(pair):
    """Token ids whose end has come before, so that NGRAM has something to offer."""
    from transformers import AutoTokenizer

    text = "the eagle hunts over water and sees a fish then it dives and holds the fish "
    return AutoTokenizer.from_pretrained(pair.target)(text * 3)["input_ids"]


@pytest.fixture(scope="session", name="target")
def _target(pair):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(pair.reference, dtype=torch.float32).eval()


def cut(logits, temperature, top_k=VOCABULARY, top_p=1.0, min_p=0.0):
    """Token -> probability, by the rules in words: the k most likely; those before which at most top_p has passed,
    of all probability; those at least min_p times as likely as the most likely."""
    probs = torch.softmax(logits.double() / temperature, dim=-1).tolist()
    ranked = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept, passed = {}, 0.0
    for token in ranked[:top_k]:
        if passed <= top_p and probs[token] >= min_p * probs[ranked[0]]:
            kept[token] = probs[token]
        passed += probs[token]
    return {token: share / sum(kept.values()) for token, share in kept.items()}


@pytest.fixture(scope="session", name="exact")
def _exact(target, prompt):
    """The probability of each answer of four tokens."""

    def distribution(parameters):
        answers = {(): 1.0}
        for _ in range(TOKENS):
            with torch.inference_mode():
                logits = target(torch.tensor([[*prompt, *answer] for answer in answers])).logits[:, -1]
            answers = {
                (*answer, token): share * part
                for (answer, share), row in zip(answers.items(), logits, strict=True)
                for token, part in cut(row, **parameters).items()
            }
        assert math.isclose(sum(answers.values()), 1.0)
        return answers

    return distribution


@pytest.mark.parametrize("parameters", PARAMETERS)
@on("llama-chain", "llama-tree", "llama-ngram")
def test_answers_are_drawn_from_the_targets_distribution(served, prompt, exact, parameters):
    server = served.engine
    asked = {"max_new_tokens": TOKENS + 3, "ignore_eos": True, **PARAMETERS[parameters]}
    body = {"input_ids": [prompt] * SAMPLES, "sampling_params": asked}
    answer = httpx.post(f"{server.url}/generate", json=body, headers=server.headers, timeout=600)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    steps = sum(one["meta_info"]["spec_verify_ct"] for one in found)
    accepted = sum(one["meta_info"]["spec_num_correct_drafts"] for one in found)
    assert accepted > SAMPLES / 10, "hardly a draft was accepted, so this would show nothing"
    assert steps < SAMPLES * (TOKENS + 2)
    counts = Counter(tuple(one["output_ids"][:TOKENS]) for one in found)
    expected = exact(PARAMETERS[parameters])
    assert set(counts) <= set(expected), "an answer that has no probability"
    common = [one for one, share in expected.items() if share * SAMPLES >= 5]
    observed, wanted = [counts[one] for one in common], [expected[one] * SAMPLES for one in common]
    observed.append(SAMPLES - sum(observed))
    wanted.append(SAMPLES - sum(wanted))
    assert len(common) > 10
    if wanted[-1] < 1e-6:
        observed.pop(), wanted.pop()
    assert stats.chisquare(observed, wanted).pvalue > LEVEL
