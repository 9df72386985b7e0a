"""Sampling through a draft tree draws what plain sampling draws: by enumerated coins, then by chi-square.

Where every coin takes the midpoints of N equal parts, and all probabilities are multiples of 1/N, counts are exact
and nothing is left to chance.
"""

import itertools
import math
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import pytest
import sgl_kernel  # noqa: F401  registers torch.ops.sgl_kernel
import torch
from scipy import stats
from sgl_kernel.sampling import Verifier, draw, keep

# (next child, next sibling, token) of each node; node 0 is the root, its token the last verified one.
CHAIN = [(1, -1, 0), (2, -1, 1), (-1, -1, 2)]
FORK = [(1, -1, 0), (3, 2, 1), (-1, -1, 3), (-1, -1, 2)]
WIDE = [(1, -1, 0), (-1, 2, 1), (-1, 3, 0), (-1, -1, 3)]
TWICE = [(1, -1, 0), (-1, 2, 1), (-1, 3, 1), (-1, -1, 0)]  # a drafter that offers one token twice
DEPTH = {"chain": 3, "fork": 3, "wide": 2, "twice": 2}
TREES = {"chain": CHAIN, "fork": FORK, "wide": WIDE, "twice": TWICE}
EIGHTHS = torch.tensor([[3, 2, 2, 1], [1, 4, 1, 2], [2, 2, 2, 2], [1, 1, 5, 1]], dtype=torch.float64) / 8


def settings(batch, top_k=1 << 30, top_p=1.0, min_p=0.0):
    """What SGLang passes on of a batch's sampling parameters."""
    return SimpleNamespace(
        top_ks=torch.full((batch,), top_k), top_ps=torch.full((batch,), top_p), min_ps=torch.full((batch,), min_p),
        max_top_k=top_k if top_k < 1 << 30 else None, sampling_seed=None,
    )  # fmt: skip


def verify(tree, depth, probs, coins, last_coins, info, threshold_acc=1.0, threshold_single=1.0):
    """Run the op on B copies of one tree: probs [n, V]; coins [B, n]; last_coins [B]. Returns the tokens of each."""
    batch, size = coins.shape
    children, siblings, tokens = (torch.tensor(column).repeat(batch, 1) for column in zip(*tree, strict=True))
    index = torch.arange(batch * size).view(batch, size)
    predicts = torch.full((batch * size,), -1, dtype=torch.int32)
    accept_index = torch.full((batch, depth), -1, dtype=torch.int32)
    accepted = torch.full((batch,), -7, dtype=torch.int32)
    verifier = Verifier()
    target = probs.float().expand(batch, *probs.shape)
    drawn = verifier.remembering(lambda *, sampling_info, **batch: (coins, last_coins))(sampling_info=info, seq_lens=1)
    verifier.accept(
        predicts=predicts, accept_index=accept_index, accept_token_num=accepted, candidates=tokens,
        retrive_index=index, retrive_next_token=children, retrive_next_sibling=siblings, uniform_samples=drawn[0],
        uniform_samples_for_final_sampling=drawn[1], target_probs=target, draft_probs=torch.zeros_like(target),
        threshold_single=threshold_single, threshold_acc=threshold_acc, deterministic=True,
    )  # fmt: skip
    answers = []
    for b in range(batch):
        path = [node for node in accept_index[b].tolist() if node != -1]
        assert len(path) == accepted[b] + 1
        assert path[0] == b * size
        for parent, child in itertools.pairwise(path):
            assert tokens[b, child - b * size] == predicts[parent]
        answers.append(tuple(predicts[path].tolist()))
    return answers


def strata(parts):
    """Midpoints of `parts` equal parts of [0, 1)."""
    return (torch.arange(parts, dtype=torch.float64) + 0.5) / parts


def offered(tree, node):
    """The tokens of a node's children, each with the first child that has it."""
    kids, child = {}, tree[node][0]
    while child != -1:
        kids.setdefault(tree[child][2], child)
        child = tree[child][1]
    return kids


def continuations(tree, probs, node=0, left=Fraction(1)):
    """Exact probability of every answer that target-only verification may give: walk down while a child matches."""
    kids = offered(tree, node)
    for token, share in enumerate(Fraction(float(p)) for p in probs[node]):
        if token in kids:
            for rest, part in continuations(tree, probs, kids[token], left * share):
                yield (token, *rest), part
        else:
            yield (token,), left * share


