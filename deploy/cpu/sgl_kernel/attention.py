"""Attention over the paged KV cache, through torch's scaled_dot_product_attention in the served dtype.

SGLang's `intel_amx` backend calls these two ops once a layer. Query heads that share a KV head are folded into the
query axis, so keys are read once; a batch runs as one padded call unless its lengths differ so much that padding
would cost more than it saves.
Shapes: B requests, T query rows, N keys, H query heads, K KV heads, G = H/K, D head width (V: of the values), S slots.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch
import torch.nn.functional as F

# A call costs about as much as attending to 100 keys, so padding pays while it does less than twice the work.
MAX_PADDING = 2.0
# Up to so many rows, query heads are folded; beyond, the mask repeated for every head would outgrow the scores.
MAX_FOLDED_ROWS = 32


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
    spans = [
        (row, max(0, end - sliding_window_size) if sliding_window_size > 0 else 0, end)
        for row, end in zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    ]
    special = is_special(logit_cap, sinks)
    if not spans:
        return
    groups = [spans] if not special and padding_pays([end - start for _, start, end in spans]) else [[s] for s in spans]
    first = 0
    for group in groups:
        rows = slice(first, first + len(group))
        first += len(group)
        lengths = [end - start for _, start, end in group]
        k, v = gather(k_cache, v_cache, req_to_token, group, max(lengths))
        if special:
            attend_special(query[rows], k[0], v[0], None, sm_scale, logit_cap, sinks, output[rows])
            continue
        mask = None if len(group) == 1 else padding_mask(tuple(lengths), query.dtype)
        attend(query[rows].unsqueeze(1), k, v, mask, sm_scale, output[rows].unsqueeze(1))


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
    requests, mask_at = [], 0
    for row, end, length, start in zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), extend_start_loc.tolist(), strict=True
    ):
        if length:
            requests.append((row, end - length, length, start, mask_at))
        mask_at += length * length
    for group in uniform_groups(requests, special):
        size, length, first = len(group), group[0][2], group[0][3]
        rows, prefixes = [r[0] for r in group], [r[1] for r in group]
        new = slice(first, first + size * length)
        q = q_extend[new].view(size, length, *q_extend.shape[1:])
        out = o_extend[new].view(size, length, *o_extend.shape[1:])
        tree = None
        if tree_mask is not None:
            tree = tree_mask[group[0][4] : group[0][4] + size * length * length]
        if k_extend is None:
            spans = [(row, prefix, prefix + length) for row, prefix in zip(rows, prefixes, strict=True)]
            k, v = gather(k_buffer, v_buffer, req_to_token, spans, length)
        else:
            k = k_extend[new].view(size, length, -1, q.shape[-1])
            # MLA without a cached prefix may come with ordinary heads, which have values of their own.
            latent = is_latent(k_buffer, v_buffer) and k.shape[2:] == k_buffer.shape[1:]
            v = k if latent else v_extend[new].view(size, length, -1, out.shape[-1])
        longest = max(prefixes)
        if longest:
            spans = [(row, 0, prefix) for row, prefix in zip(rows, prefixes, strict=True)]
            k_old, v_old = gather(k_buffer, v_buffer, req_to_token, spans, longest)
            if v is k:
                k = v = torch.cat([k_old, k], dim=1)
            else:
                k, v = torch.cat([k_old, k], dim=1), torch.cat([v_old, v], dim=1)
        plain = tree is None and sliding_window_size <= 0 and not special
        if plain and is_causal and not longest:
            attend(q, k, v, None, sm_scale, out, is_causal=length > 1)
            continue
        mask = None
        if not (plain and size == length == 1):
            key = None if tree is None else tree.bool().numpy().tobytes()
            mask = extend_mask(tuple(prefixes), length, key, is_causal, sliding_window_size, q.dtype)
        if special:
            attend_special(q[0], k[0], v[0], mask[0], sm_scale, logit_cap, sinks, out[0])
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


def padding_pays(lengths):
    """Whether to attend to contexts of these lengths in one padded call."""
    return max(lengths) * len(lengths) <= MAX_PADDING * sum(lengths)


def uniform_groups(requests, special):
    """Split (row, prefix, length, start, mask offset) into runs to attend in one call: all, where they extend by the
    same length and padding pays, else one by one."""
    if special or not requests or len({length for _, _, length, _, _ in requests}) > 1:
        return [[request] for request in requests]
    contiguous = all(b[3] == a[3] + a[2] for a, b in itertools.pairwise(requests))
    if contiguous and padding_pays([prefix + length for _, prefix, length, _, _ in requests]):
        return [requests]
    return [[request] for request in requests]


def gather(k_cache, v_cache, req_to_token, spans, width):
    """Keys [B, width, K, D] and values of each (row, start, end), padded with slot 0; for a latent cache one tensor
    twice."""
    if len(spans) == 1:
        row, start, end = spans[0]
        slots = req_to_token[row, start:end]
    else:
        slots = req_to_token.new_zeros((len(spans), width))
        for b, (row, start, end) in enumerate(spans):
            slots[b, : end - start] = req_to_token[row, start:end]
        slots = slots.view(-1)
    k = k_cache.index_select(0, slots).view(len(spans), width, *k_cache.shape[1:])
    if is_latent(k_cache, v_cache):
        return k, k
    return k, v_cache.index_select(0, slots).view(len(spans), width, *v_cache.shape[1:])


# Masks are functions of a few numbers, and every layer of a forward pass asks for the same one.
@functools.lru_cache(maxsize=4)
def padding_mask(lengths, dtype):
    """[B, 1, longest] additive: -inf past each request's length."""
    return additive(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None, None], dtype)


