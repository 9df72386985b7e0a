"""Read a drafter folder (config.json + safetensors) without loading a weight, and refuse one that is broken.

SGLang detects few of these faults: a missing tensor stays randomly initialised, acceptance length becomes 1.00 and
no error is raised (facts: `models/llama_eagle3.py`, `models/kimi_k25_eagle3.py` of SGLang 0.5.23).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from drafter.checkpoint import shapes
from drafter.checkpoint.vocab import DraftVocab, VocabError

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM")
MAX_HEADER_BYTES = 100 * 1024 * 1024
# Without num_hidden_layers SGLang would build the 32 layers of its config class, all but the first of them random.
REQUIRED_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")
OPTIONAL_SIZES = (
    "draft_vocab_size",
    "max_position_embeddings",
    "target_hidden_size",
    "num_aux_hidden_states",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
MOST_LAYERS = 64  # of a drafter; more is a typing error, and would be a long list of missing tensors


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
        return shapes.layer_ids(self.config)

    @property
    def max_context(self) -> int | None:
        """The longest context that the drafter's config allows; SGLang refuses to serve beyond it."""
        return self.config.get("max_position_embeddings")


def read_folder(path: Path) -> DrafterFolder:
    """Read and check a drafter folder. Raises DrafterError on the first fault."""
    try:
        return _read_folder(path)
    except OSError as error:
        raise DrafterError(
            f"drafter {path}: {error.filename or path} cannot be read ({error.strerror}): expected config.json and "
            "model.safetensors as plain files, so copy the folder again or mend its rights."
        ) from None