@pytest.mark.parametrize("name", TREES)
def test_every_answer_has_its_exact_probability(name):
    tree = TREES[name]
    deciding = [node for node in range(len(tree)) if tree[node][0] != -1]
    # What children leave over, in eighths: the bonus token's probabilities are fractions of it.
    left = [8 - sum(int(EIGHTHS[node, token] * 8) for token in offered(tree, node)) for node in range(len(tree))]
    grid = torch.cartesian_prod(*[strata(8)] * len(deciding), strata(math.lcm(*left)))
    coins = torch.full((len(grid), len(tree)), 0.5, dtype=torch.float64)
    coins[:, deciding] = grid[:, : len(deciding)]
    found = Counter(verify(tree, DEPTH[name], EIGHTHS, coins, grid[:, -1], settings(len(grid))))
    expected = Counter()
    for answer, share in continuations(tree, EIGHTHS):
        expected[answer] += share
    assert {answer: Fraction(count, len(grid)) for answer, count in found.items()} == {
        answer: share for answer, share in expected.items() if share
    }


def test_drafts_beyond_the_depth_are_not_taken():
    coins = torch.zeros((1, 3))
    certain = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    assert verify(CHAIN, 2, certain, coins, coins[0, :1], settings(1)) == [(1, 2)]


def test_an_accepted_chain_ends_in_a_bonus_token():
    probs = torch.zeros((3, 4))
    probs[0, 1] = probs[1, 2] = probs[2, 3] = 1
    assert verify(CHAIN, 3, probs, torch.full((1, 3), 0.999), torch.tensor([0.999]), settings(1)) == [(1, 2, 3)]


@pytest.mark.parametrize(
    ("threshold_acc", "threshold_single", "share"), [(1.0, 1.0, 2 / 8), (0.5, 1.0, 4 / 8), (1.0, 0.2, 1.0)]
)
def test_thresholds_accept_more(threshold_acc, threshold_single, share):
    coins = strata(8)[:, None].expand(8, 3)
    answers = verify(
        CHAIN, 2, EIGHTHS, coins, torch.full((8,), 0.5), settings(8), threshold_acc, threshold_single
    )  # fmt: skip
    assert sum(len(answer) > 1 for answer in answers) / 8 == share


PARAMETERS = [
    {"top_k": 1}, {"top_k": 5}, {"top_p": 0.6}, {"top_p": 0.05}, {"min_p": 0.2}, {"top_k": 7, "top_p": 0.5},
    {"top_k": 4, "top_p": 0.9, "min_p": 0.3}, {"top_p": 1e-6}, {},
]  # fmt: skip


def naive(probs, top_k=1 << 30, top_p=1.0, min_p=0.0):
    """The tokens that survive, by the rules in words: the k most likely; those before which less than top_p (or just
    top_p) has passed; those at least min_p times as likely as the most likely."""
    ranked = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept, passed = set(), 0.0
    for rank, token in enumerate(ranked):
        if rank < top_k and passed <= top_p and probs[token] >= probs[ranked[0]] * min_p:
            kept.add(token)
        passed += probs[token]
    return kept


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_cuts_follow_the_rules(parameters, seed):
    random = torch.Generator().manual_seed(seed)
    probs = torch.softmax(torch.randn(40, generator=random) * 2, dim=0)
    out = keep(probs.clone(), **{"top_k": 1 << 30, "top_p": 1.0, "min_p": 0.0, **parameters})
    kept = naive(probs.tolist(), **parameters)
    assert set(out.nonzero().flatten().tolist()) == kept
    assert all(out[token] == probs[token] for token in kept)


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "many ties"])
def test_cuts_are_those_of_the_plain_sampler(sglang, parameters, ties):
    """SGLang's own function for a CPU, on the same rows: tokens of equal probability at the cut are settled alike."""
    random = torch.Generator().manual_seed(3)
    logits = torch.randn((6, 3000), generator=random)
    probs = torch.softmax((logits * 4).round() / 2 if ties else logits, dim=-1)
    info = settings(6, **parameters)
    _, weights, tokens, _ = sglang("sglang.srt.layers.sampler").top_k_top_p_min_p_sampling_from_probs_torch(
        probs.clone(), info.top_ks, info.top_ps, info.min_ps, True, None, None,
        return_filtered_probs=True, max_top_k=info.max_top_k,
    )  # fmt: skip
    expected = torch.zeros_like(probs).scatter_(1, tokens.long(), weights)
    for row in range(6):
        # Asked for its weights, SGLang sorts even where it otherwise takes the top k: so max_top_k stays out.
        found = keep(probs[row], int(info.top_ks[row]), float(info.top_ps[row]), float(info.min_ps[row]))
        torch.testing.assert_close(found, expected[row], atol=0, rtol=0)


