"""A target's embedding and head, a draft vocabulary and shards of features, all random, for bench.train_speed.

The final states lean towards a token of the draft vocabulary, as those of a text that it covers do: else most rows
would be left out of the loss.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from bench.arithmetic import Shape
from drafter.checkpoint.vocab import DraftVocab
from drafter.data.shard_writer import ShardWriter
from drafter.data.shards import Document, document_name
from drafter.data.target import target_identity
from drafter.data.tensorfile import to_bf16, to_float32, write_tensors

SHAPES = {
    "smollm2": Shape(576, 1_536, 9, 64, 8_192, 49_152),
    "kimi": Shape(7_168, 18_432, 64, 128, 32_000, 163_840),
    "tiny": Shape(64, 96, 4, 16, 200, 512),
}
BATCHES = 6  # that are made; half of the documents is held out
LEANING = 8.0  # logits of the wanted token above the others' spread of 1


def make(folder: Path, shape: Shape, batch_tokens: int, length: int) -> None:
    """`target`, `vocab.safetensors` and `shards` here: documents of `length` tokens, all generated but the first."""
    rng = np.random.default_rng(0)
    target = folder / "target"
    target.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.target_vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 8,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "max_position_embeddings": 8_192,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (target / "config.json").write_text(json.dumps(config))
    (target / "tokenizer.json").write_text("{}")
    head = to_bf16(rng.standard_normal((shape.target_vocab, shape.hidden), np.float32) * np.float32(shape.hidden**-0.5))
    norm = to_bf16(np.ones(shape.hidden, np.float32))
    write_tensors(target / "model.safetensors", {"model.embed_tokens.weight": head, "model.norm.weight": norm})
    ids = np.sort(rng.choice(shape.target_vocab, shape.draft_vocab, replace=False)).astype(np.int64)
    DraftVocab(ids, shape.target_vocab).save(folder / "vocab.safetensors")
    writer = ShardWriter(
        folder / "shards",
        target={"name": "random", **target_identity(target)},
        layer_ids=list(range(1, 1 + shape.aux)),
        convention="output_of_layer",
        hidden_size=shape.hidden,
        dtype="bfloat16",
    )
    with writer:
        for _ in range(BATCHES * max(1, batch_tokens // length)):
            tokens = rng.integers(0, shape.target_vocab, length).astype(np.int32)
            wanted = to_float32(head[ids[rng.integers(0, len(ids), length)]])
            states = rng.standard_normal((length, (1 + shape.aux) * shape.hidden), np.float32)
            final = states[:, : shape.hidden] + np.float32(LEANING) * wanted
            writer.add(
                Document(
                    tokens,
                    np.arange(length) > 0,
                    to_bf16(states[:, shape.hidden :]),
                    to_bf16(final),
                    document_name(tokens),
                )
            )
