"""Attention over the paged KV cache, through torch's scaled_dot_product_attention in the served dtype.

SGLang's `intel_amx` backend calls these two ops once a layer. Query heads that share a KV head become rows of one
call, a batch one padded call, and keys are padded to whole blocks: a row then comes out the same to the bit however
many rows go with it (bfloat16 on a processor with AMX), so that verifying drafts changes no answer there either.
Shapes: B requests, T query rows, N keys, H query heads, K KV heads, G = H/K, D head width (V: of the values), S slots.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from sgl_kernel import native

# The kernel adds up keys in vectors, and treats what is left over after the last whole one differently.
KEY_BLOCK = 32
# Rows times heads in one call: beyond, the kernel splits the rows, and sums come out differently again.
CALL_ROWS = 32
# Up to so many rows a call is folded; a longer prompt goes through the kernel as it is.
MAX_FOLDED_ROWS = 32
# Padding a batch to its longest context pays while it does less than twice the work.
MAX_PADDING = 2.0


def decode_attention_cpu(
    query,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    output,
    key,
    value,
    loc,
    attn_logits,
    req_to_token,
    req_pool_indices,
    seq_lens,
    sm_scale,
    logit_cap,
    is_cross_attn=False,
    sliding_window_size=0,
    encoder_lens=None,
    sinks=None,
):
    """One new token a request: store its key and value, then attend to the request's whole context.

    query [B, H, D]; k_cache [S, K, D]; v_cache [S, K, V], with MLA a view of k_cache's first columns; key [B, K*D]
    and value [B, K*V], or None where they are stored already; loc [B]; req_to_token [P, L] int32; seq_lens [B], the
    new token included; sliding_window_size 0 or less means none. Writes output [B, H, V]. attn_logits is scratch
    space of the AMX kernel.
    """
    refuse_unsupported(is_cross_attn, encoder_lens, query, k_cache)
    if key is not None:
        k_cache[loc] = key.view(-1, *k_cache.shape[1:])
        if value is not None and not is_latent(k_cache, v_cache):
            v_cache[loc] = value.view(-1, *v_cache.shape[1:])
    special = is_special(logit_cap, sinks)
    if not special and native.fits(query, k_cache, v_cache, output):
        native.attend(
            query, output, k_cache, v_cache, None, None, req_to_token, req_pool_indices, seq_lens, None, None, None,
            sm_scale, True, sliding_window_size,
        )  # fmt: skip
        return
    requests = [
        (row, max(0, end - sliding_window_size) if sliding_window_size > 0 else 0, end)
        for row, end in zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    ]
    together = bool(requests) and not special and padding_pays([end - start for _, start, end in requests])
    first = 0
    for spans in [tuple(requests)] if together else [(request,) for request in requests]:
        rows = slice(first, first + len(spans))
        first += len(spans)
        lengths = tuple(end - start for _, start, end in spans)
        width = whole_blocks(max(lengths))
        k, v = gather(k_cache, v_cache, req_to_token, spans, width)
        mask = padding_mask(lengths, width, query.dtype)
        q, out = query[rows].unsqueeze(1), output[rows].unsqueeze(1)
        if special:
            attend_special(q, k, v, mask, sm_scale, logit_cap, sinks, out)
        else:
            attend(q, k, v, mask, sm_scale, out)


def extend_attention_cpu(
    q_extend,
    k_extend,
    v_extend,
    o_extend,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_seq_lens,
    extend_start_loc,
    max_len_extend,
    sm_scale,
    logit_cap,
    is_cross_attn=False,
    sliding_window_size=0,
    encoder_lens=None,
    sinks=None,
    tree_mask=None,
    is_causal=True,
):
    """Several new tokens a request (a prompt, or drafts to verify) after a cached prefix, which may be empty.

    q_extend [sum T, H, D]; k_extend [sum T, K, D] and v_extend [sum T, K, V] (or flat), or None to read them from the
    cache; k_buffer [S, K, D]; v_buffer [S, K, V], with MLA a view of k_buffer's first columns; seq_lens [B], the new
    tokens included; tree_mask: for each request T*T booleans, row by row, true where a draft may see a draft; without
    it a row sees what precedes it, or everything where is_causal is false. Writes o_extend [sum T, H, V].
    """
    refuse_unsupported(is_cross_attn, encoder_lens, q_extend, k_buffer)
    special = is_special(logit_cap, sinks)
    few = max(extend_seq_lens.tolist(), default=0) <= MAX_FOLDED_ROWS
    if few and not special and native.fits(q_extend, k_buffer, v_buffer, o_extend, k_extend, v_extend):
        native.attend(
            q_extend, o_extend, k_buffer, v_buffer, k_extend, v_extend, req_to_token, req_pool_indices, seq_lens,
            extend_seq_lens, extend_start_loc, tree_mask, sm_scale, is_causal, sliding_window_size,
        )  # fmt: skip
        return
    plain = tree_mask is None and is_causal and sliding_window_size <= 0 and not special
    requests, mask_at = [], 0
    for row, end, length, start in zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), extend_start_loc.tolist(), strict=True
    ):
        if length:
            requests.append(Request(row, end, length, start, mask_at))
        mask_at += length * length
    for group in groups(requests, special):
        size, length, first, mask_at = len(group), group[0].length, group[0].start, group[0].mask_at
        rows, trees = slice(first, first + size * length), slice(mask_at, mask_at + size * length * length)
        spans = tuple((request.row, 0, request.end) for request in group)
        q = q_extend[rows].view(size, length, *q_extend.shape[1:])
        out = o_extend[rows].view(size, length, *o_extend.shape[1:])
        prefixes = tuple(end - length for _, _, end in spans)
        k_new = v_new = None
        if k_extend is not None:
            k_new = k_extend[rows].view(size, length, -1, q.shape[-1])
            v_new = v_extend[rows].view(size, length, -1, out.shape[-1])
            if plain and not any(prefixes) and length > MAX_FOLDED_ROWS:
                prompt(q, k_new, v_new, sm_scale, out)
                continue
        width = whole_blocks(max(end for _, _, end in spans))
        if k_new is not None and k_new.shape[2:] != k_buffer.shape[1:]:
            # MLA that is not absorbed: heads of their own, where the cache holds latent rows.
            assert not any(prefixes), "heads that are not cached cannot follow a cached prefix"
            k, v = F.pad(k_new, (0, 0, 0, 0, 0, width - length)), F.pad(v_new, (0, 0, 0, 0, 0, width - length))
        else:
            k, v = gather(k_buffer, v_buffer, req_to_token, spans, width)
            if k_new is not None:
                places = new_places(prefixes, length, width)
                k.view(-1, *k.shape[2:]).index_copy_(0, places, k_new.reshape(-1, *k.shape[2:]))
                if v is not k:
                    v.view(-1, *v.shape[2:]).index_copy_(0, places, v_new.reshape(-1, *v.shape[2:]))
        tree = None if tree_mask is None else tree_mask[trees].bool().numpy().tobytes()
        mask = extend_mask(prefixes, length, width, tree, is_causal, sliding_window_size, q.dtype)
        if special:
            attend_special(q, k, v, mask, sm_scale, logit_cap, sinks, out)
        else:
            attend(q, k, v, mask, sm_scale, out)


def refuse_unsupported(is_cross_attn, encoder_lens, query, k_cache):
    """Raise for what the stand-in does not do, rather than answer wrongly."""
    if is_cross_attn or encoder_lens is not None:
        raise NotImplementedError("the CPU stand-in for sgl_kernel has no cross attention: serve this model on a GPU")
    if k_cache.dtype != query.dtype:
        raise NotImplementedError(
            f"the CPU stand-in for sgl_kernel keeps the KV cache in the served dtype ({query.dtype}), found "
            f"{k_cache.dtype}: leave out --kv-cache-dtype"
        )


def is_latent(k_cache, v_cache):
    """Whether values are the first columns of the keys, as in MLA's cache."""
    return v_cache.data_ptr() == k_cache.data_ptr()


