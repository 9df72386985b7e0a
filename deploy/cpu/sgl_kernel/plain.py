"""Plain sampling of a mixed batch: each request is sampled by what it asks for, not by what its neighbours do.

SGLang's sampler for a CPU (top_k_top_p_min_p_sampling_from_probs_torch in sglang/srt/layers/sampler.py) sorts the
whole vocabulary of every request as soon as one of the batch is greedy beside sampled ones, or has a top-k or top-p:
half of the time of a step of 96 requests over 49,152 tokens.
"""

from __future__ import annotations

import torch

PARAMETERS = "probs top_ks top_ps min_ps need_min_p_sampling sampling_seed positions return_filtered_probs max_top_k"


def sampler_of(original):
    """The sampler, with `original` for the requests that need its sort, and for all where a request has a seed,
    min-p is in use, or the caller wants the filtered probabilities."""

    def sample(
        probs,
        top_ks,
        top_ps,
        min_ps,
        need_min_p_sampling,
        sampling_seed,
        positions,
        *,
        return_filtered_probs=False,
        max_top_k=None,
    ):
        """probs [B, V] that sum to one; top_ks [B], at least V for all tokens; top_ps [B]. Returns int32 ids [B]."""
        plain = sampling_seed is None and not need_min_p_sampling and not return_filtered_probs
        greedy = top_ks == 1
        whole = (top_ks >= probs.shape[-1]) & (top_ps >= 1.0)
        if not plain or not (greedy | whole).any():
            return original(
                probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions,
                return_filtered_probs=return_filtered_probs, max_top_k=max_top_k,
            )  # fmt: skip
        ids = torch.empty(len(probs), dtype=torch.int32)
        ids[greedy] = probs[greedy].argmax(-1).int()
        whole &= ~greedy
        ids[whole] = draw(probs[whole]).int()
        cut = ~(greedy | whole)
        if cut.any():
            most = int(top_ks[cut].max())
            ids[cut] = original(
                probs[cut], top_ks[cut], top_ps[cut], min_ps[cut], False, None, None,
                max_top_k=most if most < probs.shape[-1] else None,
            )  # fmt: skip
        return ids

    return sample


def draw(probs):
    """One token of each row [B, V], with its probability: where the summed row passes a uniform coin. int64 [B]."""
    summed = torch.cumsum(probs, dim=-1, dtype=torch.float64)
    # At most the sum itself, past which no token with a probability lies.
    coins = torch.rand(len(probs), 1, dtype=torch.float64) * summed[:, -1:]
    found = torch.searchsorted(summed, coins, right=True)[:, 0]
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(found, last)
