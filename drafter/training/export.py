"""A trained drafter as a folder that SGLang serves, with the manifest that says whence."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafter.checkpoint.folder import DrafterFolder
from drafter.checkpoint.manifest import Manifest, write_folder
from drafter.data.tensorfile import to_bf16
from drafter.report import command
from drafter.training.model import Eagle3


def export(
    folder: Path, model: Eagle3, weights: dict[str, Tensor], manifest: Manifest, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write `weights` (names as in the checkpoint, fp32) with the model's config and maps.

    Raises DrafterError where `folder` exists.
    """
    half = dtype == torch.bfloat16
    tensors: dict[str, np.ndarray] = {
        name: to_bf16(tensor.numpy()) if half else tensor.numpy() for name, tensor in sorted(weights.items())
    }
    config = model.config | {"torch_dtype": "bfloat16" if half else "float32"}
    write_folder(folder, config, tensors | {"d2t": model.vocab.d2t, "t2d": model.vocab.t2d}, manifest)


def origin(parent: DrafterFolder | None, data_hash: str) -> dict[str, Any]:
    """Where a drafter that this process trains comes from; `parent` is the one it went on from."""
    try:
        here = Path(__file__).parent
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        git = ""  # an installed package is in no repository
    return {
        "kind": "finetune" if parent else "scratch",
        "parent": parent.path.absolute().name if parent else None,
        "parent_sha256": parent.sha256 if parent else None,
        "command": command(),
        "data_hash": data_hash,
        "git": git,
    }