def test_ties_at_the_kth_token_keep_k():
    """bfloat16 logits tie often; a cut by value instead of rank would keep them all."""
    probs = torch.tensor([0.2, 0.1, 0.2, 0.1, 0.2, 0.1, 0.1])
    for top_k in range(1, 8):
        for largest in (None, top_k, 7):
            assert int((keep(probs.clone(), top_k, 1.0, 0.0, largest) > 0).sum()) == top_k


def test_a_token_before_which_exactly_top_p_has_passed_stays(sglang):
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    info = settings(1, top_p=0.5)
    _, weights, _, _ = sglang("sglang.srt.layers.sampler").top_k_top_p_min_p_sampling_from_probs_torch(
        probs.clone(), info.top_ks, info.top_ps, info.min_ps, True, None, None, return_filtered_probs=True
    )
    assert weights.tolist() == [[0.5, 0.25, 0.0, 0.0]]
    assert keep(probs[0].clone(), 1 << 30, 0.5, 0.0).tolist() == [0.5, 0.25, 0.0, 0.0]


def chi_square(counts, expected, samples):
    """The p-value of `counts` against exact shares; answers of expected count under 5 are pooled."""
    assert set(counts) <= set(expected), "an answer that has no probability"
    small = [answer for answer, share in expected.items() if share * samples < 5]
    pools = [[answer] for answer in expected if answer not in small] + ([small] if small else [])
    observed = [sum(counts[answer] for answer in pool) for pool in pools]
    shares = [sum(expected[answer] for answer in pool) * samples for pool in pools]
    return stats.chisquare(observed, shares).pvalue if len(pools) > 1 else float(observed[0] == samples)


@pytest.mark.parametrize(
    "parameters", [{}, {"top_k": 4}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.8, "min_p": 0.4}], ids=str
)
@pytest.mark.parametrize("name", TREES)
def test_answers_are_distributed_as_plain_decoding_distributes_them(name, parameters):
    """4,000 draws a case, at a level of 1e-6: over the 16 cases a right sampler fails with a chance of 16 in a million,
    and since the seed is fixed, always or never."""
    samples, tree = 4_000, TREES[name]
    random = torch.Generator().manual_seed(11)
    probs = torch.softmax(torch.randn((len(tree), 6), generator=random) * 0.7, dim=-1)
    coins = torch.rand((samples, len(tree)), generator=random)
    last_coins = torch.rand((samples,), generator=random)
    found = Counter(verify(tree, DEPTH[name], probs, coins, last_coins, settings(samples, **parameters)))
    plain = torch.zeros_like(probs)
    for node, row in enumerate(probs):
        kept = sorted(naive(row.tolist(), **parameters))
        plain[node, kept] = row[kept] / row[kept].sum()
    expected = Counter()
    for answer, share in continuations(tree, plain.double() / plain.double().sum(-1, keepdim=True)):
        expected[answer] += float(share)
    assert chi_square(found, {answer: share for answer, share in expected.items() if share}, samples) > 1e-6


def test_a_draw_never_takes_a_token_of_no_weight():
    weights = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.25, 0.0], dtype=torch.float64)
    assert [draw(weights, coin) for coin in (0.0, 0.66, 0.67, 1.0 - 2**-24, 1.0)] == [2, 2, 4, 4, 4]


def murmur3(words):
    """MurmurHash3_x86_32, seed 0, of 32-bit words, on Python integers."""
    most, state = 0xFFFFFFFF, 0
    for word in words:
        word = word * 0xCC9E2D51 & most
        word = (word << 15 | word >> 17) * 0x1B873593 & most
        state ^= word
        state = ((state << 13 | state >> 19) & most) * 5 + 0xE6546B64 & most
    state ^= 4 * len(words)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        state = (state ^ state >> shift) * factor & most
    return state


def test_seeded_coins_are_murmur_hashes():
    # Published test vectors of the algorithm.
    assert [murmur3([]), murmur3([0xFFFFFFFF]), murmur3([0x87654321])] == [0, 0x76293B50, 0xF55B516B]
    seeds = torch.tensor([0, 1, 42, 2**32 + 5, 2**63 - 1], dtype=torch.uint64)
    positions, columns = torch.tensor([0, 7, 31, 1000, 2**31 - 1]), torch.tensor([0, 1, 2, 49151])
    found = torch.ops.sgl_kernel.murmur_hash32_cpu.default(seeds, positions, columns)
    assert found.dtype is torch.uint32
    expected = [
        [murmur3([seed & 0xFFFFFFFF, seed >> 32, position, column]) for column in columns.tolist()]
        for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    assert found.tolist() == expected
