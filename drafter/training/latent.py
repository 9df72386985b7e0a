"""Multi-head latent attention of a drafter, `Eagle3DeepseekV2ForCausalLM` as SGLang 0.5.23 computes it, not absorbed.

Low-rank queries, one latent for keys and values, one rotary key for all heads. Values are padded to the width of a
key, so that the kernel of attention.py serves both styles. R rows, N heads, D key width (nope + rope), X attention
input (2 H), H hidden.
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
        query, self.latent = config["q_lora_rank"], config["kv_lora_rank"]
        self.q_a_proj = nn.Linear(2 * hidden, query, bias=False)
        self.q_a_layernorm = nn.RMSNorm(query, eps)
        self.q_b_proj = nn.Linear(query, self.heads * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(2 * hidden, self.latent + self.rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(self.latent, eps)
        self.kv_b_proj = nn.Linear(self.latent, self.heads * (self.nope + self.values), bias=False)
        self.o_proj = nn.Linear(self.heads * self.values, hidden, bias=False)

    def queries(self, x_RX: Tensor, turn_2RD: Tensor) -> Tensor:
        """[R, N, D], turned."""
        q_RND = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_RX).float())).unflatten(-1, (self.heads, -1))
        plain, turned = q_RND.split([self.nope, self.rope], dim=-1)
        out: Tensor = torch.cat([plain, rotate(halves_of_pairs(turned), turn_2RD)], dim=-1) * self.score
        return out

    def keys_values(self, x_RX: Tensor, turn_2RD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, turned, and values with zeros after them, both [R, N, D]."""
        latent_RL, turned_RD = self.kv_a_proj_with_mqa(x_RX).split([self.latent, self.rope], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent_RL.float())).unflatten(-1, (self.heads, -1))
        plain, v_RNE = expanded.split([self.nope, self.values], dim=-1)
        turned = rotate(halves_of_pairs(turned_RD[:, None]), turn_2RD).expand(-1, self.heads, -1)
        return torch.cat([plain, turned], dim=-1), F.pad(v_RNE, (0, self.nope + self.rope - self.values))

    def output(self, seen_RND: Tensor) -> Tensor:
        """What is added to the residual, [R, H]."""
        out: Tensor = self.o_proj(seen_RND[..., : self.values].flatten(1))
        return out
