"""What is publicly known of the models that the profiles name (server/models/), for a plan without their files.

A model's own config.json counts where its folder is on this disk. What could not be read is said in `source`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from drafter.checkpoint.specials import target_vocab_size
from drafter.checkpoint.vocab import VocabError

DATA = Path(__file__).with_name("models")
# Two configs with these in common have the same kernels: the model on paper (drafter/roofline.toml) holds for both.
SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "n_routed_experts", "kv_lora_rank", "vocab_size")


@dataclass(frozen=True)
class Known:
    """A model's config.json, where it comes from, and its name in drafter/roofline.toml (None: not there)."""

    config: dict[str, Any]
    source: str
    paper: str | None

    @property
    def text(self) -> dict[str, Any]:
        """The config of the text model: Kimi's is one level down."""
        return text_config(self.config)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's part of a config.json."""
    found: dict[str, Any] = config.get("text_config") or config
    return found


@cache
def entries() -> list[dict[str, Any]]:
    """Every file of server/models: {names, paper, source, config}."""
    return [json.loads(file.read_text("utf-8")) for file in sorted(DATA.glob("*.json"))]


def find(path: str) -> Known | None:
    """The model of a hub id, or of a folder or registered drafter of a known name; from its folder where it is here.

    Raises ValueError for a config.json that cannot be read.
    """
    folder = Path(path)
    file = folder / "config.json"
    if folder.is_absolute() and file.is_file():
        try:
            config = json.loads(file.read_bytes())
            text_config(config)["hidden_size"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} is no model's configuration ({type(error).__name__}: {error}): copy the model again."
            ) from None
        return Known(config, str(file), _paper(config))
    for entry in entries():
        if path in entry["names"] or folder.name in entry["names"]:
            return Known(entry["config"], entry["source"], entry["paper"])
    return None


def vocab_size_of(model_path: str) -> int | None:
    """Tokens that a target knows, where its config.json is on this machine."""
    try:
        return target_vocab_size(Path(model_path))
    except VocabError:
        return None


def _paper(config: dict[str, Any]) -> str | None:
    """The entry on paper of a model of this architecture, these sizes and this storage of weights, if there is one."""
    for entry in entries():
        like = entry["config"]
        if config.get("architectures") == like["architectures"] and _shape(config) == _shape(like):
            return str(entry["paper"])
    return None


def _shape(config: dict[str, Any]) -> tuple[Any, ...]:
    text = text_config(config)
    method = (quantization(config) or {}).get("quant_method")
    return (method, *(text.get(key) for key in SHAPE))


def quantization(config: dict[str, Any]) -> dict[str, Any] | None:
    """The quantisation block of a config.json: at the top, or with the text model."""
    found = config.get("quantization_config") or text_config(config).get("quantization_config")
    return found if isinstance(found, dict) else None
