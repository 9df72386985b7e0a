"""The goodness-of-fit test itself: its arithmetic, its size, and its power against a verify step that is slightly off.

Power: continuations of a small Markov target, drawn plainly and by verify steps, 20,000 a seed over 20 seeds. The steps
are walked for all samples at once; that walk is first held against the engine's own op, token for token.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from bench.sampling import ENOUGH, NOVEL, RANKS, SETTLED, UNKNOWN, Case, Ranking, SamplingError, collect, compare

VOCABULARY, LENGTH, STEPS, START = 24, 4, 3, 0
SAMPLES, REFERENCE, SEEDS = 20_000, 240_000, 20  # sizes and error rate as with the real engine
ERROR_RATE = 4e-5
BIAS = 0.02  # total variation distance of every biased decision
DECODINGS = {"plain": {}, "top-p": {"top_p": 0.9}, "top-k": {"temperature": 1.3, "top_k": 6}}
TREES = {"chain": (1, 4), "tree": (2, 6)}  # children of a node at most, nodes with the root


# --- a target, its drafts, and the two ways to draw from it


def cut(logits: np.ndarray, temperature: float = 1.0, top_p: float = 1.0, top_k: int = VOCABULARY) -> np.ndarray:
    """The next token's distribution after each token [V, V]: the top_k likeliest, before which at most top_p passed."""
    shares = np.exp(logits / temperature)
    shares /= shares.sum(axis=1, keepdims=True)
    order = np.argsort(-shares, axis=1)
    ranked = np.take_along_axis(shares, order, axis=1)
    ranked[(ranked.cumsum(axis=1) - ranked > top_p) | (np.arange(VOCABULARY) >= top_k)] = 0.0
    np.put_along_axis(shares, order, ranked, axis=1)
    return shares / shares.sum(axis=1, keepdims=True)


def choose(shares: np.ndarray, coins: np.ndarray) -> np.ndarray:
    """The token of each row at which the accumulated shares [N, V], of any sum, pass the coin [N]."""
    summed = shares.cumsum(axis=1)
    chosen = (summed <= (coins * summed[:, -1])[:, None]).sum(axis=1)
    return np.minimum(chosen, VOCABULARY - 1 - np.argmax(shares[:, ::-1] > 0, axis=1))


def plain(shares: np.ndarray, samples: int, random: np.random.Generator) -> np.ndarray:
    """Continuations of START [N, L] by plain sampling."""
    tokens = np.full((samples, LENGTH + 1), START)
    for position in range(LENGTH):
        tokens[:, position + 1] = choose(shares[tokens[:, position]], random.random(samples))
    return tokens[:, 1:]


@dataclass(frozen=True)
class Drafts:
    """The draft tree after each token: tokens, parents, and first-child and next-sibling links (-1: none), all [V, n].

    A tree has the n - 1 likeliest paths of a drafter that knows the target but for some noise, as EAGLE's have.
    """

    tokens: np.ndarray
    parents: np.ndarray
    child: np.ndarray
    sibling: np.ndarray

    @classmethod
    def of(cls, logits: np.ndarray, breadth: int, nodes: int, random: np.random.Generator) -> Drafts:
        guess = cut(logits + random.normal(size=logits.shape) * 0.6)
        tokens = np.zeros((VOCABULARY, nodes), int)
        parents, child, sibling = (np.full((VOCABULARY, nodes), -1) for _ in range(3))
        for root in range(VOCABULARY):
            open_paths, depth = [(1.0, -1, root)], {-1: -1}
            for node in range(nodes):
                best = max(open_paths)
                open_paths.remove(best)
                share, parent, token = best
                tokens[root, node], parents[root, node], depth[node] = token, parent, depth[parent] + 1
                if depth[node] < STEPS:
                    likeliest = np.argsort(-guess[token])[:breadth]
                    open_paths += [(share * guess[token, next_], node, int(next_)) for next_ in likeliest]
            for node in range(nodes - 1, 0, -1):
                parent = parents[root, node]
                sibling[root, node], child[root, parent] = child[root, parent], node
        return cls(tokens, parents, child, sibling)


