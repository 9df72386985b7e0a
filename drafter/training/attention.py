"""Attention of training-time test: every row sees the first step's rows up to its own, then its own chain alone.

Both parts share one softmax. The first part is torch's flash attention; the few scores of the chain are merged into its
log-sum-exp, forwards and backwards, so that no [Q, S + J Q] matrix exists. Shapes as in model.py. On a CPU the first
part is torch's flash operator, elsewhere it is written out here, a document at a time, to the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where packed rows lie in padded grids.

    key_slot_P, query_slot_R: int64 places in a [B * S] and a [B * Q] grid. query_R: the packed row of each query row.
    position_P: a row's position in its document. unseen_BQS: True where a query may not look. `documents`, `keys` and
    `queries` are B, S and Q.
    """

    key_slot_P: Tensor
    query_slot_R: Tensor
    query_R: Tensor
    position_P: Tensor
    unseen_BQS: Tensor
    documents: int
    keys: int
    queries: int

    @classmethod
    def of(cls, rows: list[int], query_P: Tensor) -> Layout:
        """For documents of so many rows each; `query_P` (bool) marks the rows that are drafted from."""
        device = query_P.device
        rows_B = torch.tensor(rows, device=device)
        document_P = torch.arange(len(rows), device=device).repeat_interleave(rows_B)
        position_P = torch.arange(sum(rows), device=device) - (rows_B.cumsum(0) - rows_B)[document_P]
        query_R = query_P.nonzero()[:, 0]
        assert len(query_R), "nothing to attend from"  # the flash operator divides by the number of queries
        document_R = document_P[query_R]
        queries_B = torch.bincount(document_R, minlength=len(rows))
        order_R = torch.arange(len(query_R), device=device) - (queries_B.cumsum(0) - queries_B)[document_R]
        keys, queries = int(rows_B.max()), int(queries_B.max())
        last_BQ = torch.zeros(
            len(rows), queries, dtype=torch.int64, device=device
        )  # padding looks at the first key, so no NaN
        last_BQ[document_R, order_R] = position_P[query_R]
        return cls(
            key_slot_P=document_P * keys + position_P,
            query_slot_R=document_R * queries + order_R,
            query_R=query_R,
            position_P=position_P,
            unseen_BQS=torch.arange(keys, device=device) > last_BQ[..., None],
            documents=len(rows),
            keys=keys,
            queries=queries,
        )

    def pad_keys(self, x_PGD: Tensor) -> Tensor:
        """[B, G, S, D] of packed key rows, zeros in between."""
        return _pad(x_PGD, self.key_slot_P, self.documents, self.keys)

    def pad_queries(self, x_RND: Tensor) -> Tensor:
        """[B, N, Q, D] of query rows, zeros in between."""
        return _pad(x_RND, self.query_slot_R, self.documents, self.queries)

    def unpad_queries(self, x_BNQD: Tensor) -> Tensor:
        """The query rows of a padded grid, [R, N, D]."""
        return x_BNQD.transpose(1, 2).flatten(0, 1)[self.query_slot_R]


def _pad(x_PGD: Tensor, slot_P: Tensor, documents: int, longest: int) -> Tensor:
    grid = x_PGD.new_zeros(documents * longest, *x_PGD.shape[1:]).index_copy(0, slot_P, x_PGD)
    return grid.unflatten(0, (documents, longest)).transpose(1, 2)


