"""The shape of a new drafter: config.json as SGLang 0.5.23 reads it, in the target's sizes unless others are asked."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from drafter.checkpoint import shapes
from drafter.checkpoint.fit import rotary
from drafter.checkpoint.vocab import DraftVocab
from drafter.training.errors import TrainingError
from drafter.training.target import Target

STYLES = {"mha": shapes.LLAMA, "mla": shapes.MLA}
# What SGLang's DeepSeek insists on before it builds a drafter, whose one layer has no experts.
NO_EXPERTS = {
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


@dataclass(frozen=True)
class Shape:
    """Sizes that a drafter may choose freely; None takes the target's. Its key heads need not be the target's.

    kv_heads and head_dim are of style "mha" alone, what follows them of "mla": the ranks of queries and of the latent,
    and the widths of a key's unturned and turned parts and of a value.
    """

    style: str = "mha"
    heads: int | None = None
    intermediate: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    nope_dim: int | None = None
    rope_dim: int | None = None
    value_dim: int | None = None

    def given(self) -> list[str]:
        """The flags of those that were chosen."""
        names = (field.name for field in fields(self))
        return [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) not in (None, "mha")]


MLA_KEYS = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}


def drafter_config(target: Target, layer_ids: list[int], vocab: DraftVocab, shape: Shape) -> dict[str, Any]:
    """config.json of a new drafter. `layer_ids` are the engine's own, as `eagle_config` holds them.

    The rope is the target's, scaling and all. Raises TrainingError for sizes that the style does not have, or that
    neither the target nor `shape` names.
    """
    t = target.config
    heads = shape.heads or t["num_attention_heads"]
    attention = _latent(target, shape) if shape.style == "mla" else _grouped(target, heads, shape)
    theta, scaling = rotary(t)
    return {
        "architectures": [STYLES[shape.style]],
        "model_type": "deepseek_v3" if shape.style == "mla" else "llama",
        "vocab_size": len(target.embed_VH),
        "draft_vocab_size": len(vocab.target_ids),
        "hidden_size": t["hidden_size"],
        "intermediate_size": shape.intermediate or t["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        **attention,
        "hidden_act": "silu",
        "rms_norm_eps": t["rms_norm_eps"],
        "rope_theta": theta,
        **({"rope_scaling": {"rope_type": scaling.pop("type"), **scaling}} if scaling else {}),
        "max_position_embeddings": t["max_position_embeddings"],
        "bos_token_id": t.get("bos_token_id"),
        "eos_token_id": t.get("eos_token_id"),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layer_ids, "use_aux_hidden_state": True},
    }


def _grouped(target: Target, heads: int, shape: Shape) -> dict[str, Any]:
    foreign = [f"--{key.replace('_', '-')}" for key in MLA_KEYS if getattr(shape, key)]
    if foreign:
        raise TrainingError(f"{', '.join(foreign)}: sizes of latent attention, and the style is mha: add --style mla.")
    t = target.config
    width = shape.head_dim or t.get("head_dim") or t["hidden_size"] // t["num_attention_heads"]
    return {"num_key_value_heads": shape.kv_heads or heads, "head_dim": width}


def _latent(target: Target, shape: Shape) -> dict[str, Any]:
    foreign = [f"--{key.replace('_', '-')}" for key in ("kv_heads", "head_dim") if getattr(shape, key)]
    if foreign:
        raise TrainingError(f"{', '.join(foreign)}: sizes of grouped heads, and the style is mla: leave them out.")
    sizes = {key: getattr(shape, ours) or target.config.get(key) for ours, key in MLA_KEYS.items()}
    lacking = [f"--{ours.replace('_', '-')}" for ours, key in MLA_KEYS.items() if not sizes[key]]
    if lacking:
        raise TrainingError(
            f"target {target.path} has no latent attention whose sizes could be taken: give {', '.join(lacking)}, or "
            "--style mha."
        )
    return {"num_key_value_heads": shape.heads or target.config["num_attention_heads"]} | sizes | NO_EXPERTS
