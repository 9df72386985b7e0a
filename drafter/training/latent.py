"""Multi-head latent attention of a drafter, `Eagle3DeepseekV2ForCausalLM` as SGLang 0.5.23 computes it, not absorbed.

Low-rank queries, one latent for keys and values, one rotary key for all heads. Values are padded to the width of a
key, so that the kernel of attention.py serves both styles. R rows, N heads, D key width (nope + rope), E value width,
L latent, X attention input (2 H), Y q_lora_rank + L + rope, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafter.training.rotary import halves_of_pairs, rotate


class LatentAttention(nn.Module):
    """Projections by their checkpoint names. `score` multiplies every score, beside 1 / sqrt(D)."""

    def __init__(self, config: dict[str, Any], score: float) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.heads, self.score = config["num_attention_heads"], score
        self.nope, self.rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        self.values = config["v_head_dim"]
        self.query, self.latent = config["q_lora_rank"], config["kv_lora_rank"]
        self.q_a_proj = nn.Linear(2 * hidden, self.query, bias=False)
        self.q_a_layernorm = nn.RMSNorm(self.query, eps)
        self.q_b_proj = nn.Linear(self.query, self.heads * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(2 * hidden, self.latent + self.rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(self.latent, eps)
        self.kv_b_proj = nn.Linear(self.latent, self.heads * (self.nope + self.values), bias=False)
        self.o_proj = nn.Linear(self.heads * self.values, hidden, bias=False)

    def weight_YX(self) -> Tensor:
        """Weights of the low-rank queries and of the latent beside the rotary key, over an attention's input."""
        return torch.cat([self.q_a_proj.weight, self.kv_a_proj_with_mqa.weight])

    def split(self, all_RY: Tensor, turn_2RD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, turned, and values with zeros after them, all [R, N, D], of what `weight_YX` gave."""
        query, latent_RL, turned_RD = all_RY.split([self.query, self.latent, self.rope], dim=-1)
        q_RND = self.q_b_proj(self.q_a_layernorm(query.float())).unflatten(-1, (self.heads, -1))
        q_plain, q_turned = q_RND.split([self.nope, self.rope], dim=-1)
        q_RND = torch.cat([q_plain, rotate(halves_of_pairs(q_turned), turn_2RD)], dim=-1) * self.score

        expanded = self.kv_b_proj(self.kv_a_layernorm(latent_RL.float())).unflatten(-1, (self.heads, -1))
        k_plain, v_RNE = expanded.split([self.nope, self.values], dim=-1)
        k_turned = rotate(halves_of_pairs(turned_RD[:, None]), turn_2RD).expand(-1, self.heads, -1)
        k_RND = torch.cat([k_plain, k_turned.to(k_plain.dtype)], dim=-1)
        return q_RND, k_RND, F.pad(v_RNE, (0, self.nope + self.rope - self.values))

    def output(self, seen_RND: Tensor) -> Tensor:
        """What is added to the residual, [R, H]."""
        out: Tensor = self.o_proj(seen_RND[..., : self.values].flatten(1))
        return out