class _Attend(torch.autograd.Function):
    """Arguments: q [R, N, D], first step's k and v [B, N, S, D], layout, then J keys and J values [R, N, D].

    With S_0 the first part's scores and e_j the chain's: l = log(sum exp S_0 + sum_j exp e_j), out = sum of
    exp(score - l) times value. Flash's backward reads only `out` and `l`; given the shared ones it yields the first
    part's gradients of the shared softmax.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, *chain: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        q_BNQD = layout.pad_queries(q)
        bias = q.new_zeros(layout.unseen_BQS.shape).masked_fill(layout.unseen_BQS, -torch.inf)[:, None]
        bias = bias.expand(-1, q.shape[1], -1, -1)
        if has_operator(q):
            out_BNQD, lse_BNQ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q_BNQD, k, v, 0.0, False, attn_mask=bias, scale=scale
            )
        else:
            out_BNQD, lse_BNQ = written_out(q_BNQD, k, v, bias, scale)
        out_RND, lse_RN1 = layout.unpad_queries(out_BNQD), layout.unpad_queries(lse_BNQ[..., None])
        own_k, own_v = chain[: len(chain) // 2], chain[len(chain) // 2 :]
        chances: list[Tensor] = []
        if own_k:
            score_RNJ = torch.cat([(q.float() * key).sum(-1, keepdim=True) for key in own_k], dim=-1) * scale
            all_RN1 = torch.cat([lse_RN1, score_RNJ], dim=-1).logsumexp(-1, keepdim=True)
            chances = list((score_RNJ - all_RN1).exp().split(1, dim=-1))
            out = out_RND * (lse_RN1 - all_RN1).exp()
            for chance_RN1, value in zip(chances, own_v, strict=True):
                out = torch.addcmul(out, chance_RN1, value.float())
            out_RND, lse_RN1 = out.to(q.dtype), all_RN1
        ctx.layout, ctx.scale = layout, scale
        ctx.save_for_backward(q, k, v, bias, out_RND, lse_RN1, *chances, *chain)
        return out_RND

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out_RND, lse_RN1, *rest = ctx.saved_tensors
        steps = len(rest) // 3
        chances, own_k, own_v = rest[:steps], rest[steps : 2 * steps], rest[2 * steps :]
        layout, scale = ctx.layout, ctx.scale
        d_out = gradients[0].contiguous()
        padded = (
            layout.pad_queries(d_out),
            layout.pad_queries(q),
            k,
            v,
            layout.pad_queries(out_RND),
            layout.pad_queries(lse_RN1)[..., 0].contiguous(),
        )
        if has_operator(q):
            dq_BNQD, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *padded, 0.0, False, attn_mask=bias, scale=scale
            )
        else:
            dq_BNQD, dk, dv = written_out_backward(*padded, bias, scale)
        if not steps:
            return layout.unpad_queries(dq_BNQD), dk, dv, None
        dq = layout.unpad_queries(dq_BNQD).float()
        d_own_k, d_own_v = [], []
        delta_RN1 = (d_out.float() * out_RND).sum(-1, keepdim=True)
        for chance_RN1, key, value in zip(chances, own_k, own_v, strict=True):
            d_score_RN1 = chance_RN1 * ((d_out.float() * value).sum(-1, keepdim=True) - delta_RN1) * scale
            dq = torch.addcmul(dq, d_score_RN1, key.float())
            d_own_k.append((d_score_RN1 * q).to(q.dtype))
            d_own_v.append((chance_RN1 * d_out).to(q.dtype))
        return dq.to(q.dtype), dk, dv, None, *d_own_k, *d_own_v


def has_operator(x: Tensor) -> bool:
    """Whether torch's flash operators with a log-sum-exp and a mask work where `x` is."""
    return bool(x.device.type == "cpu")


def written_out(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention [B, N, Q, D] in q's type and its log-sum-exp [B, N, Q] in fp32; one document's scores at a time."""
    outs, sums = [], []
    for q_NQD, k_NSD, v_NSD, bias_NQS in zip(q, k, v, bias, strict=True):
        score_NQS = (q_NQD @ k_NSD.mT).float() * scale + bias_NQS
        sums.append(score_NQS.logsumexp(-1))
        outs.append(score_NQS.sub_(sums[-1][..., None]).exp_().to(v.dtype) @ v_NSD)
    return torch.stack(outs), torch.stack(sums)


def written_out_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from what the forward gave, or from an output and a log-sum-exp that more keys share."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for d_NQD, q_NQD, k_NSD, v_NSD, out_NQD, lse_NQ, bias_NQS in zip(d_out, q, k, v, out, lse, bias, strict=True):
        chance_NQS = ((q_NQD @ k_NSD.mT).float() * scale + bias_NQS - lse_NQ[..., None]).exp()
        delta_NQ1 = (d_NQD.float() * out_NQD).sum(-1, keepdim=True)
        d_score_NQS = (chance_NQS * ((d_NQD @ v_NSD.mT).float() - delta_NQ1) * scale).to(q.dtype)
        found.append((d_score_NQS @ k_NSD, d_score_NQS.mT @ q_NQD, chance_NQS.to(v.dtype).mT @ d_NQD))
    dq, dk, dv = (torch.stack(parts) for parts in zip(*found, strict=True))
    return dq, dk, dv


def attend(
    q_RND: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, layout: Layout, k_RGD: list[Tensor], v_RGD: list[Tensor]
) -> Tensor:
    """Attention of every query row, [R, N, D]: over its document's keys up to its own, and over its own chain.

    Query head n reads key head n // (N / G).
    """
    group = q_RND.shape[1] // k_BGSD.shape[1]
    if group > 1:
        k_BGSD, v_BGSD = (x.repeat_interleave(group, dim=1) for x in (k_BGSD, v_BGSD))
        k_RGD, v_RGD = ([x.repeat_interleave(group, dim=1) for x in chain] for chain in (k_RGD, v_RGD))
    out: Tensor = _Attend.apply(q_RND, k_BGSD, v_BGSD, layout, *k_RGD, *v_RGD)
    return out
