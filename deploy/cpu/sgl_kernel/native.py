"""What is written in C++, where a compiler was there when the engine was installed; else torch does it.

Attention of a few new rows (attention.cpp): torch's kernel wants the keys side by side, and gathering them from the
paged cache was half of a batch's time. Linear layers of a few rows (linear.cpp): on a processor without bfloat16
instructions torch takes four times as long for four rows as for one.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

LIBRARY = "libeyas_cpu.so"
DTYPES = (torch.float32, torch.bfloat16)
_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64
ARGUMENTS = (
    ctypes.c_int, _POINTER, _INT64, _POINTER, _INT64, _POINTER, _POINTER, _INT64, _INT64, _POINTER, _POINTER, _POINTER,
    _INT64, _INT64, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT64, _INT64, _INT64, _INT64, ctypes.c_float,
    ctypes.c_int, _INT64, ctypes.c_int,
)  # fmt: skip


LINEAR_ARGUMENTS = (ctypes.c_int, _POINTER, _POINTER, _POINTER, _POINTER, _INT64, _INT64, _INT64, ctypes.c_int)


def _load(folder: Path):
    """The two functions, or None twice where they were not built."""
    file = folder / LIBRARY
    if not file.exists():
        return None, None
    library = ctypes.CDLL(str(file))
    attention, linear = library.eyas_attention, library.eyas_linear
    attention.argtypes, attention.restype = ARGUMENTS, None
    linear.argtypes, linear.restype = LINEAR_ARGUMENTS, None
    return attention, linear


_attention, _linear = _load(Path(__file__).parent)


def fits(query, k_cache, v_cache, output, k_new=None, v_new=None):
    """Whether `attend` can be called with these: one dtype, the width of a head without gaps, and the library there."""
    tensors = [each for each in (query, k_cache, v_cache, output, k_new, v_new) if each is not None]
    return (
        _attention is not None
        and query.dtype in DTYPES
        and all(each.dtype == query.dtype and each.device.type == "cpu" for each in tensors)
        and all(packed(each) for each in (query, k_cache, v_cache, output))
        and (k_new is None or k_new.numel() == len(query) * k_cache.shape[1] * k_cache.shape[2])
    )


def packed(tensor):
    """Whether the heads of a row lie side by side: [R, H, D] with any distance between rows, or between heads where
    there is one."""
    return tensor.stride(2) == 1 and (tensor.shape[1] == 1 or tensor.stride(1) == tensor.shape[2])


def attend(
    query,
    output,
    k_cache,
    v_cache,
    k_new,
    v_new,
    table,
    table_rows,
    ends,
    row_counts,
    first_rows,
    masks,
    scale,
    causal,
    window,
):
    """softmax(q k^T * scale) v of each new row over its request's keys, into `output`.

    query [R, H, D]; output [R, H, V]; k_cache [S, K, D]; v_cache [S, K, V]; k_new, v_new [R, ...] or None: the keys
    and values of the new rows, where the cache does not have them; table [P, L] int32 slots; table_rows [B], ends [B]
    (keys in all, the new ones included), row_counts [B] and first_rows [B] (both None: one row each, in order); masks:
    for each request rows*rows booleans, or None; window: keys that a row sees, 0 for all.
    """
    table_rows, ends = _int64(table_rows), _int64(ends)
    row_counts, first_rows = _int64(row_counts), _int64(first_rows)
    if k_new is not None:
        k_new, v_new = k_new.contiguous(), v_new.contiguous()
    assert table.dtype == torch.int32 and table.is_contiguous()
    if masks is not None:
        masks = masks.bool().contiguous()
    _attention(
        query.dtype == torch.bfloat16, query.data_ptr(), query.stride(0), output.data_ptr(), output.stride(0),
        k_cache.data_ptr(), v_cache.data_ptr(), k_cache.stride(0), v_cache.stride(0), _at(k_new), _at(v_new),
        table.data_ptr(), table.shape[1], len(ends), table_rows.data_ptr(), ends.data_ptr(), _at(row_counts),
        _at(first_rows), _at(masks), query.shape[1], k_cache.shape[1], query.shape[2], output.shape[2], scale, causal,
        max(0, window), torch.get_num_threads(),
    )  # fmt: skip


def multiplies(x, weight, bias=None):
    """Whether `multiply` can be called with these: one dtype, a whole weight, and the library there."""
    return (
        _linear is not None
        and x.dtype in DTYPES
        and x.dtype == weight.dtype
        and weight.is_contiguous()
        and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
    )


def multiply(x, weight, bias=None):
    """x [..., K] times weight [N, K], transposed, plus bias [N]: [..., N], summed in float32."""
    x = x.contiguous()
    rows, (outer, inner) = x.numel() // x.shape[-1], weight.shape
    found = x.new_empty((*x.shape[:-1], outer))
    _linear(
        x.dtype == torch.bfloat16, x.data_ptr(), weight.data_ptr(), _at(bias), found.data_ptr(), rows, inner, outer,
        torch.get_num_threads(),
    )  # fmt: skip
    return found


def _int64(tensor):
    return None if tensor is None else tensor.to(torch.int64).contiguous()


def _at(tensor):
    return None if tensor is None else tensor.data_ptr()
