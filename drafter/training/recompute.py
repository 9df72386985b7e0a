"""A target's hidden states computed anew by transformers, to try other layers than those that were captured.

Only for targets that fit into memory beside everything else; a larger one is not tried, and that is said.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

LARGEST = 8 * 1024**3  # bytes of weights in the folder


class NotRecomputed(Exception):
    """Why a target's states are not computed here."""


def all_inputs(target: Path, texts: list[np.ndarray]) -> list[np.ndarray]:
    """What enters every layer, and what leaves the last before its norm, where the model gives it: fp32 [L, T, H].

    One array for each text (token ids, int32 [T]); L counts the layers, entry l is the input of layer l. Raises
    NotRecomputed.
    """
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    if size > LARGEST:
        raise NotRecomputed(f"the target has {size / 1e9:.0f} GB of weights, too many to compute other layers here")
    try:
        model = _load(target)
    except (OSError, ValueError, TypeError, KeyError, ImportError, RuntimeError) as error:
        raise NotRecomputed(f"transformers does not load {target} ({error!s:.120})") from None
    found = []
    with torch.no_grad():
        for text in texts:
            tokens_1T = torch.from_numpy(text.astype(np.int64))[None]
            out = model(tokens_1T, output_hidden_states=True, use_cache=False)
            found.append(torch.stack([state[0].float() for state in out.hidden_states[:-1]]).numpy())
    return found


def _load(target: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    whole = json.loads((target / "config.json").read_bytes())
    text = whole.get("text_config")
    if text is None:
        return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    config = AutoConfig.for_model(text.pop("model_type"), **text)  # the text half of a model that also sees
    return AutoModelForCausalLM.from_pretrained(
        target, config=config, key_mapping={r"^language_model\.": ""}, dtype=torch.float32
    ).eval()
