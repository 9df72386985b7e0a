"""What training needs of a target: its config, embedding, lm_head and final norm, read straight from its folder.

No model is built. V target vocabulary, H hidden, M rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafter.training.errors import TrainingError

CANDIDATES = 8
CHUNK_ELEMENTS = 16 * 1024 * 1024  # logits held at once by `best_tokens`


@dataclass(frozen=True)
class Target:
    """Tensors in the folder's own dtype; `config` is the text model's. A tied head is the embedding."""

    path: Path
    config: dict[str, Any]
    embed_VH: Tensor
    head_VH: Tensor
    norm_H: Tensor


def load_target(folder: Path) -> Target:
    """Raises TrainingError where config.json or one of the tensors is missing."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"target {folder} has no readable config.json ({error}): give the target's folder."
        ) from None
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    for end in ("embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
                        if f".{name}".endswith(f".{end}"):
                            found[end] = tensors.get_tensor(name)
        except SafetensorError as error:
            raise TrainingError(f"{file} cannot be read ({error}): copy it again.") from None
    missing = {"embed_tokens.weight", "model.norm.weight"} - found.keys()
    if missing:
        raise TrainingError(
            f"target {folder} has no {min(missing)} in its .safetensors files: give a whole checkpoint."
        )
    embed_VH = found["embed_tokens.weight"]
    return Target(
        folder,
        config.get("text_config", config),
        embed_VH,
        found.get("lm_head.weight", embed_VH),
        found["model.norm.weight"],
    )


def best_tokens(final_MH: Tensor, head_VH: Tensor) -> Tensor:
    """The target's greedy choice after each position, int64 [M]: argmax over the whole vocabulary.

    `final_MH` is after the final norm. Where both are bf16 the product is too, which makes ties of near logits; the
    best few are then compared again in fp32.
    """
    rows = max(1, CHUNK_ELEMENTS // len(head_VH))
    if final_MH.dtype != torch.bfloat16 or head_VH.dtype != torch.bfloat16:
        head_VH = head_VH.float()
        return torch.cat([F.linear(part.float(), head_VH).max(-1).indices for part in final_MH.split(rows)])
    best: list[Tensor] = []
    for part_MH in final_MH.split(rows):
        ids_MC = F.linear(part_MH, head_VH).topk(min(CANDIDATES, len(head_VH)), dim=-1).indices
        ids_MC = ids_MC.sort(-1).values  # of equals, the first id, as argmax has it
        exact_MC = torch.einsum("mh,mch->mc", part_MH.float(), head_VH[ids_MC].float())
        best.append(ids_MC.gather(-1, exact_MC.max(-1, keepdim=True).indices)[:, 0])
    return torch.cat(best)
