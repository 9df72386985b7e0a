"""Rotary embedding by a drafter's own config, as SGLang 0.5.23 computes it: plain, llama3 and yarn.

Sources: SGLang `layers/rotary_embedding/factory.py` and `yarn.py`, `models/deepseek_v2.py`; YaRN is arXiv 2309.00071.
F pairs of a head, R rows, D = 2 F.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafter.checkpoint import shapes
from drafter.checkpoint.fit import rotary
from drafter.training.errors import TrainingError


@dataclass(frozen=True)
class Rotary:
    """frequency_F: radians a position turns each pair. magnitude: factor of cosines and sines. score: factor of the
    attention's scores beside them, which latent attention alone has.
    """

    frequency_F: Tensor
    magnitude: float = 1.0
    score: float = 1.0


def rotary_of(config: dict[str, Any]) -> Rotary:
    """Raises TrainingError for a scaling that is not computed here."""
    latent = config["architectures"][0] == shapes.MLA
    width = config["qk_rope_head_dim" if latent else "head_dim"]
    theta, scaling = rotary(config)
    frequency_F = theta ** (-torch.arange(0, width, 2) / width)
    if not scaling:
        return Rotary(frequency_F)
    kind = scaling["type"]
    if kind == "llama3" and not latent:
        return Rotary(_llama3(frequency_F, scaling))
    if kind in ("yarn", "deepseek_yarn") and (latent or kind == "yarn"):
        context = scaling.get("original_max_position_embeddings") or config["max_position_embeddings"]
        frequency_F = _yarn(frequency_F, theta, context, scaling)
        factor, weight, all_dims = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
        if latent:
            weight, all_dims = 1.0 if weight is None else weight, all_dims or 0.0
        both = weight is not None and all_dims is not None
        size = _size(factor, weight) / _size(factor, all_dims) if both else _size(factor, 1.0)
        return Rotary(
            frequency_F,
            size * scaling.get("attn_factor", 1.0),
            _size(factor, all_dims) ** 2 if latent else 1.0,
        )
    raise TrainingError(
        f"this drafter's rope is scaled by {kind!r}, which the trainer does not compute for "
        f"{config['architectures'][0]}: it knows yarn, and llama3 for {shapes.LLAMA}. Train a new drafter."
    )


def turns(rotary: Rotary, position_R: Tensor) -> Tensor:
    """Cosines, then sines, of each row's angles, [2, R, D]; those of pair f lie at f and at f + F."""
    angle_RF = position_R[:, None] * rotary.frequency_F
    angle_RD = torch.cat([angle_RF, angle_RF], dim=-1)
    return torch.stack([angle_RD.cos(), angle_RD.sin()]) * rotary.magnitude


def rotate(x_RND: Tensor, turn_2RD: Tensor) -> Tensor:
    """Rotary embedding of pairs (i, i + D/2), Llama's layout; `turn_2RD` is what `turns` gives for the rows."""
    low, high = x_RND.chunk(2, dim=-1)
    swapped_RND = torch.cat([-high, low], dim=-1)
    return (x_RND * turn_2RD[0, :, None] + swapped_RND * turn_2RD[1, :, None]).to(x_RND.dtype)


def halves_of_pairs(x_RND: Tensor) -> Tensor:
    """DeepSeek's pairs (2i, 2i + 1) laid out as Llama's. Done to queries and keys alike it changes no score."""
    return torch.cat([x_RND[..., 0::2], x_RND[..., 1::2]], dim=-1)


def _size(factor: float, weight: float | None) -> float:
    """0.1 weight ln(factor) + 1: YaRN's correction of the attention's temperature."""
    return 1.0 if factor <= 1 or weight is None else 0.1 * weight * math.log(factor) + 1.0


def _yarn(frequency_F: Tensor, theta: float, context: int, scaling: dict[str, Any]) -> Tensor:
    """Pairs that turn often within the original context keep their frequency, slow ones are divided by `factor`."""
    width = 2 * len(frequency_F)

    def pair_turning(times: float) -> float:
        return width * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_turning(scaling.get("beta_fast", 32)), pair_turning(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    ramp_F = ((torch.arange(len(frequency_F)) - first) / ((last - first) or 0.001)).clamp(0, 1)
    return frequency_F * (1 - ramp_F) + frequency_F / scaling["factor"] * ramp_F


def _llama3(frequency_F: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Wave lengths beyond the original context are stretched by `factor`, short ones kept, a ramp lies between."""
    low, high = scaling.get("low_freq_factor", 1.0), scaling.get("high_freq_factor", 4.0)
    times_F = scaling["original_max_position_embeddings"] * frequency_F / (2 * math.pi)
    kept_F = ((times_F - low) / (high - low)).clamp(0, 1)
    return frequency_F * kept_F + frequency_F / scaling["factor"] * (1 - kept_F)
