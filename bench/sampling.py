"""Whether speculation samples what plain decoding samples: a goodness-of-fit test on many short continuations.

A token is judged by its rank among those that followed the same prefix: a verify step that favours or shuns drafts
then shows in a few shares, however many prefixes there are. Shapes: N samples of one prompt, L tokens, R ranks,
C categories.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import orjson
from numpy.typing import NDArray
from scipy import stats
from tqdm import tqdm

from drafter.acceptance import add_histograms, histogram_of_details
from drafter.workers import run_workers

Tokens = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

ERROR_RATE = 0.001
RANKS = 4  # the likeliest tokens of a place count each by itself, all others together
ENOUGH = 25  # expected count below which a category is merged, so that the statistic's tail is chi-square's
SETTLED = 100  # a prefix seen less often says nothing about a token never seen after it
NOVEL, UNKNOWN = -1, -2  # instead of a rank: never seen, after a settled prefix or after one hardly or never seen
REQUESTS = 2  # in flight at once, so that the engine never waits for the next one
CONNECT_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 600.0


class SamplingError(RuntimeError):
    """An engine that did not give the samples asked for, in one sentence."""


@dataclass(frozen=True)
class Case:
    """A prompt (token ids) and how to sample after it. The defaults cut nothing off; top_k -1 means all tokens."""

    prompt: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


@dataclass
class Samples:
    """Continuations of one case [N, L], and verify steps by accepted drafts (empty without speculation)."""

    rows: list[list[int]] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> Tokens:
        return np.array(self.rows, dtype=np.int64)


@dataclass(frozen=True)
class Comparison:
    """Whether a sample comes from the distribution that the reference comes from.

    differs: p_value < error_rate, which happens to equal distributions with a chance of error_rate.
    p_value: twice the smaller of p_ranks and p_novel (Bonferroni), at most 1.
    p_ranks, degrees: of the ranks at all positions together, and the statistic's degrees of freedom.
    p_novel: of tokens that the reference does not have where they stand, such as those that top-k should exclude.
    p_by_position: of each position's ranks alone; 1.0 where the reference does not vary.
    tv_by_position: total variation distance of each position's shares of ranks, which bounds that of its tokens from
    below; tv_floor_by_position is what equal distributions are expected to show at these sizes.
    samples, reference_samples: continuations compared.
    """

    differs: bool
    error_rate: float
    p_value: float
    p_ranks: float
    p_novel: float
    p_by_position: tuple[float, ...]
    tv_by_position: tuple[float, ...]
    tv_floor_by_position: tuple[float, ...]
    degrees: int
    samples: int
    reference_samples: int


class Ranking:
    """How often which token followed which prefix, learned from continuations [N, L]; ranks those of others by it.

    shares [L, R]: how often the learned continuations themselves had each rank. Raises ValueError without any.
    """

    def __init__(self, continuations: Tokens) -> None:
        if continuations.ndim != 2 or not continuations.size:
            raise ValueError(f"continuations have shape {continuations.shape}, expected [samples, tokens].")
        self._span = int(continuations.max()) + 1
        self._keys: list[Tokens] = []  # by position: prefix * span + token of every pair seen, ascending
        self._ranks: list[Tokens] = []  # the rank of each
        self._settled: list[Flags] = []  # by position: whether each prefix was seen often
        prefix = np.zeros(len(continuations), np.int64)
        for token in continuations.T:
            keys, place, counts = np.unique(prefix * self._span + token, return_inverse=True, return_counts=True)
            before = keys // self._span
            order = np.lexsort((-counts, before))
            starts = np.flatnonzero(np.diff(before[order], prepend=-1))
            ranks = np.empty_like(keys)
            ranks[order] = np.arange(len(keys)) - np.repeat(starts, np.diff(starts, append=len(keys)))
            self._keys.append(keys)
            self._ranks.append(ranks)
            self._settled.append(np.bincount(prefix) >= SETTLED)
            prefix = place  # a prefix is known by its place among the keys of the position before
        self.shares: Floats = _one_hot(self.ranks(continuations)).mean(axis=0)

    def ranks(self, continuations: Tokens) -> Tokens:
        """[N, L]: 0 for the likeliest token after its prefix, and so on; or NOVEL; or UNKNOWN.

        Raises ValueError where the length differs from that learned.
        """
        if continuations.ndim != 2 or continuations.shape[1] != len(self._keys):
            raise ValueError(
                f"continuations have shape {continuations.shape}, expected [samples, {len(self._keys)}] like the "
                "reference: ask for as many tokens."
            )
        found = np.empty_like(continuations)
        prefix = np.zeros(len(continuations), np.int64)
        for position, (keys, ranks, settled) in enumerate(zip(self._keys, self._ranks, self._settled, strict=True)):
            token = continuations[:, position]
            wanted = np.where((prefix >= 0) & (token < self._span), prefix * self._span + token, -1)
            place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
            seen = keys[place] == wanted
            unseen = np.where((prefix >= 0) & settled[prefix], NOVEL, UNKNOWN)
            found[:, position] = np.where(seen, ranks[place], unseen)
            prefix = np.where(seen, place, -1)
        return found


def compare(
    reference: Tokens, sample: Tokens, *, error_rate: float = ERROR_RATE, ranking: Ranking | None = None
) -> Comparison:
    """Test whether `sample` [N, L] and `reference` [M, L], token ids after one prompt, come from one distribution.

    ranking: learned from continuations that are in neither. None learns it from the first quarter of the reference and
    compares with the rest, since a sample must not choose its own categories.

    Every position has an indicator for each frequent rank. With d [C] the difference of their means and S [C, C] their
    covariance over both samples put together, d' S^-1 d / (1/N + 1/M) is chi-square with rank(S) degrees of freedom
    where the distributions are equal: Hotelling's two-sample statistic (Hotelling 1931), which allows for tokens that
    depend on each other, and for one position is Pearson's chi-square of homogeneity (Pearson 1900). Novel tokens, at
    most one in a continuation, are judged by the binomial test of their number given the total.

    20,000 samples against 180,000 find a verify step whose every decision is 0.02 of total variation away from the
    target, at an error rate of 4e-5, wherever drafts are mostly among the first R ranks (tests/bench/test_sampling.py).

    Raises ValueError where the shapes do not fit, or the reference does not vary enough to test anything.
    """
    if ranking is None:
        learned = len(reference) // 4
        ranking, reference = Ranking(reference[:learned]), reference[learned:]
    ranks_a, ranks_b = ranking.ranks(sample), ranking.ranks(reference)
    n, m = len(sample), len(reference)
    kept = _categories(ranking.shares, min(n, m))
    if not kept.any():
        raise ValueError(
            f"{m} reference continuations hardly vary, so nothing can be tested: raise the temperature, or take more "
            "samples."
        )
    hot_a, hot_b = _one_hot(ranks_a), _one_hot(ranks_b)
    columns = np.concatenate([hot_a[:, kept], hot_b[:, kept]]).astype(np.float64)
    difference = columns[:n].mean(axis=0) - columns[n:].mean(axis=0)
    variance = np.atleast_2d(np.cov(columns, rowvar=False, bias=True)) * (1 / n + 1 / m)
    p_ranks, degrees = _chi_square(difference, variance)
    of_category = np.nonzero(kept)[0]
    p_by_position = []
    for position in range(len(kept)):
        own = of_category == position
        p_by_position.append(_chi_square(difference[own], variance[np.ix_(own, own)])[0] if own.any() else 1.0)

    novel_a, novel_b = int((ranks_a == NOVEL).sum()), int((ranks_b == NOVEL).sum())
    p_novel = float(stats.binomtest(novel_a, novel_a + novel_b, n / (n + m)).pvalue) if novel_a + novel_b else 1.0
    p_value = min(1.0, 2 * min(p_ranks, p_novel))
    distance, floor = _total_variation(hot_a, hot_b)
    return Comparison(
        differs=p_value < error_rate,
        error_rate=error_rate,
        p_value=p_value,
        p_ranks=p_ranks,
        p_novel=p_novel,
        p_by_position=tuple(p_by_position),
        tv_by_position=tuple(distance.tolist()),
        tv_floor_by_position=tuple(floor.tolist()),
        degrees=degrees,
        samples=n,
        reference_samples=m,
    )


def collect(
    url: str,
    headers: Mapping[str, str],
    cases: Sequence[Case],
    *,
    samples: int,
    tokens: int,
    concurrency: int = 256,
    title: str = "samples",
) -> list[Samples]:
    """Ask a running SGLang for `samples` continuations of `tokens` tokens for every case.

    The end token does not end a continuation. The cases travel side by side in the engine's batches, `concurrency`
    continuations at a time. No seed is sent, and then the engine draws every continuation anew from its own generator.
    Draws a bar where stderr is a terminal. Returns the samples case by case. Raises SamplingError.
    """
    found = [Samples() for _ in cases]
    places = list(range(len(cases))) * samples
    size = max(1, concurrency // REQUESTS)
    batches = iter([places[at : at + size] for at in range(0, len(places), size)])
    with tqdm(total=len(places), desc=title, unit="sample", disable=None) as bar:
        asyncio.run(_send(url, headers, cases, batches, tokens, found, bar))
    return found


async def _send(
    url: str,
    headers: Mapping[str, str],
    cases: Sequence[Case],
    batches: Iterator[Sequence[int]],
    tokens: int,
    found: list[Samples],
    bar: tqdm[Any],
) -> None:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=IDLE_TIMEOUT_S)
    # SGLang closes an idle connection after 5 s; ours must go first, or a request meets a closed one.
    connector = aiohttp.TCPConnector(keepalive_timeout=2.0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=dict(headers)) as session:

        async def work() -> None:
            for batch in batches:
                answers = await _ask(session, url, [cases[place] for place in batch], tokens)
                for place, answer in zip(batch, answers, strict=True):
                    _add(found[place], answer, tokens)
                bar.update(len(batch))

        await run_workers(work, REQUESTS)


async def _ask(session: aiohttp.ClientSession, url: str, cases: Sequence[Case], tokens: int) -> Any:
    body = {
        "input_ids": [case.prompt for case in cases],
        "sampling_params": [
            {
                "temperature": case.temperature,
                "top_p": case.top_p,
                "top_k": case.top_k,
                "max_new_tokens": tokens,
                "ignore_eos": True,
            }
            for case in cases
        ],
    }
    try:
        async with session.post(
            f"{url}/generate", data=orjson.dumps(body), headers={"content-type": "application/json"}
        ) as response:
            raw = await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise SamplingError(f"{url}/generate: the connection failed ({str(error) or type(error).__name__})") from error
    if response.status != 200:
        raise SamplingError(f"{url}/generate answered {response.status}: {raw.decode(errors='replace')[:300]}")
    return orjson.loads(raw)


def _add(samples: Samples, answer: Mapping[str, Any], tokens: int) -> None:
    meta, row = answer["meta_info"], answer["output_ids"]
    if len(row) != tokens:
        raise SamplingError(
            f"a continuation has {len(row)} tokens instead of {tokens}: the engine ended it with "
            f"{meta['finish_reason']}"
        )
    samples.rows.append(row)
    if "spec_verify_ct" in meta:
        samples.histogram = add_histograms((samples.histogram, histogram_of_details(meta)))


def _one_hot(ranks: Tokens) -> Flags:
    """Indicators [N, L, R] of the first R ranks."""
    hot: Flags = ranks[..., None] == np.arange(RANKS)
    return hot


def _categories(shares: Floats, samples: int) -> Flags:
    """Which ranks of which positions count by themselves, [L, R]: ENOUGH expected of each, and of the rest together."""
    kept = shares * samples >= ENOUGH
    for row, share in zip(kept, shares, strict=True):
        while row.any() and (1 - share[row].sum()) * samples < ENOUGH:
            row[np.flatnonzero(row)[-1]] = False
    return kept


def _chi_square(difference: Floats, variance: Floats) -> tuple[float, int]:
    """p-value of d' V^-1 d and its degrees of freedom; directions without variance are left out."""
    degrees = int(np.linalg.matrix_rank(variance, hermitian=True))
    statistic = difference @ np.linalg.pinv(variance, hermitian=True) @ difference
    return float(stats.chi2.sf(statistic, degrees)), degrees


def _total_variation(hot_a: Flags, hot_b: Flags) -> tuple[Floats, Floats]:
    """Distance of the shares of ranks by position [L], and what chance alone gives [L].

    A share p among N and among M samples differs by a normal of variance p(1-p)(1/N + 1/M), whose mean magnitude is its
    standard deviation times sqrt(2/pi); the distance is half the sum over the shares.
    """
    n, m = len(hot_a), len(hot_b)
    shares = [
        np.append(hot.mean(axis=0), 1 - hot.mean(axis=0).sum(axis=1, keepdims=True), axis=1) for hot in (hot_a, hot_b)
    ]
    both = (shares[0] * n + shares[1] * m) / (n + m)
    spread = np.sqrt((both * (1 - both)).clip(min=0) * (1 / n + 1 / m) * 2 / math.pi)
    return np.abs(shares[0] - shares[1]).sum(axis=1) / 2, spread.sum(axis=1) / 2
