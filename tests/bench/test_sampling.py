"""The goodness-of-fit test's arithmetic against counting by hand, and how its samples are collected."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from scipy import stats

from bench.sampling import ENOUGH, NOVEL, RANKS, SETTLED, UNKNOWN, Case, Ranking, SamplingError, collect, compare
from tests.bench.markov import (
    START,
    plain,
    setting,
)

SAMPLES = 20_000


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
