"""Drafter folders made for tests: right in every header, empty of sense."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HIDDEN, VOCAB, DRAFT_VOCAB = 8, 64, 16


def llama_tensors():
    ones = np.ones
    return {
        "fc.weight": ones((HIDDEN, 3 * HIDDEN), np.float32),
        **{f"midlayer.self_attn.{name}_proj.weight": ones((HIDDEN, 2 * HIDDEN), np.float32) for name in "qkv"},
        "midlayer.self_attn.o_proj.weight": ones((HIDDEN, HIDDEN), np.float32),
        **{f"midlayer.mlp.{name}_proj.weight": ones((HIDDEN, HIDDEN), np.float32) for name in ("gate", "up", "down")},
        **{
            f"midlayer.{name}.weight": ones(HIDDEN, np.float32)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        "norm.weight": ones(HIDDEN, np.float32),
        "lm_head.weight": ones((DRAFT_VOCAB, HIDDEN), np.float32),
        "d2t": np.arange(DRAFT_VOCAB, dtype=np.int64),
        "t2d": np.zeros(VOCAB, dtype=bool),
    }


def write_drafter(path: Path, tensors=None, **config):
    path.mkdir(parents=True, exist_ok=True)
    save_file(llama_tensors() if tensors is None else tensors, path / "model.safetensors")
    base = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "hidden_size": HIDDEN,
        "max_position_embeddings": 2048,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True},
    }
    (path / "config.json").write_text(json.dumps({**base, **config}))
    return path
