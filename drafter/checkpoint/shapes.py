"""The tensors that SGLang 0.5.23 loads into an EAGLE-3 drafter, by name and shape, as config.json implies them.

Sources: `models/llama_eagle3.py`, `models/kimi_k25_eagle3.py`. Names here are `layers.0.…` without a prefix, where
checkpoints also say `midlayer.…` and, in the Llama style alone, `model.…`. A size that the config leaves open is None.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

Shape = tuple[int | None, ...]
LLAMA, MLA = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"
DEFAULT_AUX = 3  # layers that SGLang captures where the config names none
LEGACY = {
    "midlayer": "layers.0",
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}


def canonical_name(name: str, architecture: str) -> str:
    """A checkpoint's tensor name as `expected_shapes` spells it; other names than those are never loaded."""
    if architecture == LLAMA:
        for old, new in LEGACY.items():
            name = name.replace(old, new)
        return name if name.startswith("model.lm_head.") else name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def shares_head(config: dict[str, Any]) -> bool:
    """Whether the head is the target's (or its embedding, where tied), and the folder needs none."""
    return config.get("draft_vocab_size") is None or config.get("tie_word_embeddings") is True


def layer_ids(config: dict[str, Any]) -> list[int] | None:
    """The nested `eagle_config` ids, the only ones that drive SGLang's capture; None means its default."""
    ids: list[int] | None = nested(config).get("eagle_aux_hidden_state_layer_ids")
    return ids


def nested(config: dict[str, Any]) -> dict[str, Any]:
    """The `eagle_config` object; empty where there is none."""
    found = config.get("eagle_config")
    return found if isinstance(found, dict) else {}


def norm_before_fc(config: dict[str, Any]) -> bool:
    """Whether the captured states are normed as one before fc (Llama style alone)."""
    return bool(nested(config).get("norm_before_fc", config.get("norm_before_fc", False)))


def fc_norm(config: dict[str, Any]) -> bool:
    """Whether each captured state is normed by itself before fc."""
    return bool(config.get("fc_norm") or config.get("use_aux_norm"))


def target_hidden(config: dict[str, Any]) -> int:
    """The width of one captured state."""
    width: int = config.get("target_hidden_size") or config["hidden_size"]
    return width


def aux_count(config: dict[str, Any]) -> int:
    """How many hidden states of the target SGLang sizes fc for."""
    ids = layer_ids(config)
    if config["architectures"][0] == LLAMA:
        return config.get("num_aux_hidden_states") or len(ids or ()) or DEFAULT_AUX
    if ids is None:
        ids = config.get("eagle_aux_hidden_state_layer_ids")
    return DEFAULT_AUX if ids is None else len(ids)


def expected_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    """Every weight that a drafter must have, with its shape; lm_head is among them unless the target's is shared.

    The embedding is the target's, unless its width is not the drafter's own.
    """
    hidden, inner = config["hidden_size"], config.get("intermediate_size")
    features = aux_count(config) * target_hidden(config)
    found: dict[str, Shape] = {"fc.weight": (hidden, features), "norm.weight": (hidden,)}
    if config.get("bias"):
        found["fc.bias"] = (hidden,)
    if config["architectures"][0] == LLAMA and norm_before_fc(config):
        found["input_norm.weight"] = (features,)
    if fc_norm(config):
        found |= {f"fc_norm.{layer}.weight": (target_hidden(config),) for layer in range(aux_count(config))}
    if target_hidden(config) != hidden:
        found["embed_tokens.weight"] = (config["vocab_size"], hidden)
    if not shares_head(config):
        found["lm_head.weight"] = (config["draft_vocab_size"], hidden)
    attention = ATTENTION[config["architectures"][0]]
    for layer in range(config["num_hidden_layers"]):
        parts: dict[str, Shape] = {
            **{f"self_attn.{name}": shape for name, shape in attention(config, (1 if layer else 2) * hidden).items()},
            **{f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")},
            "mlp.down_proj": (hidden, inner),
            **dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm"), (hidden,)),
        }
        found |= {f"layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return found


def _llama_attention(config: dict[str, Any], inputs: int) -> dict[str, Shape]:
    hidden, heads = config["hidden_size"], config.get("num_attention_heads")
    groups, width = config.get("num_key_value_heads"), config.get("head_dim")
    if config.get("model_type") == "llama":  # other config classes have other defaults
        groups = groups or heads
        width = width or (hidden // heads if heads else None)
    queries, keys = _product(heads, width), _product(groups, width)
    return {
        "q_proj": (queries, inputs),
        "k_proj": (keys, inputs),
        "v_proj": (keys, inputs),
        "o_proj": (hidden, queries),
    }


def _mla_attention(config: dict[str, Any], inputs: int) -> dict[str, Shape]:
    heads, query, latent = (config.get(key) for key in ("num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    nope, rope, values = (config.get(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return {
        "q_a_proj": (query, inputs),
        "q_a_layernorm": (query,),
        "q_b_proj": (_product(heads, _sum(nope, rope)), query),
        "kv_a_proj_with_mqa": (_sum(latent, rope), inputs),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (_product(heads, _sum(nope, values)), latent),
        "o_proj": (config["hidden_size"], _product(heads, values)),
    }


ATTENTION: dict[str, Callable[[dict[str, Any], int], dict[str, Shape]]] = {
    LLAMA: _llama_attention,
    MLA: _mla_attention,
}


def _product(*sizes: int | None) -> int | None:
    known = [size for size in sizes if size is not None]
    return prod(known) if len(known) == len(sizes) else None


def _sum(*sizes: int | None) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
