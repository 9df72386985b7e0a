"""Linear layers with weights laid out for oneDNN beforehand: bfloat16 weights are otherwise re-laid at every call.

Worth a third of a decode step, and more in verification, where four rows then cost little more than one. Results are
those of torch's own linear up to bfloat16's rounding. The price is a second copy of the weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Below this size the packed call's overhead outweighs its gain; above so many rows the usual kernel is faster.
MIN_WEIGHTS = 200_000
MAX_ROWS = 128
# False where the processor has no bfloat16 instructions that oneDNN uses.
SUPPORTED = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()

_generation = 0


def linear(layer, x, bias=None):
    """x [..., in] times layer.weight [out, in], transposed, plus bias: through the packed weight where it pays."""
    weight = layer.weight
    if (
        not SUPPORTED
        or weight.dtype is not torch.bfloat16
        or x.dtype is not torch.bfloat16
        or weight.numel() < MIN_WEIGHTS
        or x.numel() > MAX_ROWS * x.shape[-1]
    ):
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, packed(layer), bias, "none", [], "")


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
    """SGLang's LogitsProcessor._compute_lm_head: packed where the original would multiply in the weight's dtype."""

    def compute_lm_head(self, hidden_states, lm_head, embedding_bias=None, *, out=None):
        weight = lm_head.__dict__.get("_parameters", {}).get("weight")
        plain = (
            weight is not None
            and weight.dtype is hidden_states.dtype is torch.bfloat16
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
