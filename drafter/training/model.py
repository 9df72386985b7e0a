"""The EAGLE-3 drafter as SGLang 0.5.23 computes it, trainable, over packed documents: both of its styles.

P packed rows (all documents one after another), R query rows among them, B documents, S key rows and Q query rows of
the longest document, N query heads, G key heads, D head width, H hidden, A what the target hands over (n_aux H),
X attention input (2 H), U draft vocabulary, V target vocabulary, J later steps so far. Row i holds the target's
features at position i and the token at i + 1; loss.py draws what it predicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from drafter.checkpoint import shapes
from drafter.checkpoint.preflight import read_folder
from drafter.checkpoint.vocab import DraftVocab
from drafter.training.attention import Layout, attend
from drafter.training.errors import TrainingError
from drafter.training.latent import LatentAttention
from drafter.training.rotary import Rotary, rotary_of, rotate, turns

# What SGLang would compute differently from this file; a config that sets one of them is refused.
UNSUPPORTED = ("norm_before_fc", "fc_norm", "use_aux_norm", "norm_output", "bias", "attention_bias")


@dataclass
class Memory:
    """Keys and values that the rows of later steps attend to: the first step's, padded, and each row's own chain."""

    layout: Layout
    k_BGSD: Tensor
    v_BGSD: Tensor
    k_RGD: list[Tensor]
    v_RGD: list[Tensor]


class SelfAttention(nn.Module):
    """Grouped-query attention of `LlamaForCausalLMEagle3`: projections by their checkpoint names."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, width = config["hidden_size"], config["head_dim"]
        self.width = width
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(2 * hidden, heads * width, bias=False)
        self.k_proj = nn.Linear(2 * hidden, groups * width, bias=False)
        self.v_proj = nn.Linear(2 * hidden, groups * width, bias=False)
        self.o_proj = nn.Linear(heads * width, hidden, bias=False)

    def queries(self, x_RX: Tensor, turn_2RD: Tensor) -> Tensor:
        """[R, N, D], turned."""
        return rotate(self._heads(self.q_proj(x_RX)), turn_2RD)

    def keys_values(self, x_RX: Tensor, turn_2RD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, turned, and values, both [R, G, D]."""
        return rotate(self._heads(self.k_proj(x_RX)), turn_2RD), self._heads(self.v_proj(x_RX))

    def output(self, seen_RND: Tensor) -> Tensor:
        """What is added to the residual, [R, H]."""
        out: Tensor = self.o_proj(seen_RND.flatten(1))
        return out

    def _heads(self, x_RX: Tensor) -> Tensor:
        return x_RX.unflatten(-1, (-1, self.width))


class Mlp(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x_RH: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_RH)) * self.up_proj(x_RH))
        return out


class MidLayer(nn.Module):
    """The one decoder layer."""

    def __init__(self, config: dict[str, Any], rotary: Rotary) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        latent = config["architectures"][0] == shapes.MLA
        self.self_attn = LatentAttention(config, rotary.score) if latent else SelfAttention(config)
        self.mlp = Mlp(hidden, config["intermediate_size"])


class Eagle3(nn.Module):
    """One drafter; parameters carry their checkpoint names. `embed_VH` is the target's, shared and frozen."""

    target_ids_U: Tensor
    embed_VH: Tensor

    def __init__(self, config: dict[str, Any], vocab: DraftVocab, embed_VH: Tensor) -> None:
        """Raises TrainingError for a config that SGLang would compute otherwise."""
        super().__init__()
        check_config(config)
        self.config = config
        self.vocab = vocab
        hidden, aux = config["hidden_size"], len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        self.fc = nn.Linear(aux * hidden, hidden, bias=False)
        self.rotary = rotary_of(config)
        self.midlayer = MidLayer(config, self.rotary)
        self.norm = nn.RMSNorm(hidden, config["rms_norm_eps"])
        self.lm_head = nn.Linear(hidden, len(vocab.target_ids), bias=False)
        self.register_buffer("embed_VH", embed_VH, persistent=False)
        self.register_buffer("target_ids_U", torch.from_numpy(vocab.target_ids), persistent=False)

    def first(self, aux_PA: Tensor, tokens_P: Tensor, layout: Layout) -> tuple[Tensor, Memory]:
        """Step 0: (output [R, H] before the final norm, what later steps attend to).

        `aux_PA[i]` is what the target computed at position i, `tokens_P[i]` the token at i + 1.
        """
        fused_PH = self.fc(aux_PA)
        x_PX = self._input(fused_PH, tokens_P)
        attention, turn_2PD = self.midlayer.self_attn, turns(self.rotary, layout.position_P)
        k_PGD, v_PGD = attention.keys_values(x_PX, turn_2PD)
        memory = Memory(layout, layout.pad_keys(k_PGD), layout.pad_keys(v_PGD), [], [])
        fused_RH, x_RX = fused_PH, x_PX
        if len(layout.query_R) < len(tokens_P):
            fused_RH, x_RX, turn_2PD = fused_PH[layout.query_R], x_PX[layout.query_R], turn_2PD[:, layout.query_R]
        return self._rest(fused_RH, attention.queries(x_RX, turn_2PD), memory), memory

    def later(self, hidden_RH: Tensor, tokens_R: Tensor, memory: Memory) -> Tensor:
        """The next step of every query row, fed with its own output: the output [R, H] before the final norm."""
        layout = memory.layout
        x_RX = self._input(hidden_RH, tokens_R)
        turn_2RD = turns(self.rotary, layout.position_P[layout.query_R] + len(memory.k_RGD) + 1)
        attention = self.midlayer.self_attn
        k_RGD, v_RGD = attention.keys_values(x_RX, turn_2RD)
        memory.k_RGD.append(k_RGD)
        memory.v_RGD.append(v_RGD)
        return self._rest(hidden_RH, attention.queries(x_RX, turn_2RD), memory)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Draft logits [R, U]."""
        out: Tensor = self.lm_head(self.norm(hidden_RH))
        return out

    def _input(self, hidden_RH: Tensor, tokens_R: Tensor) -> Tensor:
        token_RH = self.midlayer.input_layernorm(self.embed_VH[tokens_R].float())
        return torch.cat([token_RH, self.midlayer.hidden_norm(hidden_RH.float())], dim=-1)

    def _rest(self, hidden_RH: Tensor, q_RND: Tensor, memory: Memory) -> Tensor:
        seen_RND = attend(q_RND, memory.k_BGSD, memory.v_BGSD, memory.layout, memory.k_RGD, memory.v_RGD)
        hidden_RH = hidden_RH.float() + self.midlayer.self_attn.output(seen_RND)
        return hidden_RH + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden_RH))


def check_config(config: dict[str, Any]) -> None:
    """Raise TrainingError for a drafter config that SGLang computes otherwise than this file."""
    set_keys = [key for key in UNSUPPORTED if config.get(key) or (config.get("eagle_config") or {}).get(key)]
    wanted = {"num_hidden_layers": 1, "hidden_act": "silu", "target_hidden_size": config["hidden_size"]}
    set_keys += [key for key, value in wanted.items() if config.get(key, value) != value]
    if config.get("architectures") not in ([shapes.LLAMA], [shapes.MLA]):
        set_keys.append("architectures")
    latent = config.get("architectures") == [shapes.MLA]
    if latent and config.get("rope_interleave", True) is not True:
        set_keys.append("rope_interleave")
    if set_keys:
        found = ", ".join(f"{key} = {config.get(key)!r}" for key in set_keys)
        raise TrainingError(
            f"this drafter has {found}, which the trainer does not compute: it trains {shapes.LLAMA} and {shapes.MLA} "
            "of one layer without extra norms. Convert the drafter, or train a new one."
        )
    if latent and config["v_head_dim"] > config["qk_nope_head_dim"] + config["qk_rope_head_dim"]:
        raise TrainingError(
            f"v_head_dim {config['v_head_dim']} is more than a key's width (qk_nope_head_dim + qk_rope_head_dim): "
            "choose one of no more."
        )
    if not latent and config["num_attention_heads"] % config["num_key_value_heads"]:
        raise TrainingError(
            f"num_attention_heads {config['num_attention_heads']} is no multiple of num_key_value_heads "
            f"{config['num_key_value_heads']}: choose a divisor."
        )


def load_drafter(folder: Path, embed_VH: Tensor) -> Eagle3:
    """The drafter in a folder of SGLang's format, fp32.

    Raises TrainingError where this file does not compute it, DrafterError where the folder is broken, VocabError where
    its maps disagree.
    """
    read = read_folder(folder)
    weights = {
        name.removeprefix("model.").replace("layers.0.", "midlayer."): tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    if shapes.shares_head(read.config):
        raise TrainingError(f"drafter {folder} shares its target's head and has none to train: train a new one.")
    rows = len(weights["lm_head.weight"])
    d2t = weights.pop("d2t", torch.zeros(rows, dtype=torch.int64)).numpy()
    t2d = weights.pop("t2d", None)
    vocab = DraftVocab.from_tensors(d2t, None if t2d is None else t2d.numpy(), len(embed_VH))
    config = dict(read.config)
    if read.architecture == shapes.LLAMA:
        config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    model = Eagle3(config, vocab, embed_VH)
    weights.pop("embed_tokens.weight", None)  # SGLang puts the target's in its place
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if found != wanted:
        name = min(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        raise TrainingError(
            f"drafter {folder}: {name} is {found.get(name)}, its config.json asks for {wanted.get(name)}: "
            "make them agree."
        )
    model.load_state_dict(weights)
    model.float()
    return model
