"""Size and power of the goodness-of-fit test: 20,000 continuations a seed over 20 seeds, right and slightly biased."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from bench.sampling import compare
from tests.bench.markov import (
    BIAS,
    DECODINGS,
    LENGTH,
    START,
    STEPS,
    TREES,
    VOCABULARY,
    Lean,
    cut,
    plain,
    setting,
    speculative,
    walk,
)

SAMPLES, REFERENCE, SEEDS = 20_000, 240_000, 20  # sizes and error rate as with the real engine
ERROR_RATE = 4e-5


@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("tree", TREES)
def test_the_walk_is_the_engines_op(tree: str, decoding: str) -> None:
    import torch
    from sgl_kernel.sampling import Verifier

    given, random, parameters = setting(tree, decoding), np.random.default_rng(5), DECODINGS[decoding]
    samples, nodes = 4_000, TREES[tree][1]
    roots = random.integers(VOCABULARY, size=samples)
    coins = random.random((samples, nodes), dtype=np.float32)
    coins[::7], coins[1::7] = 0.0, 1 - 2.0**-24
    last = random.random(samples, dtype=np.float32)
    top_k = parameters.get("top_k", 1 << 30)
    sampled = SimpleNamespace(
        top_ks=torch.full((samples,), top_k),
        top_ps=torch.full((samples,), parameters.get("top_p", 1.0)),
        min_ps=torch.zeros(samples),
        max_top_k=None,
        sampling_seed=None,
    )
    after = cut(given.logits, parameters.get("temperature", 1.0))[given.drafts.tokens[roots]]
    predicts = torch.full((samples * nodes,), -1, dtype=torch.int32)
    accepted = torch.full((samples, STEPS + 1), -1, dtype=torch.int32)
    number = torch.empty(samples, dtype=torch.int32)
    verifier = Verifier()
    verifier.remembering(lambda *, sampling_info: None)(sampling_info=sampled)
    verifier.accept(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=number,
        candidates=torch.from_numpy(given.drafts.tokens[roots]),
        retrive_index=torch.arange(samples * nodes).view(samples, nodes),
        retrive_next_token=torch.from_numpy(given.drafts.child[roots]),
        retrive_next_sibling=torch.from_numpy(given.drafts.sibling[roots]),
        uniform_samples=torch.from_numpy(coins),
        uniform_samples_for_final_sampling=torch.from_numpy(last),
        target_probs=torch.from_numpy(after).float(),
        draft_probs=None,
        threshold_single=1.0,
        threshold_acc=1.0,
        deterministic=True,
    )
    theirs = np.where(accepted >= 0, predicts.numpy()[accepted], -1)
    ours, count = walk(given.drafts, given.shares, roots, coins, last)
    np.testing.assert_array_equal(count, number.numpy() + 1)
    np.testing.assert_array_equal(ours, theirs)
    assert len(np.unique(count)) == STEPS + 1


@pytest.mark.slow
@pytest.mark.parametrize(("tree", "decoding"), [("chain", "plain"), ("tree", "top-p"), ("tree", "top-k")])
def test_a_right_verify_passes_and_a_biased_one_fails(tree: str, decoding: str) -> None:
    given = setting(tree, decoding)
    leans = {kind: Lean.of(kind, given.drafts, given.shares) for kind in ("eager", "reluctant")}
    apart = {
        kind: np.abs(lean.verified - given.shares[given.drafts.tokens]).sum(-1) / 2 for kind, lean in leans.items()
    }
    for kind, lean in leans.items():
        np.testing.assert_allclose(apart[kind][lean.chance > 0], BIAS)
        assert lean.chance[START, 0] > 0
        assert not apart[kind][lean.chance == 0].any()

    fails, right, drawn = Counter[str](), [], {kind: np.zeros(VOCABULARY) for kind in leans}
    for seed in range(SEEDS):
        random = np.random.default_rng(seed)
        reference = plain(given.shares, REFERENCE, random)
        sample = speculative(given.drafts, given.shares, SAMPLES, random)
        unbiased = compare(reference, sample, error_rate=ERROR_RATE)
        fails["unbiased"] += unbiased.differs
        right.append(unbiased.p_ranks)
        for kind, lean in leans.items():
            biased = speculative(given.drafts, given.shares, SAMPLES, random, lean)
            drawn[kind] += np.bincount(biased[:, 0], minlength=VOCABULARY)
            fails[kind] += compare(reference, biased, error_rate=ERROR_RATE).differs
    assert fails["unbiased"] <= 1
    assert fails["eager"] >= 19
    assert fails["reluctant"] >= 19
    assert stats.kstest(right, "uniform").pvalue > 0.001
    for kind, lean in leans.items():
        expected = lean.verified[START, 0] * SAMPLES * SEEDS
        np.testing.assert_array_equal(drawn[kind][expected == 0], 0)
        assert stats.chisquare(drawn[kind][expected > 0], expected[expected > 0]).pvalue > 1e-4


def test_the_error_rate_is_what_it_says() -> None:
    """400 comparisons of equal distributions, whose numbers of small p-values are those of a fair coin."""
    shares, random = setting("chain", "plain").shares, np.random.default_rng(1)
    found = [compare(plain(shares, 8_000, random), plain(shares, 2_000, random)) for _ in range(400)]
    for rate in (0.01, 0.05, 0.2):
        below = sum(one.p_ranks < rate for one in found)
        assert stats.binomtest(below, len(found), rate).pvalue > 0.001, (rate, below)
        assert stats.binomtest(sum(one.p_value < rate for one in found), len(found), rate, "greater").pvalue > 0.001
    for position in range(LENGTH):
        floor = np.mean([one.tv_floor_by_position[position] for one in found])
        assert floor == pytest.approx(np.mean([one.tv_by_position[position] for one in found]), rel=0.05)
