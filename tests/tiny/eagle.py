"""EAGLE-3 drafters in plain torch, as SGLang computes them: a slow reference, and what the tiny drafters train on.

Two styles: "LlamaForCausalLMEagle3" (grouped-query attention) and "Eagle3DeepseekV2ForCausalLM" (multi-head latent
attention, not absorbed). No cache, no kernels, no batching over requests of different lengths.

Shapes: B batch, T rows (one for each position of the text), S key rows, N heads, D head width, E value width, H hidden,
A what the target hands over (3 H), V target vocabulary, U draft vocabulary, K draft steps.

Row t of the first step holds what the target computed at position t and the token at t + 1, and guesses the token at
t + 2; row t of step k has moved k positions on, fed with its own output and its own (in training: the true) token:

    position            t          t + 1         t + 2        t + 3
    step 0     aux(t), x(t+1) ->               guess 0
    step 1                  out 0(t), x(t+2) ->              guess 1
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

MHA, MLA = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate_halves(x_BTND: Tensor, angle_TF: Tensor) -> Tensor:
    """Rotary embedding of pairs (i, i + D/2), Llama's layout. `angle_TF`: one angle for each row and pair, F = D/2."""
    cos, sin = angle_TF.cos()[:, None], angle_TF.sin()[:, None]
    low, high = x_BTND.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def rotate_pairs(x_BTND: Tensor, angle_TF: Tensor) -> Tensor:
    """Rotary embedding of pairs (2i, 2i + 1), DeepSeek's layout."""
    cos, sin = angle_TF.cos()[:, None], angle_TF.sin()[:, None]
    even, odd = x_BTND[..., 0::2], x_BTND[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


def plain_frequencies(width: int, theta: float) -> Tensor:
    """theta ** (-2i / width) for each pair i, [width / 2]."""
    return theta ** (-torch.arange(0, width, 2) / width)


def yarn_frequencies(width: int, yarn: dict[str, Any]) -> Tensor:
    """YaRN's blend of the plain frequencies and the same divided by `factor`, [width / 2] (arXiv 2309.00071, 3.2).

    Pairs that turn more than `beta_fast` times within the original context keep their frequency; pairs that turn less
    than `beta_slow` times are slowed down; a ramp over the pair's number lies between.
    """
    theta, context = yarn["rope_theta"], yarn["original_max_position_embeddings"]

    def pair_turning(times: float) -> float:
        return width * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_turning(yarn["beta_fast"])), 0)
    last = min(math.ceil(pair_turning(yarn["beta_slow"])), width - 1)
    ramp = ((torch.arange(width // 2) - first) / max(last - first, 0.001)).clamp(0, 1)
    plain = plain_frequencies(width, theta)
    return plain * (1 - ramp) + plain / yarn["factor"] * ramp


def yarn_magnitude(factor: float, weight: float) -> float:
    """0.1 * weight * ln(factor) + 1: YaRN's correction of the attention's temperature."""
    return 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values of one draft step; keys and values are already repeated to as many heads as queries."""

    q_BTND: Tensor
    k_BTND: Tensor
    v_BTNE: Tensor


class Drafter:
    """One drafter: its configuration, its tensors under their checkpoint names, and the target's embedding.

    `weights` holds fp32 tensors, `d2t` (int64 [U], offsets: target id = draft id + d2t[draft id]) and `t2d` (bool [V])
    among them. SGLang shares the target's embedding whatever the checkpoint holds, so it comes from the target here.
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], embed_VH: Tensor) -> None:
        self.config = config
        self.weights = weights
        self.embed_VH = embed_VH
        self.eps = config["rms_norm_eps"]
        self.heads = config["num_attention_heads"]
        style = config["architectures"][0]
        assert style in (MHA, MLA), style
        self.project = self.project_mha if style == MHA else self.project_mla
        if style == MHA:
            self.frequency_F = plain_frequencies(config["head_dim"], config["rope_theta"])
            self.scale = config["head_dim"] ** -0.5
        else:
            yarn = config["rope_scaling"] | {"rope_theta": config["rope_theta"]}
            self.frequency_F = yarn_frequencies(config["qk_rope_head_dim"], yarn)
            magnitude = yarn_magnitude(yarn["factor"], yarn["mscale_all_dim"])
            self.scale = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5 * magnitude**2
            # cos and sin are multiplied by this ratio; nothing here handles another one
            assert yarn_magnitude(yarn["factor"], yarn["mscale"]) == magnitude

    @property
    def target_ids_U(self) -> Tensor:
        """The target id of each draft id."""
        d2t_U = self.weights["d2t"]
        return d2t_U + torch.arange(len(d2t_U))

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"midlayer.{name}.weight"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.eps)

    def fuse(self, aux_BTA: Tensor) -> Tensor:
        """fc: what the target hands over, to [B, T, H]."""
        return F.linear(aux_BTA, self.weights["fc.weight"])

    def project_mha(self, x_BTX: Tensor, angle_TF: Tensor) -> Heads:
        """Llama's attention inputs; X = 2 H, the embedding beside the hidden state."""
        batch, rows, _ = x_BTX.shape
        groups = self.config["num_key_value_heads"]

        def split(name: str, heads: int) -> Tensor:
            return self.linear(x_BTX, f"self_attn.{name}_proj").view(batch, rows, heads, -1)

        q_BTND = rotate_halves(split("q", self.heads), angle_TF)
        k_BTND = rotate_halves(split("k", groups), angle_TF).repeat_interleave(self.heads // groups, dim=2)
        v_BTND = split("v", groups).repeat_interleave(self.heads // groups, dim=2)
        return Heads(q_BTND, k_BTND, v_BTND)

    def project_mla(self, x_BTX: Tensor, angle_TF: Tensor) -> Heads:
        """DeepSeek's: low-rank queries, one latent for keys and values, one rotary key for all heads."""
        batch, rows, _ = x_BTX.shape
        nope, rope = self.config["qk_nope_head_dim"], self.config["qk_rope_head_dim"]
        latent, values = self.config["kv_lora_rank"], self.config["v_head_dim"]

        query = self.norm(self.linear(x_BTX, "self_attn.q_a_proj"), "midlayer.self_attn.q_a_layernorm")
        q_BTND = self.linear(query, "self_attn.q_b_proj").view(batch, rows, self.heads, nope + rope)
        q_plain, q_turned = q_BTND.split([nope, rope], dim=-1)

        kv = self.linear(x_BTX, "self_attn.kv_a_proj_with_mqa")
        latent_BTL, k_turned = kv.split([latent, rope], dim=-1)
        latent_BTL = self.norm(latent_BTL, "midlayer.self_attn.kv_a_layernorm")
        expanded = self.linear(latent_BTL, "self_attn.kv_b_proj").view(batch, rows, self.heads, nope + values)
        k_plain, v_BTNE = expanded.split([nope, values], dim=-1)
        k_turned = rotate_pairs(k_turned[:, :, None], angle_TF).expand(-1, -1, self.heads, -1)

        q_BTND = torch.cat([q_plain, rotate_pairs(q_turned, angle_TF)], dim=-1)
        return Heads(q_BTND, torch.cat([k_plain, k_turned], dim=-1), v_BTNE)

    def attend(self, query: Heads, earlier: list[Heads]) -> Tensor:
        """Attention of every row over what it may see, [B, T, N * E].

        That is the first step's rows up to its own, and after it only its own chain: row t of each later step, this
        one included. `earlier` holds the steps so far, the present one last.
        """
        first, chain = earlier[0], earlier[1:]
        rows = query.q_BTND.shape[1]
        score_BNTS = torch.einsum("btnd,bsnd->bnts", query.q_BTND, first.k_BTND)
        score_BNTS = score_BNTS.masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu(1), -torch.inf)
        own = [torch.einsum("btnd,btnd->bnt", query.q_BTND, step.k_BTND)[..., None] for step in chain]
        chance_BNTS = (torch.cat([score_BNTS, *own], dim=-1) * self.scale).softmax(-1)
        seen_BTNE = torch.einsum("bnts,bsne->btne", chance_BNTS[..., :rows], first.v_BTNE)
        for k, step in enumerate(chain):
            seen_BTNE = seen_BTNE + chance_BNTS[..., rows + k].transpose(1, 2)[..., None] * step.v_BTNE
        return seen_BTNE.flatten(-2)

    def step(self, hidden_BTH: Tensor, tokens_BT: Tensor, earlier: list[Heads]) -> tuple[Tensor, Tensor]:
        """One draft step for every row: (output [B, T, H] before the final norm, draft logits [B, T, U]).

        `earlier` is empty in the first step, and gains this step's keys and values.
        """
        position_T = torch.arange(tokens_BT.shape[1]) + len(earlier)
        token_BTH = self.norm(self.embed_VH[tokens_BT], "midlayer.input_layernorm")
        x_BTX = torch.cat([token_BTH, self.norm(hidden_BTH, "midlayer.hidden_norm")], dim=-1)
        heads = self.project(x_BTX, position_T[:, None] * self.frequency_F)
        earlier.append(heads)
        hidden_BTH = hidden_BTH + self.linear(self.attend(heads, earlier), "self_attn.o_proj")

        x_BTH = self.norm(hidden_BTH, "midlayer.post_attention_layernorm")
        gate, up = self.linear(x_BTH, "mlp.gate_proj"), self.linear(x_BTH, "mlp.up_proj")
        hidden_BTH = hidden_BTH + self.linear(F.silu(gate) * up, "mlp.down_proj")
        return hidden_BTH, F.linear(self.norm(hidden_BTH, "norm"), self.weights["lm_head.weight"])

    def propose(self, aux_BTA: Tensor, tokens_BT: Tensor, steps: int) -> Tensor:
        """The greedy guesses from every row at once, int64 target ids [B, T, K].

        `aux_BTA[:, t]` is what the target computed at position t; `tokens_BT[:, t]` is the token at position t + 1.
        """
        hidden_BTH = self.fuse(aux_BTA)
        earlier: list[Heads] = []
        guesses: list[Tensor] = []
        for _ in range(steps):
            hidden_BTH, logits_BTU = self.step(hidden_BTH, tokens_BT, earlier)
            tokens_BT = self.target_ids_U[logits_BTU.argmax(-1)]
            guesses.append(tokens_BT)
        return torch.stack(guesses, dim=-1)


def load(folder: Path, embed_VH: Tensor) -> Drafter:
    """The drafter in a folder of SGLang's format."""
    return Drafter(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"), embed_VH)


def walk(text: list[int], guesses: list[list[int]], start: int, stop: int) -> list[int]:
    """Histogram of accepted draft tokens when an engine answers greedily: h[i] steps in which exactly i were kept.

    `text` is the prompt and the target's greedy answer; `guesses[t]` are the draft tokens for positions t + 2 and on,
    made when the text is known up to t + 1. `start` is the position of the answer's first token, which prefill writes;
    the walk ends when position `stop` - 1 is written. The last step counts in full, so the text must reach as many
    tokens past `stop` as there are draft steps.
    """
    steps = len(guesses[0])
    if len(text) < stop + steps:
        raise ValueError(f"the text has {len(text)} tokens but a walk up to {stop} needs {stop + steps}")
    histogram = [0] * (steps + 1)
    last = start
    while last < stop - 1:
        truth = text[last + 1 : last + 1 + steps]
        kept = next((i for i, (a, b) in enumerate(zip(guesses[last - 1], truth, strict=True)) if a != b), steps)
        histogram[kept] += 1
        last += kept + 1
    return histogram


def acceptance_length(histogram: list[int]) -> float:
    """1 + sum(i h[i]) / sum(h): tokens written in a verify step, the target's own among them."""
    return 1 + sum(i * count for i, count in enumerate(histogram)) / sum(histogram)
