"""Linear layers for a few rows, by what the processor has.

With bfloat16 instructions: bfloat16 weights laid out for oneDNN beforehand, which are otherwise re-laid at every call.
Worth a third of a decode step, and more in verification, where four rows then cost little more than one. Results are
those of torch's own linear up to bfloat16's rounding. The price is a second copy of the weights.

Without them torch's bfloat16 is slow for any number of rows: a few go through linear.cpp, many are multiplied in
float32, the weights widened a part at a time, and rounded at the end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sgl_kernel import native

# Below this size the packed call's overhead outweighs its gain; above so many rows the usual kernel is faster.
MIN_WEIGHTS = 200_000
MAX_ROWS = 128
# Up to so many rows linear.cpp is faster than the float32 of a library.
MAX_NATIVE_ROWS = 16
WIDE_WEIGHTS = 1_000_000  # widened at a time, so that they are still in the cache when they are multiplied
# False where the processor has no bfloat16 instructions that oneDNN uses.
SUPPORTED = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()

_generation = 0
_wide = torch.empty(0)


def linear(layer, x, bias=None):
    """x [..., in] times layer.weight [out, in], transposed, plus bias, by the quickest way there is."""
    weight = layer.weight
    rows = x.numel() // x.shape[-1]
    if not SUPPORTED:
        if 0 < rows <= MAX_NATIVE_ROWS and native.multiplies(x, weight, bias):
            return native.multiply(x, weight, bias)
        if rows > 0 and x.dtype is weight.dtype is torch.bfloat16:
            return widened(x, weight, bias)
    elif (
        weight.dtype is torch.bfloat16
        and x.dtype is torch.bfloat16
        and weight.numel() >= MIN_WEIGHTS
        and rows <= MAX_ROWS
    ):
        return torch.ops.mkldnn._linear_pointwise(x, packed(layer), bias, "none", [], "")
    return F.linear(x, weight, bias)


def widened(x, weight, bias=None):
    """bfloat16 x [..., K] times weight [N, K], transposed, plus bias, in float32 and rounded at the end."""
    global _wide
    outer, inner = weight.shape
    wide_x = x.reshape(-1, inner).float()
    found = x.new_empty((len(wide_x), outer))
    step = max(1, WIDE_WEIGHTS // inner)
    if _wide.numel() < step * inner:
        _wide = torch.empty(step * inner)
    for begin in range(0, outer, step):
        part = weight[begin : begin + step]
        wide = _wide[: part.numel()].view(part.shape).copy_(part)
        added = None if bias is None else bias[begin : begin + step].float()
        found[:, begin : begin + step] = F.linear(wide_x, wide, added)
    return found.view(*x.shape[:-1], outer)


def packed(layer):
    """layer.weight in oneDNN's layout: made at first use, and again for another tensor or after new weights."""
    key = (_generation, layer.weight.data_ptr())
    held = layer.__dict__.get("_eyas_packed")
    if held is None or held[0] != key:
        held = layer.__dict__["_eyas_packed"] = (key, torch.ops.mkldnn._reorder_linear_weight(layer.weight.data, 1))
    return held[1]


def apply(self, layer, x, bias=None):
    """SGLang's UnquantizedLinearMethod.apply."""
    return linear(layer, x, bias)


def head_of(original):
    """SGLang's LogitsProcessor._compute_lm_head: ours where the original would multiply in the weight's dtype."""

    def compute_lm_head(self, hidden_states, lm_head, embedding_bias=None, *, out=None):
        weight = lm_head.__dict__.get("_parameters", {}).get("weight")
        plain = (
            weight is not None
            and weight.dtype is hidden_states.dtype
            and (weight.dtype is torch.bfloat16 or not SUPPORTED)
            and embedding_bias is None
            and not self.use_fp32_lm_head
            and self.rl_on_policy_target is None
        )
        if plain:
            return linear(lm_head, hidden_states)
        return original(self, hidden_states, lm_head, embedding_bias, out=out)

    return compute_lm_head


def invalidating(original):
    """A method of SGLang's that loads new weights into the old tensors, after which packed copies are made anew."""

    def update(*args, **kwargs):
        global _generation
        try:
            return original(*args, **kwargs)
        finally:
            _generation += 1

    return update
