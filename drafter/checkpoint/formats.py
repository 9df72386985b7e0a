"""Four formats of one EAGLE-3 drafter: how each names the weights, and how each writes the config.

Tables map a canonical name (SGLang's newer one, `layers.0.…`) to a format's own. Sources: SGLang 0.5.23
`models/llama_eagle3.py`; SpecForge 0.2.0 `export/to_sglang.py`; speculators 0.9.0 `models/eagle3/`; Model-Optimizer
`torch/export/plugins/hf_spec_export.py`; SafeAILab/EAGLE `traineagle3/cnets.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafter.checkpoint import shapes
from drafter.checkpoint.fit import rotary
from drafter.checkpoint.folder import DrafterError
from drafter.checkpoint.subject import TargetFacts

FORMATS = ("sglang", "speculators", "modelopt")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT_ATTENTION = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
IN_THE_LAYER = (
    *(f"self_attn.{part}.weight" for part in (*ATTENTION, *LATENT_ATTENTION)),
    *(f"mlp.{part}.weight" for part in MLP),
    *(f"{part}.weight" for part in NORMS),
)
AROUND_IT = ("fc.weight", "fc.bias", "norm.weight", "lm_head.weight", "embed_tokens.weight", "input_norm.weight")
FC_NORMS = tuple(f"fc_norm.{layer}.weight" for layer in range(8))
SAME = {name: name for name in (*AROUND_IT, *FC_NORMS)}

# SGLang, SpecForge, AQ-MedAI and the original EAGLE. The embedding is the target's, and is left out.
MIDLAYER: dict[str, str] = {f"layers.0.{part}": f"midlayer.{part}" for part in IN_THE_LAYER} | SAME
# speculators and Model-Optimizer.
NUMBERED: dict[str, str] = {f"layers.0.{part}": f"layers.0.{part}" for part in IN_THE_LAYER} | SAME
WEIGHT_MAPS: dict[str, dict[str, str]] = {"sglang": MIDLAYER, "speculators": NUMBERED, "modelopt": NUMBERED}

LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
# Keys of a decoder layer that mean the same in a flat config and in speculators' transformer_layer_config.
LAYER_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "bos_token_id",
    "eos_token_id",
)
# What LlamaConfig of transformers 5.19 assumes, and a config of its class leaves out.
LLAMA_DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class FormatError(DrafterError):
    """A drafter that another format cannot hold without serving otherwise: what, why, and what to do."""


def to_speculators(config: Mapping[str, Any], target: TargetFacts, layer_inputs: list[int] | None) -> dict[str, Any]:
    """speculators' config.json of a flat config. `layer_inputs`: the captured layers, as the inputs of these.

    Raises FormatError where speculators has no such drafter.
    """
    if config["architectures"][0] != shapes.LLAMA:
        raise FormatError(
            "the drafter has latent attention (MLA), which speculators 0.9.0 has no EAGLE-3 layer for: keep it in "
            "SGLang's format."
        )
    _refuse_if(config.get("bias"), "fc has a bias, and speculators' fc has none")
    _refuse_if(
        shapes.target_hidden(dict(config)) != config["hidden_size"],
        "target_hidden_size is not hidden_size, and speculators sizes fc and embedding by hidden_size",
    )
    _refuse_if(
        shapes.norm_before_fc(dict(config)) and shapes.fc_norm(dict(config)),
        "norm_before_fc and fc_norm are both set, which speculators excludes",
    )
    _refuse_if(shapes.shares_head(dict(config)), "the target's head is shared, and speculators saves one of its own")
    _refuse_if(config["num_hidden_layers"] != 1, "it has more than one layer, and the second is another in speculators")
    theta, scaling = rotary(dict(config))
    kind = {"rope_type": scaling.pop("type")} if scaling else {"rope_type": "default"}
    layer: dict[str, Any] = LLAMA_DEFAULTS | {key: config[key] for key in LAYER_KEYS if config.get(key) is not None}
    layer.setdefault("num_key_value_heads", layer["num_attention_heads"])
    layer.setdefault("head_dim", layer["hidden_size"] // layer["num_attention_heads"])
    dtype = config.get("dtype") or config.get("torch_dtype")
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": False,
        "norm_before_fc": shapes.norm_before_fc(dict(config)),
        "fc_norm": shapes.fc_norm(dict(config)),
        "norm_output": bool(config.get("norm_output")),
        "embed_requires_grad": False,
        "target_hidden_size": None,
        LAYERS_KEY: layer_inputs,
        "tie_word_embeddings": False,
        **({"dtype": dtype} if dtype else {}),
        "transformer_layer_config": {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            **layer,
            "rope_parameters": kind | {"rope_theta": theta, **scaling},
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": str(target.path), "architectures": [target.architecture]},
        },
    }


def from_speculators(config: Mapping[str, Any], layer_ids: list[int]) -> dict[str, Any]:
    """SGLang's flat config of speculators' own. `layer_ids`: as SGLang takes them for this target.

    Raises FormatError where SGLang has no such drafter.
    """
    layer = config.get("transformer_layer_config")
    if config.get("speculators_model_type") != "eagle3" or not isinstance(layer, dict):
        raise FormatError(
            f"it is a speculators checkpoint of the type {config.get('speculators_model_type')!r:.40}, expected "
            "'eagle3': EAGLE3 in SGLang serves no other."
        )
    # Absent keys have speculators' defaults (`models/eagle3/config.py`), which differ from those of its trainer.
    _refuse_if(
        config.get("norm_before_residual", False),
        "norm_before_residual is true, and SGLang adds the residual before its norm",
    )
    _refuse_if(
        layer.get("model_type") != "llama",
        f"its layer is {layer.get('model_type', 'qwen3')!r:.40}, and SGLang drafts with a Llama's (a Qwen3 layer norms "
        "queries and keys)",
    )
    _refuse_if(
        "sliding_attention" in (layer.get("layer_types") or []) or bool(layer.get("use_sliding_window")),
        "it attends through a sliding window, and SGLang through all of the context",
    )
    _refuse_if(layer.get("num_hidden_layers", 1) != 1, "of more layers than one, the second is another in SGLang")
    _refuse_if(layer.get("attention_bias"), "attention has biases, and SGLang's drafter has none")
    _refuse_if(layer.get("mlp_bias"), "the MLP has biases, and SGLang's drafter has none")
    _refuse_if(
        config.get("target_hidden_size") not in (None, layer.get("hidden_size")),
        "target_hidden_size is not hidden_size, which speculators sizes nothing by",
    )
    theta, scaling = rotary(layer)
    flat = LLAMA_DEFAULTS | {key: layer[key] for key in LAYER_KEYS if layer.get(key) is not None}
    eagle = {LAYERS_KEY: layer_ids, "use_aux_hidden_state": True}
    if config.get("norm_before_fc"):
        eagle["norm_before_fc"] = True
    dtype = config.get("dtype") or config.get("torch_dtype") or layer.get("dtype") or layer.get("torch_dtype")
    return {
        "architectures": [shapes.LLAMA],
        "model_type": "llama",
        **flat,
        "num_hidden_layers": 1,
        "draft_vocab_size": config.get("draft_vocab_size", 32000),
        "tie_word_embeddings": False,
        "rope_theta": theta,
        "rope_scaling": {"rope_type": scaling.pop("type"), **scaling} if scaling else None,
        **({"torch_dtype": dtype} if dtype else {}),
        **({"fc_norm": True} if config.get("fc_norm") else {}),
        **({"norm_output": True} if config.get("norm_output") else {}),
        "eagle_config": eagle,
    }


def inputs_of(layer_ids: list[int] | None, target: TargetFacts) -> list[int] | None:
    """The layers whose input SGLang captures by these ids, which is how speculators and vLLM count."""
    if layer_ids is None:
        return default_inputs(target)
    as_they_are = target.takes_inputs and layer_ids[0] != 1
    return [layer + (not as_they_are) for layer in layer_ids]


def ids_of(inputs: list[int], target: TargetFacts) -> list[int]:
    """The ids by which SGLang captures the inputs of these layers. Raises FormatError where there are none."""
    ids = inputs if target.takes_inputs else [layer - 1 for layer in inputs]
    if (inputs_of(ids, target) if ids and min(ids) >= 0 else None) != inputs:
        raise FormatError(
            f"it captures the inputs of layers {inputs}, which SGLang has no ids for with a target of the class "
            f"{target.architecture}: train with other layers."
        )
    return ids


def default_inputs(target: TargetFacts) -> list[int]:
    """What SGLang, vLLM and EAGLE all capture where nobody says: 2, half, and three from the end."""
    count = target.size("num_hidden_layers")
    if count is None:
        raise FormatError(f"{target.path / 'config.json'} names no num_hidden_layers: is it a target's folder?")
    return [2, count // 2, count - 3]


def _refuse_if(holds: object, why: str) -> None:
    if holds:
        raise FormatError(f"the conversion would change what the drafter says: {why}. Keep it in its own format.")
