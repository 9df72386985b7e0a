"""A small Markov target and its drafts, drawn from plainly and by verify steps that may be slightly off.

The steps are walked for all samples at once; test_sampling_power.py holds that walk against the engine's own op.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

VOCABULARY, LENGTH, STEPS, START = 24, 4, 3, 0
BIAS = 0.02  # total variation distance of every biased decision
DECODINGS = {"plain": {}, "top-p": {"top_p": 0.9}, "top-k": {"temperature": 1.3, "top_k": 6}}
TREES = {"chain": (1, 4), "tree": (2, 6)}  # children of a node at most, nodes with the root


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