def is_special(logit_cap, sinks):
    """Whether scaled_dot_product_attention cannot express it."""
    return sinks is not None or bool(logit_cap and logit_cap > 0)


def whole_blocks(keys):
    """The number of keys, padded."""
    return -(-keys // KEY_BLOCK) * KEY_BLOCK


def padding_pays(lengths):
    """Whether to attend to contexts of these lengths in one call."""
    return max(lengths) * len(lengths) <= MAX_PADDING * sum(lengths)


class Request(NamedTuple):
    """A request that extends: its row of the slot table, its length with the new tokens, their number, and where its
    queries and its tree mask start."""

    row: int
    end: int
    length: int
    start: int
    mask_at: int


def groups(requests, special):
    """Split requests into what one call attends to: all of them, where they extend by one length, lie one after
    another, and padding pays; else each."""
    if requests and not special:
        first, length = requests[0].start, requests[0].length
        alike = all(r.length == length and r.start == first + i * length for i, r in enumerate(requests))
        if alike and padding_pays([request.end for request in requests]):
            return [requests]
    return [[request] for request in requests]


# What follows from a few numbers alone is kept for the next layer, which asks for the same.
@functools.lru_cache(maxsize=8)
def table_places(spans, width, columns):
    """Where req_to_token, flattened, holds the slots of each (row, start, end): [B*width], padded with each
    request's first, whose key is finite wherever the request's answer is."""
    places = torch.empty((len(spans), width), dtype=torch.int64)
    for b, (row, start, end) in enumerate(spans):
        places[b, : end - start] = torch.arange(row * columns + start, row * columns + end)
        places[b, end - start :] = row * columns + start
    return places.view(-1)


@functools.lru_cache(maxsize=8)
def new_places(prefixes, length, width):
    """Where new keys go among the gathered ones, flattened: [B*length]."""
    starts = torch.tensor([b * width + prefix for b, prefix in enumerate(prefixes)])
    return (starts[:, None] + torch.arange(length)).view(-1)


@functools.lru_cache(maxsize=8)
def padding_mask(lengths, width, dtype):
    """[B, 1, width] additive: -inf past each request's length."""
    return additive(torch.arange(width) < torch.tensor(lengths)[:, None, None], dtype)


@functools.lru_cache(maxsize=4)
def extend_mask(prefixes, length, width, tree, is_causal, window, dtype):
    """What each new row may not see, additive: [B, length, width]. Keys lie at their positions, the new ones from the
    prefix on; tree: B*length*length booleans as bytes, or None; a window counts back from the row itself."""
    key, starts = torch.arange(width), torch.tensor(prefixes)[:, None, None]
    row = starts + torch.arange(length)[:, None]
    if tree is not None:
        seen = (key < starts).expand(len(prefixes), length, width).clone()
        drafts = torch.frombuffer(bytearray(tree), dtype=torch.bool).view(len(prefixes), length, length)
        for b, prefix in enumerate(prefixes):
            seen[b, :, prefix : prefix + length] = drafts[b]
    else:
        seen = key <= row if is_causal else (key < starts + length).expand(len(prefixes), length, width)
    if window > 0:
        seen = seen & (key > row - window)
    return additive(seen, dtype)


def additive(seen, dtype):
    """0 where a key is seen and -inf elsewhere, in the served dtype: what the kernel takes without converting it."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)


def gather(k_cache, v_cache, req_to_token, spans, width):
    """Keys [B, width, K, D] and values of each (row, start, end); of a latent cache one tensor twice."""
    slots = req_to_token.reshape(-1).index_select(0, table_places(spans, width, req_to_token.shape[1]))
    k = k_cache.index_select(0, slots).view(len(spans), width, *k_cache.shape[1:])
    if is_latent(k_cache, v_cache):
        return k, k
    return k, v_cache.index_select(0, slots).view(len(spans), width, *v_cache.shape[1:])


def attend(q, k, v, mask, scale, out):
    """softmax(q k^T * scale + mask) v, into `out`.

    q [B, T, H, D]; k [B, N, K, D]; v [B, N, K, V'], where V' may exceed V (a latent cache: the rest is not a value)
    or fall short of D; mask [B, T, N] additive; out [B, T, H, V].
    """
    batch, rows, heads, width = q.shape
    kv_heads, v_width = k.shape[2], out.shape[3]
    group = heads // kv_heads
    k, v = k.transpose(1, 2), as_wide(v, width).transpose(1, 2)
    if rows > MAX_FOLDED_ROWS:
        found = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask[:, None], scale=scale, enable_gqa=group > 1
        )
        out.copy_(found[..., :v_width].transpose(1, 2))
        return
    q, out = q.view(batch, rows, kv_heads, group, width), out.view(batch, rows, kv_heads, group, v_width)
    step = max(1, CALL_ROWS // group)
    for first in range(0, rows, step):
        some = slice(first, min(first + step, rows))
        count = (some.stop - first) * group
        # [B, T, K, G, D] -> [B, K, G*T, D], which moves nothing where T is 1.
        folded = q[:, some].permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, count, width)
        repeated = mask[:, None, some].repeat(1, 1, group, 1) if count > 1 else mask[:, None, some]
        found = F.scaled_dot_product_attention(folded, k, v, attn_mask=repeated, scale=scale)
        found = found[..., :v_width].view(batch, kv_heads, group, -1, v_width)
        out[:, some].copy_(found.permute(0, 3, 1, 2, 4))


def prompt(q, k, v, scale, out):
    """Attention of a prompt to itself, each row to what precedes it: shapes as in `attend`, N = T."""
    found = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        as_wide(v, q.shape[3]).transpose(1, 2),
        is_causal=True,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    out.copy_(found[..., : out.shape[3]].transpose(1, 2))


def as_wide(v, width):
    """Values padded to the width of the keys, where narrower: the fast kernel wants one width."""
    return F.pad(v, (0, width - v.shape[3])) if v.shape[3] < width else v


def attend_special(q, k, v, mask, scale, logit_cap, sinks, out):
    """As `attend`, for the rare variants, in float32: scores squeezed to logit_cap*tanh(score/logit_cap), and sinks
    [H]: a logit for each head that takes part in the softmax and has no value."""
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    keys = k.float().repeat_interleave(group, dim=2)
    values = v[..., : out.shape[3]].float().repeat_interleave(group, dim=2)
    scores = torch.einsum("bthd,bnhd->bhtn", q.float(), keys) * scale
    if logit_cap and logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    scores = scores + mask[:, None]
    if sinks is not None:
        sink = sinks.float().view(heads, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    out.copy_(torch.einsum("bhtn,bnhd->bthd", weights, values))


SCHEMAS = {
    decode_attention_cpu: (
        "(Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, float k_scale, float v_scale, Tensor(c!) output,"
        " Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits, Tensor req_to_token, Tensor req_pool_indices,"
        " Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross_attn, int sliding_window_size,"
        " Tensor? encoder_lens, Tensor? sinks) -> ()"
    ),
    extend_attention_cpu: (
        "(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a!) o_extend, Tensor k_buffer, Tensor v_buffer,"
        " float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens,"
        " Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float sm_scale, float logit_cap,"
        " bool is_cross_attn, int sliding_window_size, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask,"
        " bool is_causal) -> ()"
    ),
}
