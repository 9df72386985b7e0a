"""Small targets, conversations and documents for the tests of capture."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from drafter.data.shard_writer import ShardWriter
from drafter.data.shards import Document, ShardFolder, document_name, open_shards
from drafter.data.tensorfile import write_tensors

WIDTH, N_AUX = 4, 3
LAYERS = [1, 2, 3]


def write_target(folder: Path, seed: int = 0, tied: bool = False, prefix: str = "") -> Path:
    """A model folder that `target_identity` can read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": tied, "hidden_size": WIDTH}))
    (folder / "tokenizer.json").write_text("{}")
    weights = np.random.default_rng(seed).integers(0, 2**15, (10, WIDTH)).astype(np.uint16)
    names = {f"{prefix}model.embed_tokens.weight": weights}
    if not tied:
        names[f"{prefix}lm_head.weight"] = weights + 1
    write_tensors(folder / "model.safetensors", names)
    return folder


def hidden(ids: np.ndarray, width: int, start: int = 0, dtype: str = "float32") -> np.ndarray:
    """Made-up states that depend on the token, its position and the column alone, so that any order gives the same."""
    rows = np.arange(start, start + len(ids), dtype=np.float32)[:, None]
    states = ids[:, None].astype(np.float32) + rows / 1024 + np.arange(width, dtype=np.float32) / 64
    return states if dtype == "float32" else (states.view(np.uint32) >> 16).astype(np.uint16)


def document(length: int, seed: int, dtype: str = "float32") -> Document:
    ids = np.random.default_rng(seed).integers(0, 100, length).astype(np.int32)
    mask = np.arange(length) >= length // 2
    aux, final = hidden(ids, N_AUX * WIDTH, dtype=dtype), hidden(ids, WIDTH, dtype=dtype)
    return Document(ids, mask, aux, final, document_name(ids))


def writer(path: Path, **changes: object) -> ShardWriter:
    kind = {
        "target": {"name": "t", "config_sha256": "c", "tokenizer_sha256": "t", "lm_head_sha256": "l"},
        "layer_ids": LAYERS,
        "convention": "output_of_layer",
        "hidden_size": WIDTH,
        "dtype": "float32",
        **changes,
    }
    return ShardWriter(path, **kind)


def equal(a: Document, b: Document) -> bool:
    return all(
        getattr(a, name).dtype == getattr(b, name).dtype and np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("input_ids", "loss_mask", "aux_hidden", "final_hidden")
    )


def lines(count: int, past: int = 2, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations as `generate` writes them, `past` tokens beyond each answer."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        prompt, answer = rng.integers(1, 20), past + rng.integers(1, 20)
        made.append(
            {
                "messages": [],
                "input_ids": rng.integers(0, 1000, prompt).tolist(),
                "output_ids": rng.integers(0, 1000, answer).tolist(),
                "meta": {"past": past},
            }
        )
    return made


def write_lines(path: Path, entries: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def check(folder: Path, entries: list[dict[str, Any]]) -> ShardFolder:
    """Every document is the conversation of its place, with its mask, and the tensors that the engine wrote."""
    shards = open_shards(folder, verify=True)
    assert len(shards) == len(entries)
    for index, entry in enumerate(entries):
        found = shards.document(index)
        prompt, answer, past = entry["input_ids"], entry["output_ids"], entry["meta"]["past"]
        assert found.input_ids.tolist() == prompt + answer
        mask = [False] * len(prompt) + [True] * (len(answer) - past) + [False] * past
        assert found.loss_mask.tolist() == mask
        assert np.array_equal(found.aux_hidden, hidden(found.input_ids, N_AUX * WIDTH))
        assert np.array_equal(found.final_hidden, hidden(found.input_ids, WIDTH))
    return shards
