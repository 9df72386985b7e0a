"""Plain sampling of a mixed batch draws, for every request, what it would draw alone."""

import inspect

import pytest
import sgl_kernel  # noqa: F401  registers torch.ops.sgl_kernel
import torch
from scipy import stats
from sgl_kernel import plain

SAMPLER = "sglang.srt.layers.sampler"
ALL = 1 << 30
ERROR_RATE = 1e-4
SHARES = torch.tensor([0.0, 0.4, 0.05, 0.25, 0.0, 0.1, 0.2, 0.0])
# (top_k, top_p, what is left of SHARES)
ASKED = {
    "greedy": (1, 1.0, [1]),
    "greedy with top-p": (1, 0.5, [1]),
    "all": (ALL, 1.0, [1, 2, 3, 5, 6]),
    "just all": (8, 1.0, [1, 2, 3, 5, 6]),
    "top-k": (3, 1.0, [1, 3, 6]),
    "top-p": (ALL, 0.5, [1, 3]),
    "both": (2, 0.9, [1, 3]),
}


def original(probs, top_ks, top_ps, min_ps, need_min_p_sampling, *unused, max_top_k=None):
    """By definition, one request at a time: what SGLang's sampler does, slowly."""
    assert not need_min_p_sampling and (max_top_k is None or max_top_k == int(top_ks.max()))
    found = []
    for row, top_k, top_p in zip(probs, top_ks.tolist(), top_ps.tolist(), strict=True):
        order = row.sort(descending=True, stable=True)
        kept = order.values.clone()
        kept[top_k:] = 0
        kept[order.values.cumsum(0) - order.values > top_p] = 0
        found.append(int(order.indices[torch.multinomial(kept, 1)]))
    return torch.tensor(found, dtype=torch.int32)


def sample(names, times):
    """Ids [times, len(names)] of a batch in which every name stands `times` times."""
    asked = [ASKED[name] for name in names] * times
    top_ks, top_ps = torch.tensor([k for k, _, _ in asked]), torch.tensor([p for _, p, _ in asked])
    probs = SHARES.expand(len(asked), -1).clone()
    return plain.sampler_of(original)(probs, top_ks, top_ps, torch.zeros(len(asked)), False, None, None).view(
        times, len(names)
    )


@pytest.mark.parametrize("names", [tuple(ASKED), ("greedy", "all"), ("all",), ("top-k", "greedy")], ids="+".join)
def test_every_request_is_sampled_by_what_it_asks_for(names):
    torch.manual_seed(1)
    found = sample(names, 4_000)
    assert found.dtype == torch.int32
    for column, name in enumerate(names):
        left = torch.zeros(8)
        left[ASKED[name][2]] = SHARES[ASKED[name][2]]
        counts = torch.bincount(found[:, column], minlength=8)
        assert counts[left == 0].sum() == 0, name
        if len(ASKED[name][2]) > 1:
            seen = left > 0
            expected = left[seen].double() / left[seen].double().sum() * 4_000
            assert stats.chisquare(counts[seen].numpy(), expected.numpy()).pvalue > ERROR_RATE, name


def test_a_coin_at_either_end_draws_a_token_with_a_probability(monkeypatch):
    for coin, token in ((0.0, 1), (1.0, 6), (0.41, 2), (0.39, 1)):
        monkeypatch.setattr(torch, "rand", lambda *size, dtype, coin=coin: torch.full(size, coin, dtype=dtype))
        assert plain.draw(SHARES.double()[None]).tolist() == [token]


@pytest.mark.parametrize(
    "options",
    [
        {"sampling_seed": torch.tensor([5]), "positions": torch.tensor([1])},
        {"need_min_p_sampling": True},
        {"return_filtered_probs": True},
        {"top_ks": torch.tensor([3]), "max_top_k": 3},
    ],
    ids=str,
)
def test_what_it_does_not_know_goes_to_sglang_whole(sglang, options):
    theirs = sglang(SAMPLER).top_k_top_p_min_p_sampling_from_probs_torch
    given = {}

    def keep(*arguments, **named):
        bound = inspect.signature(theirs).bind(*arguments, **named)  # raises where SGLang would not take it
        bound.apply_defaults()
        given.update(bound.arguments)
        return "theirs"

    ones = torch.ones(1)
    arguments = dict.fromkeys(["need_min_p_sampling", "return_filtered_probs"], False)
    arguments |= {"probs": SHARES[None], "top_ks": ones.int(), "top_ps": ones, "min_ps": ones * 0}
    arguments |= {"sampling_seed": None, "positions": None, "max_top_k": None} | options
    assert plain.sampler_of(keep)(**arguments) == "theirs"
    assert given.keys() == arguments.keys() == set(plain.PARAMETERS.split())
    assert all(given[name] is value for name, value in arguments.items())


def test_min_p_is_cut_by_sglang(sglang):
    theirs = sglang(SAMPLER).top_k_top_p_min_p_sampling_from_probs_torch
    torch.manual_seed(3)
    ones = torch.ones(500)
    found = plain.sampler_of(theirs)(SHARES.expand(500, -1).clone(), ones * ALL, ones, ones * 0.6, True, None, None)
    assert set(found.tolist()) == {1, 3}


def test_sglangs_own_sampler_takes_the_requests_that_are_cut(sglang):
    theirs = sglang(SAMPLER).top_k_top_p_min_p_sampling_from_probs_torch
    torch.manual_seed(2)
    top_ks, top_ps = torch.tensor([1, ALL, 3] * 500), torch.ones(1500)
    found = plain.sampler_of(theirs)(
        SHARES.expand(1500, -1).clone(), top_ks, top_ps, torch.zeros(1500), False, None, None
    )
    assert set(found.view(-1, 3)[:, 0].tolist()) == {1}
    assert set(found.view(-1, 3)[:, 1].tolist()) == {1, 2, 3, 5, 6}
    assert set(found.view(-1, 3)[:, 2].tolist()) == {1, 3, 6}