def _read_folder(path: Path) -> DrafterFolder:
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
    _check_weights(path, config, tensors)
    _check_maps(path, config, tensors)
    return DrafterFolder(path, config, tensors, _identity([path / "config.json", *files]))


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
            name: TensorInfo(file.name, str(entry["dtype"]), tuple(_size(size) for size in entry["shape"]))
            for name, entry in header.items()
        }
        end = max((_size(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DrafterError(f"{file} has a broken safetensors header ({error}): copy it again.") from None
    if size != 8 + length + end:
        raise DrafterError(
            f"{file} has {size} bytes, its header says {8 + length + end}: it is cut short, copy it again."
        )
    return tensors


def _size(found: Any) -> int:
    if type(found) is not int or found < 0:
        raise ValueError(f"{found!r:.40} is no size")
    return found


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise DrafterError(f"{file} is missing: a drafter needs one, in SGLang's format.") from None
    except (ValueError, RecursionError) as error:
        raise DrafterError(f"{file} is not JSON ({error}): copy it again.") from None
    names = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(names, list) or not names or names[0] not in ARCHITECTURES:
        raise DrafterError(
            f"{file}: 'architectures' is {names!r:.80}, expected [{ARCHITECTURES[0]!r}] or [{ARCHITECTURES[1]!r}]: "
            "is this an EAGLE-3 drafter in SGLang's format?"
        )
    _check_sizes(file, config)
    _check_layers(file, config)
    return config


def _check_sizes(file: Path, config: dict[str, Any]) -> None:
    for key in REQUIRED_SIZES + OPTIONAL_SIZES:
        found = config.get(key)
        if (found is None and key in REQUIRED_SIZES) or (found is not None and (type(found) is not int or found < 1)):
            raise DrafterError(
                f"{file}: {key!r} is {_shown(config, key)}, expected a whole number above 0: take it from the run that "
                "trained the drafter."
            )
    if config["num_hidden_layers"] > MOST_LAYERS:
        raise DrafterError(f"{file}: 'num_hidden_layers' is {config['num_hidden_layers']}: an EAGLE-3 drafter has 1.")
    if config["architectures"][0] == ARCHITECTURES[0]:
        if "draft_vocab_size" not in config:
            raise DrafterError(
                f"{file}: 'draft_vocab_size' is missing, expected the rows of lm_head: SGLang stops without it. "
                "Write null to share the target's head."
            )
        if config.get("target_hidden_size", 0) is None:
            raise DrafterError(
                f"{file}: 'target_hidden_size' is null, which SGLang cannot size fc by: leave the key out, or give "
                "the target's hidden_size."
            )
    elif config["num_hidden_layers"] != 1:
        raise DrafterError(f"{file}: 'num_hidden_layers' is {config['num_hidden_layers']}, SGLang serves 1 here.")
    if config.get("tie_word_embeddings") is True and config.get("draft_vocab_size") not in (None, config["vocab_size"]):
        raise DrafterError(
            f"{file}: 'tie_word_embeddings' makes the target's embedding of {config['vocab_size']:,} rows the head, "
            f"but 'draft_vocab_size' is {config['draft_vocab_size']:,}: set it to false if lm_head is its own."
        )


def _check_layers(file: Path, config: dict[str, Any]) -> None:
    nested = config.get("eagle_config")
    if nested is not None and not isinstance(nested, dict):
        raise DrafterError(
            f"{file}: 'eagle_config' is {nested!r:.80}, expected an object with 'eagle_aux_hidden_state_layer_ids': "
            "SGLang would capture its default layers without a word."
        )
    key = "eagle_aux_hidden_state_layer_ids"
    found = {f"eagle_config.{key}": (nested or {}).get(key)}
    if config["architectures"][0] != ARCHITECTURES[0]:
        found[key] = config.get(key)  # sizes fc where the nested one is missing
    for where, ids in found.items():
        if ids is not None and not (
            isinstance(ids, list) and ids and all(type(layer) is int and layer >= 0 for layer in ids)
        ):
            raise DrafterError(
                f"{file}: {where!r} is {ids!r:.80}, expected a list of layer numbers of 0 or more: give the layers "
                "that the drafter was trained on."
            )
        if ids is not None and len(set(ids)) != len(ids):
            raise DrafterError(
                f"{file}: {where!r} is {ids!r:.80}, which names a layer twice: SGLang captures each once, so give the "
                "layers that the drafter was trained on."
            )
    captured, sized = len(shapes.layer_ids(config) or ()) or shapes.DEFAULT_AUX, shapes.aux_count(config)
    if captured != sized and (nested or {}).get("use_aux_hidden_state", True):
        raise DrafterError(
            f"{file}: SGLang would capture {captured} layers and size fc for {sized}: make "
            "'eagle_config.eagle_aux_hidden_state_layer_ids' name as many layers as fc takes."
        )


def _shown(config: dict[str, Any], key: str) -> str:
    return f"{config[key]!r:.80}" if key in config else "missing"


def _check_weights(where: Path, config: dict[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    architecture = config["architectures"][0]
    found = {shapes.canonical_name(name, architecture): (name, info) for name, info in tensors.items()}
    expected = shapes.expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        bare = {shapes.canonical_name(name.removeprefix("model."), architecture): name for name in tensors}
        skipped = next((bare[name] for name in missing if name in bare), None)
        hint = f" (it has {skipped}, a name that SGLang skips)" if skipped else ""
        raise DrafterError(
            f"drafter {where} lacks {', '.join(missing)}{hint}: SGLang would leave them random and serve at acceptance "
            "length 1.00 without a word. Export the drafter again."
        )
    for name, shape in expected.items():
        written, info = found[name]
        if config.get("quantization_config") and not info.dtype.startswith(("F", "BF")):
            continue  # packed: several values to a byte, or a byte to several
        if name == "lm_head.weight" and info.shape[:1] != shape[:1]:
            rows = f"{info.shape[0]:,}" if info.shape else "no"
            raise DrafterError(
                f"drafter {where}: lm_head.weight has {rows} rows but draft_vocab_size is {shape[0]:,}: "
                "make config.json and the weights agree."
            )
        if not _fits(info.shape, shape):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise DrafterError(
                f"drafter {where}: {written} is {list(info.shape)}, config.json asks for [{wanted}]: make config.json "
                "and the weights agree."
            )


def _fits(found: tuple[int, ...], wanted: shapes.Shape) -> bool:
    return len(found) == len(wanted) and all(
        want is None or have == want for have, want in zip(found, wanted, strict=True)
    )


def _check_maps(where: Path, config: dict[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    vocab_size = config["vocab_size"]
    rows = vocab_size if config.get("draft_vocab_size") is None else config["draft_vocab_size"]
    d2t_name, t2d_name = (next((name for name in tensors if _is_named(name, end)), None) for end in ("d2t", "t2d"))
    if d2t_name is None:
        if rows != vocab_size:
            raise DrafterError(
                f"drafter {where} drafts over {rows} of {vocab_size} tokens but has no d2t: SGLang would take draft "
                "ids for target ids. Export it with its map."
            )
        return
    info = tensors[d2t_name]
    if info.shape != (rows,) or not info.dtype.startswith("I"):
        raise DrafterError(
            f"drafter {where}: d2t is {info.dtype} {list(info.shape)}, expected integers [{rows}]: "
            "one for each draft token."
        )
    d2t = _read_tensor(where / info.file, d2t_name).astype(np.int64)
    t2d = None
    if t2d_name is not None:
        info = tensors[t2d_name]
        if info.shape != (vocab_size,) or info.dtype.startswith(("F", "BF")):
            raise DrafterError(
                f"drafter {where}: t2d is {info.dtype} {list(info.shape)}, expected booleans [{vocab_size}], one for "
                "each target token: write it anew from d2t, or leave it out, since SGLang does not read it."
            )
        t2d = _read_tensor(where / info.file, t2d_name)
    # SGLang serves rows in any order, so what is checked here is the set of the ids that they name.
    ids = np.sort(d2t + np.arange(rows))
    repeated = ids[1:][ids[1:] == ids[:-1]]
    if len(repeated):
        raise DrafterError(
            f"drafter {where}: d2t names the target id {repeated[0]} twice, expected {rows:,} distinct ids (row + "
            "d2t[row]): export it with its map."
        )
    try:
        DraftVocab.from_tensors(ids - np.arange(rows), t2d, vocab_size)
    except VocabError as error:
        raise DrafterError(f"drafter {where}: {error}") from None


def _read_tensor(file: Path, name: str) -> NDArray[Any]:
    try:
        with safe_open(file, framework="numpy") as opened:
            tensor: NDArray[Any] = opened.get_tensor(name)
    except SafetensorError as error:
        raise DrafterError(f"{file} has a broken safetensors header ({error}): copy it again.") from None
    return tensor


def _is_named(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


def _identity(files: list[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()
