"""Read a drafter folder (config.json + safetensors) without loading a weight, and refuse one that is broken.

SGLang detects none of these faults: a missing tensor stays randomly initialised, acceptance length becomes 1.00 and
no error is raised (facts: `models/llama_eagle3.py`, `models/kimi_k25_eagle3.py` of SGLang 0.5.23).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM")
# Tensors by the name's end, since `midlayer.` and `layers.0.`, with and without `model.`, are all in use.
REQUIRED = {
    "LlamaForCausalLMEagle3": (
        "fc.weight",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
    ),
    "Eagle3DeepseekV2ForCausalLM": (
        "fc.weight",
        "self_attn.q_a_proj.weight",
        "self_attn.q_a_layernorm.weight",
        "self_attn.q_b_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        "self_attn.kv_a_layernorm.weight",
        "self_attn.kv_b_proj.weight",
        "self_attn.o_proj.weight",
    ),
}
REQUIRED_BY_BOTH = (
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "hidden_norm.weight",
    "post_attention_layernorm.weight",
    "norm.weight",
)
MAX_HEADER_BYTES = 100 * 1024 * 1024


class DrafterError(ValueError):
    """A drafter folder that cannot be served: says what was found, what was expected and what to do."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file's header describes it. `dtype` is safetensors' name (F32, BF16, I64, …)."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class DrafterFolder:
    """A readable drafter. `sha256` covers config.json and every safetensors file: the drafter's identity."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    sha256: str

    @property
    def architecture(self) -> str:
        return str(self.config["architectures"][0])

    @property
    def layer_ids(self) -> list[int] | None:
        """The nested `eagle_config` ids, the only ones that drive SGLang's capture; None means its default."""
        ids = (self.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        return None if ids is None else [int(layer) for layer in ids]

    @property
    def max_context(self) -> int | None:
        """The longest context that the drafter's config allows; SGLang refuses to serve beyond it."""
        return self.config.get("max_position_embeddings")


def read_folder(path: Path) -> DrafterFolder:
    """Read and check a drafter folder. Raises DrafterError on the first fault."""
    if not path.is_dir():
        raise DrafterError(
            f"drafter {path} is not a folder: give the folder that holds config.json and model.safetensors."
        )
    config = _read_config(path / "config.json")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickles = sorted(path.glob("*.bin")) + sorted(path.glob("*.pt"))
        found = f"only {pickles[0].name}, a pickle, which is not read" if pickles else "none"
        raise DrafterError(f"drafter {path}: expected a .safetensors file, found {found}.")
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors.update(read_header(file))
    folder = DrafterFolder(path, config, tensors, _identity([path / "config.json", *files]))
    _check_tensors(folder)
    return folder


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, from its header alone.

    Raises DrafterError where the file is cut short or is not safetensors.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            raise DrafterError(f"{file} is not a safetensors file (or is cut short at {size} bytes): copy it again.")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {
            name: TensorInfo(file.name, str(entry["dtype"]), tuple(int(size) for size in entry["shape"]))
            for name, entry in header.items()
        }
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DrafterError(f"{file} has a broken safetensors header ({error}): copy it again.") from None
    if size != 8 + length + end:
        raise DrafterError(
            f"{file} has {size} bytes, its header says {8 + length + end}: it is cut short, copy it again."
        )
    return tensors


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise DrafterError(f"{file} is missing: a drafter needs one, in SGLang's format.") from None
    except ValueError as error:
        raise DrafterError(f"{file} is not JSON ({error}).") from None
    names = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(names, list) or not names or names[0] not in ARCHITECTURES:
        raise DrafterError(
            f"{file}: 'architectures' is {names!r}, expected [{ARCHITECTURES[0]!r}] or [{ARCHITECTURES[1]!r}]: "
            "is this an EAGLE-3 drafter in SGLang's format?"
        )
    return config


def _check_tensors(folder: DrafterFolder) -> None:
    where, tensors, config = folder.path, folder.tensors, folder.config
    required = REQUIRED[folder.architecture] + REQUIRED_BY_BOTH
    missing = [end for end in required if not any(_is_named(name, end) for name in tensors)]
    rows = config.get("draft_vocab_size")
    if rows is not None and not any(_is_named(name, "lm_head.weight") for name in tensors):
        missing.append("lm_head.weight")
    if missing:
        raise DrafterError(
            f"drafter {where} lacks {', '.join(missing)}: SGLang would leave them random and serve at acceptance "
            "length 1.00 without a word. Export the drafter again."
        )
    if rows is None:
        return
    head = next(info for name, info in tensors.items() if _is_named(name, "lm_head.weight"))
    if head.shape[0] != rows:
        raise DrafterError(
            f"drafter {where}: lm_head.weight has {head.shape[0]:,} rows but draft_vocab_size is {rows:,}: "
            "make config.json and the weights agree."
        )
    d2t = next((info for name, info in tensors.items() if _is_named(name, "d2t")), None)
    if d2t is None and rows != config.get("vocab_size"):
        raise DrafterError(
            f"drafter {where} drafts over {rows} of {config.get('vocab_size')} tokens but has no d2t: SGLang would "
            "take draft ids for target ids. Export it with its map."
        )
    if d2t is not None and (d2t.shape != (rows,) or not d2t.dtype.startswith("I")):
        raise DrafterError(
            f"drafter {where}: d2t is {d2t.dtype} {list(d2t.shape)}, expected integers [{rows}]: "
            "one for each draft token."
        )


def _is_named(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


def _identity(files: list[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()
