"""What a run will take of memory and disk, from sizes alone: nothing has been allocated yet when it is refused.

Kimi's width as an example: a token's features are 57 KB (three auxiliary states and the final one, 7,168 wide, bf16), a
drafter of 1.19 B parameters takes 19 GB with its gradients and AdamW's moments, over all ranks together.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from drafter.checkpoint.vocab import DraftVocab
from drafter.data.shards import ShardFolder, token_bytes
from drafter.training.errors import TrainingError
from drafter.training.loss import CHUNK_ELEMENTS
from drafter.training.model import Eagle3
from drafter.training.ranks import Ranks

FLOAT = 4
BASE = 400_000_000  # torch, its libraries and the interpreter
ROW_STATES = 16  # of a row and step, as wide as the hidden state, kept for the backward pass, beside what is counted


@dataclass(frozen=True)
class Estimate:
    """Bytes, by what takes them. memory: of one rank. disk: of the run's folder."""

    memory: Mapping[str, int]
    disk: int

    def check(self, ranks: Ranks, cap_gb: float | None, out: Path) -> None:
        """Raises TrainingError where a rank would pass the cap (default: what is free), or the disk would fill."""
        need, cap = sum(self.memory.values()), cap_gb * 1e9 if cap_gb else free_memory(ranks)
        if need > cap:
            parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in self.memory.items())
            what = "--memory-cap says" if cap_gb else "are free"
            raise TrainingError(
                f"each of {ranks.world} ranks needs about {need / 1e9:.1f} GB ({parts}), {cap / 1e9:.1f} {what}: take "
                "fewer --batch-tokens or more --accumulate, shorter documents (--max-length), more ranks, or raise "
                "--memory-cap."
            )
        there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
        free = shutil.disk_usage(there).free
        if free < self.disk:
            raise TrainingError(
                f"{out} has {free / 1e9:.2f} GB free, the run's checkpoints, labels and drafter need "
                f"{self.disk / 1e9:.2f} GB: make room, or name another --out."
            )

    def sentence(self) -> str:
        """For a person, before the run."""
        return f"about {sum(self.memory.values()) / 1e9:.1f} GB of memory a rank, {self.disk / 1e9:.2f} GB of disk"


def free_memory(ranks: Ranks) -> float:
    """Bytes that are free on this rank's device, or its part of what is free to all ranks of this machine."""
    if ranks.device.type == "cuda":
        return float(torch.cuda.mem_get_info(ranks.device)[0])
    return float(psutil.virtual_memory().available) / ranks.beside


def draft_size(config: Mapping[str, Any]) -> int:
    """Tokens that a drafter of this config may propose."""
    return int(config.get("draft_vocab_size") or config["vocab_size"])


def blank(config: Mapping[str, Any]) -> Eagle3:
    """A drafter of this config without any storage, to count by. Raises TrainingError as the real one does."""
    heads = {"head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]}
    with torch.device("meta"):
        vocab = DraftVocab(np.arange(draft_size(config)), config["vocab_size"])
        return Eagle3({**config, **heads}, vocab, torch.empty(config["vocab_size"], config["hidden_size"]))


def estimate(
    config: Mapping[str, Any],
    shards: ShardFolder,
    ranks: Ranks,
    *,
    batch_tokens: int,
    max_length: int,
    accumulate: int,
    ttt_steps: int,
    bf16: bool,
) -> Estimate:
    """For a drafter of `config` on these shards; its target's embedding and head are held beside it.

    Rows: a piece's tokens, or one document of `max_length` where that is more; evaluation takes twice a batch.
    """
    hidden, vocab, draft = config["hidden_size"], config["vocab_size"], draft_size(config)
    manifest, model = shards.manifest, blank(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    stored = 2 if manifest["dtype"] == "bfloat16" else FLOAT
    product = 2 if bf16 else FLOAT
    rows = max(-(-batch_tokens // (ranks.world * accumulate)), -(-2 * batch_tokens // ranks.world))
    rows = max(rows, min(max_length, manifest["tokens"]))
    whole_weights = 2 * count if ranks.world > 1 else 0  # gathered by FSDP, beside the shards
    attention = sum(parameter.numel() for parameter in model.midlayer.self_attn.parameters()) // (2 * hidden)
    a_row = ROW_STATES * hidden + 4 * config["intermediate_size"] + 4 * attention
    memory = {
        "torch": BASE,
        "weights, gradients, moments": FLOAT * (4 * count // ranks.world + whole_weights),
        "embedding and heads": 2 * vocab * hidden * stored + draft * hidden * (product + product),
        "features": rows * (token_bytes(manifest["n_aux"], hidden, manifest["dtype"]) * (1 + product // stored)),
        "activations": rows * ttt_steps * a_row * FLOAT,
        "teacher": rows * draft * FLOAT,
        "logits": 2 * CHUNK_ELEMENTS * FLOAT,
    }
    checkpoint, best, labels = 3 * FLOAT * count, FLOAT * count, FLOAT * manifest["tokens"]
    return Estimate(memory, 2 * checkpoint + 2 * best + FLOAT * count + labels)