def walk(
    drafts: Drafts, shares: np.ndarray, roots: np.ndarray, coins: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One verify step after each of the roots [N]: its tokens [N, STEPS + 1] (-1 behind the end) and their number [N].

    Coins [N, n], one a node; last [N] draws the token that ends the step. Target-only verification: a node's coin takes
    the first child up to which the children's accumulated probability exceeds it, else the end is drawn from the rest.
    """
    rows, node = np.arange(len(roots)), np.zeros(len(roots), int)
    out, count = np.full((len(roots), STEPS + 1), -1), np.zeros(len(roots), int)
    running = np.ones(len(roots), bool)
    while running.any():
        left = shares[drafts.tokens[roots, node]].astype(np.float32).astype(float)
        total, mass = left.sum(axis=1), np.zeros(len(roots))
        child, taken = np.where(running, drafts.child[roots, node], -1), np.full(len(roots), -1)
        while (child >= 0).any():
            trying = child >= 0
            token = drafts.tokens[roots, child]
            mass += np.where(trying, left[rows, token] / total, 0.0)
            left[rows[trying], token[trying]] = 0.0
            hit = trying & (coins[rows, node] < mass)
            taken[hit] = child[hit]
            child = np.where(trying & ~hit, drafts.sibling[roots, child], -1)
        ends = running & (taken < 0)
        token = np.where(taken >= 0, drafts.tokens[roots, taken], choose(left, last))
        out[rows[running], count[running]] = token[running]
        count += running
        running &= ~ends
        node = np.where(running, taken, node)
    return out, count


def speculative(
    drafts: Drafts, shares: np.ndarray, samples: int, random: np.random.Generator, lean: Lean | None = None
) -> np.ndarray:
    """Continuations of START [N, L] by verify steps, each cut at L as an engine cuts at max_tokens."""
    tokens = np.full((samples, LENGTH + STEPS + 1), START)
    written, unfinished = np.zeros(samples, int), np.arange(samples)
    while len(unfinished):
        roots = tokens[unfinished, written[unfinished]]
        coins = random.random((len(roots), drafts.tokens.shape[1]), dtype=np.float32)
        if lean:
            coins = lean.apply(roots, coins, random)
        out, count = walk(drafts, shares, roots, coins, random.random(len(roots), dtype=np.float32))
        for offset in range(STEPS + 1):
            more = unfinished[count > offset]
            tokens[more, written[more] + 1] = out[count > offset, offset]
            written[more] += 1
        unfinished = unfinished[written[unfinished] < LENGTH]
    return tokens[:, 1 : LENGTH + 1]


@dataclass(frozen=True)
class Lean:
    """A bias: in each node [V, n] the chance that its coin is replaced, and by what.

    A coin of 0 takes the first child whatever its probability ("eager"); one just below 1 refuses all ("reluctant").
    """

    chance: np.ndarray
    coin: float
    verified: np.ndarray
    """The distribution [V, n, V] that comes out, given that the node is reached."""

    @classmethod
    def of(cls, kind: str, drafts: Drafts, shares: np.ndarray) -> Lean:
        """Every decision is off by a total variation of exactly BIAS, but where its target leaves no room for it."""
        after = shares[drafts.tokens]
        first, offered = np.zeros_like(after), np.zeros_like(after)
        for root, node in itertools.product(range(VOCABULARY), range(drafts.tokens.shape[1])):
            child = drafts.child[root, node]
            if child >= 0:
                first[root, node, drafts.tokens[root, child]] = 1.0
            while child >= 0:
                offered[root, node, drafts.tokens[root, child]] = 1.0
                child = drafts.sibling[root, child]
        taken, mass = (first * after).sum(-1), (offered * after).sum(-1)
        if kind == "eager":
            # With chance b the first child, else right: b (1 - its probability) apart.
            room = np.where(taken > 0, 1 - taken, 0.0)
            coin, leaning = 0.0, first
        else:
            # With chance b anything but a child, else right: b (probability of the children) apart.
            room = np.where(mass < 1 - 1e-6, mass, 0.0)
            coin, leaning = 1 - 2.0**-24, after * (1 - offered) / np.maximum(1 - mass, 1e-6)[..., None]
        chance = np.where(room > BIAS, BIAS / np.maximum(room, BIAS), 0.0)
        return cls(chance, coin, after + chance[..., None] * (leaning - after))

    def apply(self, roots: np.ndarray, coins: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return np.where(random.random(coins.shape) < self.chance[roots], np.float32(self.coin), coins)


@dataclass(frozen=True)
class Setting:
    logits: np.ndarray
    shares: np.ndarray
    drafts: Drafts


def setting(tree: str, decoding: str) -> Setting:
    random = np.random.default_rng(17)
    logits = random.normal(size=(VOCABULARY, VOCABULARY)) * 2.2
    return Setting(logits, cut(logits, **DECODINGS[decoding]), Drafts.of(logits, *TREES[tree], random))


# --- power and size


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


# --- arithmetic


def test_one_position_is_pearsons_chi_square() -> None:
    random = np.random.default_rng(3)
    shares = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
    learned, reference, sample = (random.choice(6, size=(n, 1), p=shares) for n in (4_000, 5_000, 3_000))
    found = compare(reference, sample, ranking=Ranking(learned))
    table = np.array([np.bincount(np.minimum(one[:, 0], RANKS), minlength=RANKS + 1) for one in (sample, reference)])
    expected = stats.chi2_contingency(table, correction=False)
    assert (found.p_ranks, found.degrees) == (pytest.approx(expected.pvalue, rel=1e-6), expected.dof)
    assert found.p_by_position == (pytest.approx(found.p_ranks),)
    parts = table / table.sum(axis=1, keepdims=True)
    assert found.tv_by_position == (pytest.approx(np.abs(parts[0] - parts[1]).sum() / 2),)
    both = table.sum(axis=0) / table.sum()
    errors = np.sqrt(both * (1 - both) * (1 / 3_000 + 1 / 5_000))
    assert found.tv_floor_by_position == (pytest.approx(np.sqrt(2 / np.pi) * errors.sum() / 2),)
    assert (found.samples, found.reference_samples, found.p_novel) == (3_000, 5_000, 1.0)


def test_positions_without_choice_add_nothing() -> None:
    """Tokens that never vary, or follow from those before, bring neither evidence nor degrees of freedom."""
    random = np.random.default_rng(4)
    learned, reference, sample = (random.choice(6, size=(n, 1)) for n in (4_000, 5_000, 3_000))
    once = compare(reference, sample, ranking=Ranking(learned))
    flat = [np.concatenate([one, np.zeros_like(one), one % 2], axis=1) for one in (learned, reference, sample)]
    thrice = compare(flat[1], flat[2], ranking=Ranking(flat[0]))
    assert (thrice.p_ranks, thrice.degrees) == (pytest.approx(once.p_ranks), once.degrees)
    assert thrice.p_by_position[1:] == (1.0, 1.0)


def test_a_position_that_repeats_another_adds_nothing() -> None:
    """The second token is the first once more, which the ranking could not know."""
    random = np.random.default_rng(10)
    learned = random.choice(4, size=(6_000, 2), p=[0.4, 0.3, 0.2, 0.1])
    reference, sample = (random.choice(4, size=(n, 1), p=[0.4, 0.3, 0.2, 0.1]) for n in (5_000, 3_000))
    once = compare(reference, sample, ranking=Ranking(learned[:, :1]))
    twice = compare(reference.repeat(2, axis=1), sample.repeat(2, axis=1), ranking=Ranking(learned))
    assert (twice.p_ranks, twice.degrees) == (pytest.approx(once.p_ranks), once.degrees)
    assert twice.p_by_position == pytest.approx((once.p_ranks, once.p_ranks))


def ranked_by_hand(learned: np.ndarray, row: list[int], position: int) -> int:
    """The rank of one token, by counting."""
    prefix = row[:position]
    after = Counter(one[position] for one in learned.tolist() if one[:position] == prefix)
    if row[position] in after:
        return sorted(after, key=lambda token: (-after[token], token)).index(row[position])
    return NOVEL if after.total() >= SETTLED else UNKNOWN


def test_ranks_are_those_counted_by_hand() -> None:
    random = np.random.default_rng(6)
    learned = random.binomial(7, 0.4, size=(800, 3))
    others = random.binomial(9, 0.4, size=(300, 3))
    found = Ranking(learned).ranks(others)
    by_hand = [[ranked_by_hand(learned, row, position) for position in range(3)] for row in others.tolist()]
    assert found.tolist() == by_hand
    assert {NOVEL, UNKNOWN, 0, RANKS} <= set(found.ravel().tolist())


@pytest.mark.parametrize(("times", "expected"), [(SETTLED - 1, UNKNOWN), (SETTLED, NOVEL)])
def test_only_after_a_settled_prefix_is_a_token_novel(times: int, expected: int) -> None:
    learned = np.array([[0, 0]] * times + [[1, 0]] * SETTLED)
    found = Ranking(learned).ranks(np.array([[0, 5], [1, 5], [2, 0]]))
    assert found[:, 1].tolist() == [expected, NOVEL, UNKNOWN]
    assert found[2, 0] == NOVEL


def test_tokens_that_should_be_cut_off_are_found() -> None:
    """Five in a thousand continuations have a token outside the top k, too few to move any share of ranks."""
    shares, random = setting("chain", "top-k").shares, np.random.default_rng(8)
    reference, sample = plain(shares, 40_000, random), plain(shares, SAMPLES, random)
    assert not compare(reference, sample).differs
    forbidden = np.flatnonzero(shares[START] == 0)
    sample[::200, 0] = forbidden[0]
    found = compare(reference, sample)
    assert found.differs
    assert found.p_novel < 1e-20


def test_categories_of_few_samples_are_merged() -> None:
    """Two common tokens and ten rare ones, of which two have a rank of their own and 15 samples expected."""
    random = np.random.default_rng(9)
    rare = 0.6 * ENOUGH / 5_000
    shares = [0.6, 0.4 - 10 * rare, *[rare] * 10]
    learned, reference, sample = (random.choice(12, size=(5_000, 1), p=shares) for _ in range(3))
    assert compare(reference, sample, ranking=Ranking(learned)).degrees == 2


@pytest.mark.parametrize("shape", [(50, 2), (50,)])
def test_continuations_of_another_length_are_refused(shape: tuple[int, ...]) -> None:
    reference = np.random.default_rng(0).integers(5, size=(400, 3))
    with pytest.raises(ValueError, match=r"expected \[samples, 3\]"):
        compare(reference, np.zeros(shape, int))


@pytest.mark.parametrize("shape", [(0, 3), (3, 3), (400,)])
def test_a_reference_of_no_use_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \[samples, tokens\]"):
        compare(np.ones(shape, int), np.ones((400, 3), int))


def test_a_reference_without_variety_is_refused() -> None:
    with pytest.raises(ValueError, match="hardly vary, so nothing can be tested"):
        compare(np.ones((4_000, 3), int), np.ones((4_000, 3), int))


# --- collecting


class Scripted(ThreadingHTTPServer):
    """Answers /generate; `broken` spoils the answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.broken = ""
        self.together = self.most_together = 0
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing to report: a client that has had enough hangs up."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert (self.path, self.headers["authorization"]) == ("/generate", "Bearer key")
        server = self.server
        with server.lock:
            first = len(server.bodies) * 1_000
            server.bodies.append(body)
            server.together += len(body["input_ids"])
            server.most_together = max(server.most_together, server.together)
        time.sleep(0.05)
        answers = []
        for place, (prompt, asked) in enumerate(zip(body["input_ids"], body["sampling_params"], strict=True)):
            ids = [prompt[0], first + place, *[7] * (asked["max_new_tokens"] - 2)]
            meta: dict[str, Any] = {"finish_reason": {"type": "length"}}
            if prompt[0] == 1:
                meta |= {"spec_verify_ct": 3, "spec_num_correct_drafts": 2, "spec_correct_drafts_histogram": [2, 0, 1]}
            answers.append({"output_ids": ids, "meta_info": meta})
        if server.broken == "short":
            answers[-1] = {"output_ids": [1], "meta_info": {"finish_reason": {"type": "abort"}}}
        raw = b"no such thing" if server.broken == "status" else json.dumps(answers).encode()
        with server.lock:
            server.together -= len(body["input_ids"])
        self.send_response(400 if server.broken == "status" else 200)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Scripted]:
    with Scripted() as server:
        yield server
        server.shutdown()


