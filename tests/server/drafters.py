"""Drafter folders made for tests: right in every header, empty of sense."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HIDDEN, VOCAB, DRAFT_VOCAB = 8, 64, 16
HEADS, GROUPS, WIDTH, INNER, AUX = 4, 2, 6, 12, 3  # heads * width is not hidden, so that none stands for another
TARGET_IDS = np.sort(np.arange(DRAFT_VOCAB) * 7 % VOCAB)
QUERY, LATENT, NOPE, ROPE, VALUE = 5, 7, 3, 2, 4  # of the MLA style

LLAMA = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": WIDTH,
    "max_position_embeddings": 2048,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True},
}
MLA = LLAMA | {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "num_key_value_heads": HEADS,
    "head_dim": None,
    "q_lora_rank": QUERY,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
}


def ones(*shape):
    return np.ones(shape, np.float32)


def shared_tensors():
    return {
        "fc.weight": ones(HIDDEN, AUX * HIDDEN),
        **{f"midlayer.mlp.{name}_proj.weight": ones(INNER, HIDDEN) for name in ("gate", "up")},
        "midlayer.mlp.down_proj.weight": ones(HIDDEN, INNER),
        **{
            f"midlayer.{name}.weight": ones(HIDDEN)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        "norm.weight": ones(HIDDEN),
        "lm_head.weight": ones(DRAFT_VOCAB, HIDDEN),
        "d2t": TARGET_IDS - np.arange(DRAFT_VOCAB),
        "t2d": np.isin(np.arange(VOCAB), TARGET_IDS),
    }


def llama_tensors():
    return {
        **shared_tensors(),
        "midlayer.self_attn.q_proj.weight": ones(HEADS * WIDTH, 2 * HIDDEN),
        **{f"midlayer.self_attn.{name}_proj.weight": ones(GROUPS * WIDTH, 2 * HIDDEN) for name in "kv"},
        "midlayer.self_attn.o_proj.weight": ones(HIDDEN, HEADS * WIDTH),
    }


def mla_tensors():
    attention = {
        "q_a_proj": ones(QUERY, 2 * HIDDEN),
        "q_a_layernorm": ones(QUERY),
        "q_b_proj": ones(HEADS * (NOPE + ROPE), QUERY),
        "kv_a_proj_with_mqa": ones(LATENT + ROPE, 2 * HIDDEN),
        "kv_a_layernorm": ones(LATENT),
        "kv_b_proj": ones(HEADS * (NOPE + VALUE), LATENT),
        "o_proj": ones(HIDDEN, HEADS * VALUE),
    }
    return shared_tensors() | {f"midlayer.self_attn.{name}.weight": tensor for name, tensor in attention.items()}


def write_drafter(path: Path, tensors=None, **config):
    """A drafter folder; the config's style is Llama's unless `**MLA` is given. A value of `...` leaves its key out."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(llama_tensors() if tensors is None else tensors, path / "model.safetensors")
    whole = {key: value for key, value in {**LLAMA, **config}.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(whole))
    return path