@functools.lru_cache(maxsize=4)
def extend_mask(prefixes, length, tree, is_causal, window, dtype):
    """What each new row may not see, additive: [B, length, longest prefix + length]. The keys are the prefix, padded
    to the longest, then the new ones. tree: B*length*length booleans as bytes, or None; a window counts back from the
    row itself."""
    size, longest = len(prefixes), max(prefixes)
    starts, step = torch.tensor(prefixes)[:, None], torch.arange(length)
    old = (torch.arange(longest) < starts)[:, None].expand(size, length, longest)
    if tree is not None:
        new = torch.frombuffer(bytearray(tree), dtype=torch.bool).view(size, length, length)
    else:
        new = torch.ones((size, length, length), dtype=torch.bool)
        new = new.tril() if is_causal else new
    seen = torch.cat([old, new], dim=-1)
    if window > 0:
        key = torch.cat([torch.arange(longest).expand(size, longest), starts + step], dim=1)
        seen &= key[:, None] > (starts + step)[:, :, None] - window
    return additive(seen, dtype)


def additive(seen, dtype):
    """0 where a key is seen and -inf elsewhere, in the served dtype: what the kernel takes without converting it."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)


def attend(q, k, v, mask, scale, out, is_causal=False):
    """softmax(q k^T * scale) v, into `out`.

    q [B, T, H, D]; k [B, N, K, D]; v [B, N, K, V'], where V' may exceed V (a latent cache: the rest is not a value)
    or fall short of D; mask [B, T, N] additive, or None; is_causal: row i sees keys 0..i; out [B, T, H, V].
    """
    batch, rows, heads, width = q.shape
    kv_heads, v_width = k.shape[2], out.shape[3]
    group = heads // kv_heads
    if v.shape[3] < width:  # the fast kernel wants keys and values of one width
        v = F.pad(v, (0, width - v.shape[3]))
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    mask = None if mask is None else mask[:, None]
    if is_causal or rows > MAX_FOLDED_ROWS:
        found = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=group > 1
        )
        out.copy_(found[..., :v_width].transpose(1, 2))
        return
    # [B, T, K*G, D] -> [B, K, G*T, D], which moves nothing where T is 1: heads that share keys become rows.
    folded = q.view(batch, rows, kv_heads, group, width).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(batch, kv_heads, group * rows, width)
    if mask is not None and group > 1:
        mask = mask.repeat(1, 1, group, 1)
    found = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
    found = found[..., :v_width].view(batch, kv_heads, group, rows, v_width).permute(0, 3, 1, 2, 4)
    out.view(batch, rows, kv_heads, group, v_width).copy_(found)


def attend_special(q, k, v, mask, scale, logit_cap, sinks, out):
    """The rare variants, in float32: scores squeezed to logit_cap*tanh(score/logit_cap), and sinks [H]: a logit for
    each head that takes part in the softmax and has no value. q [T, H, D]; k [N, K, D]; v [N, K, V]; mask [T, N]
    additive, or None; out [T, H, V]."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(group, dim=1)
    values = v[..., : out.shape[2]].float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if logit_cap and logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        sink = sinks.float().view(heads, 1, 1).expand(heads, scores.shape[1], 1)
        weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    out.copy_(torch.einsum("hqk,khd->qhd", weights, values))


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
