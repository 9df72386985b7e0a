"""Sampling while verifying drafts, so that speculation draws from exactly the distribution that plain decoding does.

SGLang verifies greedily on a CPU, whatever the temperature, because only its GPU builds have these ops. Top-k, top-p
and min-p cut here as its plain CPU sampler cuts (sglang/srt/layers/sampler.py): jointly, on the sorted probabilities,
top-k by rank and so never more than k tokens on a tie. The walk is SGLang's "target only" rule.
"""

from __future__ import annotations

import numpy as np
import torch


def unchanged(probs, limits):
    """Stands where SGLang renormalises by top-k or top-p before the walk: the walk cuts by all three rules at once."""
    return probs


def keep(probs, top_k, top_p, min_p, max_top_k=None):
    """Zero what one request's sampling parameters exclude; not renormalised.

    probs [V] sums to one; top_k at least 1, and anything over V means all; max_top_k is the largest top_k of the
    batch where every request has one (None otherwise): the plain sampler then takes so many by torch.topk and only
    sorts otherwise, which decides between tokens of equal probability at the cut. The most likely token always stays.
    """
    if top_k >= probs.shape[0] and top_p >= 1.0 and min_p <= 0.0:
        return probs
    if max_top_k is not None and max_top_k < probs.shape[0]:
        ordered, tokens = torch.topk(probs, k=max_top_k, sorted=True)
    else:
        ordered, tokens = probs.sort(descending=True)
    before = torch.cumsum(ordered, dim=0) - ordered
    excluded = before > top_p
    excluded[top_k:] = True
    if min_p > 0.0:
        excluded |= ordered < ordered[0] * min_p
    return torch.zeros_like(probs).scatter_(0, tokens, ordered.masked_fill_(excluded, 0.0))


def walk(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    uniform_samples,
    uniform_samples_for_final_sampling,
    distribution,
    threshold_single=1.0,
    threshold_acc=1.0,
):
    """Walk each tree from its root, taking a child with the target's probability of its token.

    One coin decides among a node's children: the first child up to which the accumulated probability exceeds it is
    taken. If none is, the bonus token comes from what the children leave over, so that every token is drawn with
    exactly its own probability (thresholds below 1 accept more, and give that up). distribution(b, node) [V] is the
    target's distribution after a node, unnormalised; the rest as in tree.verify_tree_greedy_cpu, with
    uniform_samples [B, n] and uniform_samples_for_final_sampling [B] in [0, 1).
    """
    most = accept_index.shape[1]
    drafted, index = candidates.tolist(), retrive_index.tolist()
    next_token, next_sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    coins, last_coins = uniform_samples.tolist(), uniform_samples_for_final_sampling.tolist()
    out_predicts, out_index, out_num = predicts.numpy(), accept_index.numpy(), accept_token_num.numpy()
    for b in range(len(drafted)):
        node, accepted = 0, [index[b][0]]
        while True:
            left = distribution(b, node).double()
            total = float(left.sum())
            child, mass, tried = next_token[b][node] if len(accepted) < most else -1, 0.0, []
            while child != -1:
                token = drafted[b][child]
                share = 0.0 if token in tried else float(left[token]) / total
                mass += share
                tried.append(token)
                if coins[b][node] < mass / threshold_acc or share >= threshold_single:
                    break
                child = next_sibling[b][child]
            if child == -1:
                out_predicts[accepted[-1]] = draw(without(left, tried), last_coins[b])
                break
            out_predicts[accepted[-1]] = drafted[b][child]
            accepted.append(index[b][child])
            node = child
        out_index[b, : len(accepted)] = accepted
        out_num[b] = len(accepted) - 1


def without(weights, tokens):
    """A copy of `weights` with no weight on `tokens`; `weights` itself where that would leave nothing (rounding)."""
    rest = weights.clone()
    rest[tokens] = 0.0
    return rest if float(rest.sum()) > 0.0 else weights


def draw(weights, coin):
    """The token at which the accumulated weights [V] pass coin, in [0, 1): never one of no weight."""
    summed = torch.cumsum(weights, dim=0)
    token = int(torch.searchsorted(summed, coin * float(summed[-1]), right=True))
    return min(token, int(weights.nonzero()[-1]))


class Verifier:
    """What takes the place of SGLang's GPU ops while it verifies one batch.

    SGLang draws the coins just before the walk, and the sampling parameters reach only that function, so they are
    remembered there for the walk.
    """

    def __init__(self):
        self.sampling_info = None

    def remembering(self, draw_coins):
        """SGLang's _verify_coins, unchanged but for remembering the batch's sampling parameters."""

        def coins(*, sampling_info, **batch):
            self.sampling_info = sampling_info
            return draw_coins(sampling_info=sampling_info, **batch)

        return coins

    def accept(
        self,
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        uniform_samples,
        uniform_samples_for_final_sampling,
        target_probs,
        draft_probs,
        threshold_single,
        threshold_acc,
        deterministic,
    ):
        """SGLang's tree_speculative_sampling_target_only: target_probs [B, n, V] after temperature, before any cut.
        draft_probs (zeros here) and deterministic (the GPU's order of adding) have no part in this rule."""
        info, self.sampling_info = self.sampling_info, None
        top_ks, top_ps, min_ps = info.top_ks.tolist(), info.top_ps.tolist(), info.min_ps.tolist()
        max_top_k = info.max_top_k if info.sampling_seed is None else None

        def distribution(b, node):
            return keep(target_probs[b, node], top_ks[b], top_ps[b], min_ps[b], max_top_k)

        walk(
            predicts,
            accept_index,
            accept_token_num,
            candidates,
            retrive_index,
            retrive_next_token,
            retrive_next_sibling,
            uniform_samples,
            uniform_samples_for_final_sampling,
            distribution,
            threshold_single,
            threshold_acc,
        )


def murmur_hash32_cpu(seed, positions, col_indices):
    """MurmurHash3 (x86, 32 bits, hash seed 0) of (seed, position, column), from which seeded sampling draws.

    seed [N] uint64; positions [N]; col_indices [M]; returns [N, M] uint32. The 16 bytes hashed are the seed, low half
    first, then the position and the column, each as a 32-bit word. (A. Appleby's MurmurHash3, public domain.)
    """
    low = seed.numpy().astype(np.uint64)
    words = (low & 0xFFFFFFFF, low >> np.uint64(32), positions.numpy())
    state = np.zeros(len(low), dtype=np.uint32)
    for word in words:
        state = mix(state, word.astype(np.uint32))
    state = mix(state[:, None], col_indices.numpy().astype(np.uint32)[None, :])
    state ^= np.uint32(16)
    state ^= state >> np.uint32(16)
    state *= np.uint32(0x85EBCA6B)
    state ^= state >> np.uint32(13)
    state *= np.uint32(0xC2B2AE35)
    state ^= state >> np.uint32(16)
    return torch.from_numpy(state)


def mix(state, word):
    """One round of MurmurHash3: a 32-bit word into the state (both uint32 arrays, wrapping)."""
    word = rotate(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return rotate(state ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def rotate(word, bits):
    """Rotate 32-bit words left."""
    return (word << np.uint32(bits)) | (word >> np.uint32(32 - bits))


SCHEMAS = {murmur_hash32_cpu: "(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor"}