CASES = [Case((1, 5), temperature=0.7), Case((2,), top_p=0.9, top_k=8)]
HEADERS = {"authorization": "Bearer key"}


def test_every_case_is_sampled_beside_the_others(server: Scripted) -> None:
    found = collect(server.url, HEADERS, CASES, samples=50, tokens=4, concurrency=12)
    assert [one.tokens.shape for one in found] == [(50, 4), (50, 4)]
    assert [set(one.tokens[:, 0].tolist()) for one in found] == [{1}, {2}]
    assert all(len(np.unique(one.tokens[:, 1])) == 50 for one in found), "an answer was counted twice"
    assert [one.histogram for one in found] == [[100, 0, 50], []]
    asked = [(tuple(p), s) for body in server.bodies for p, s in zip(*body.values(), strict=True)]
    common = {"max_new_tokens": 4, "ignore_eos": True}
    for case, cut_off in zip(CASES, ({"top_p": 1.0, "top_k": -1}, {"top_p": 0.9, "top_k": 8}), strict=True):
        assert asked.count((case.prompt, {"temperature": case.temperature, **cut_off, **common})) == 50
    assert all(len({tuple(prompt) for prompt in body["input_ids"]}) == 2 for body in server.bodies)
    assert server.most_together == 12


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("status", "answered 400: no such thing"),
        ("short", "1 tokens instead of 4.*'abort'"),
        ("gone", "connection failed"),
    ],
)
def test_what_an_engine_does_not_give_is_an_error(server: Scripted, broken: str, message: str) -> None:
    server.broken = broken
    if broken == "gone":
        server.shutdown()
        server.server_close()
    with pytest.raises(SamplingError, match=message):
        collect(server.url, HEADERS, CASES, samples=50, tokens=4, concurrency=12)
