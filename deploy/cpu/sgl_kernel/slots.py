"""Bookkeeping of speculative decoding: which cache slots belong to which drafts, and moving the accepted ones.

All of it copies a few integers a request, through numpy views: they share memory with the tensors, convert between
int32 and int64, and cost a fraction of a torch call.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Enter newly allocated slots into each request's row: req_to_token[r, start:end] = the next end-start of
    out_cache_loc. req_pool_indices, start_offset, end_offset [B]; req_to_token [P, pool_len]."""
    table, slots, at = req_to_token.numpy(), out_cache_loc.numpy(), 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        table[row, start:end] = slots[at : at + end - start]
        at += end - start


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """The reverse: list the slots req_to_token[r, start:end] of each request one after another in out_cache_loc."""
    table, slots, at = req_to_token.numpy(), out_cache_loc.numpy(), 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        slots[at : at + end - start] = table[row, start:end]
        at += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    """List the topk*num_steps slots after each request's context in out_cache_loc [B*topk*num_steps]."""
    table, slots, width = req_to_token.numpy(), out_cache_loc.numpy(), topk * num_steps
    for b, (row, start) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots[b * width : (b + 1) * width] = table[row, start : start + width]


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """A table [B*topk, pool_len] with a row for every branch of every request: the context, then the branch's own
    num_steps slots. Columns past them are zero and never read."""
    table, rows = req_to_token.numpy(), req_pool_indices.tolist()
    out = torch.zeros((len(rows) * topk, pool_len), dtype=req_to_token.dtype)
    branches = out.numpy()
    for b, (row, length) in enumerate(zip(rows, seq_lens.tolist(), strict=True)):
        own = table[row, length : length + topk * num_steps].reshape(topk, num_steps)
        branches[b * topk : (b + 1) * topk, :length] = table[row, :length]
        branches[b * topk : (b + 1) * topk, length : length + num_steps] = own
    return out


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """The last accepted token of each request, from rows of accept_stride tokens."""
    lengths = accept_lens.numpy()
    last = np.arange(len(lengths)) * accept_stride + lengths - 1
    bonus_tokens.numpy()[: len(lengths)] = accept_tokens.reshape(-1).numpy()[last]


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """Pack the slots of the accepted nodes (accept_index, -1 for none) to the front of accept_out_cache_loc."""
    index = accept_index.reshape(-1).numpy()
    index = index[index > -1]
    accept_out_cache_loc.numpy()[: len(index)] = out_cache_loc.numpy()[index]


def rotate_input_ids_cpu(input_ids, extend_start_loc, extend_seq_lens, topk_index, select_index=None):
    """Shift each request's tokens left by one, in place, and put its new token last (or at select_index)."""
    ids, new = input_ids.numpy(), topk_index.reshape(-1).numpy()
    picked = None if select_index is None else select_index.tolist()
    for b, (start, length) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)):
        if length <= 0:
            continue
        ids[start : start + length - 1] = ids[start + 1 : start + length].copy()
        ids[start + length - 1 if picked is None else picked[b]] = new[b]


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Move cache rows from src_loc to tgt_loc in every buffer: all are read before any is written.

    data_ptrs [L]: the buffers' addresses; strides [L]: bytes in a row; tgt_loc, src_loc [M].
    """
    target, source = tgt_loc.numpy(), src_loc.numpy()
    moved = target != source
    if not moved.any():
        return
    target, source = target[moved], source[moved]
    rows = int(max(target.max(), source.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        buffer = np.frombuffer(memory, dtype=np.uint8).reshape(rows, stride)
        buffer[target] = buffer[source]
