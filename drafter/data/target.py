"""Which target a capture or a drafter belongs to: the hashes of its config, its tokenizer and its output head."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import safe_open


def target_identity(folder: Path) -> dict[str, str]:
    """Hashes of config.json, tokenizer.json and the bytes of lm_head (the embedding where tied)."""
    heads: dict[str, bytes] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                if name.endswith(("lm_head.weight", "embed_tokens.weight")):
                    heads[name.split(".")[-2]] = tensors.get_tensor(name).flatten().view(torch.uint8).numpy().tobytes()
    return {
        "config_sha256": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(),
        "tokenizer_sha256": hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        "lm_head_sha256": hashlib.sha256(heads.get("lm_head", heads["embed_tokens"])).hexdigest(),
    }
