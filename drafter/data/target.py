"""Which target a capture or a drafter belongs to: the hashes of its config, its tokenizer and its output head.

A drafter learns the target's own features and reads its output head, so any of the three changing makes it foreign.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from drafter.data.tensorfile import Span, TensorFileError, plain_bytes, tensor_names, tensor_spans
from drafter.data.tensorwriter import hash_range
from drafter.report import file_sha256

TARGET_HASHES = ("config_sha256", "tokenizer_sha256", "lm_head_sha256")
TOKENIZERS = ("tokenizer.json", "tiktoken.model", "tokenizer.model")
INDEX = "model.safetensors.index.json"


class TargetError(ValueError):
    """A target folder that cannot be identified: what was found, and what to do."""


def target_identity(folder: Path) -> dict[str, str]:
    """config_sha256, tokenizer_sha256 and lm_head_sha256 of a model folder.

    The first two are over a file's bytes (TOKENIZERS names the files, the first that exists counts), the last over the
    bytes of the output head's tensor, which is the embedding where the two are tied. Raises TargetError.
    """
    if _tokenizer(folder) is None and (folder / "config.json").exists():
        raise TargetError(f"{folder} has none of {', '.join(TOKENIZERS)}: copy the target's tokenizer into it.")
    return {name: found for name, found in target_hashes(folder).items() if found is not None}


def target_hashes(folder: Path) -> dict[str, str | None]:
    """`target_identity` of a folder that may lack a tokenizer, whose hash is then None. Raises TargetError."""
    head, tokenizer = output_head(folder), _tokenizer(folder)
    digest = hashlib.sha256()
    try:
        hash_range(digest, head.file, head.begin, head.nbytes)
    except OSError as error:
        raise TargetError(f"{head.file} cannot be read ({error.strerror}): copy it again.") from None
    return {
        "config_sha256": file_sha256(folder / "config.json"),
        "tokenizer_sha256": None if tokenizer is None else file_sha256(tokenizer),
        "lm_head_sha256": digest.hexdigest(),
    }


def _tokenizer(folder: Path) -> Path | None:
    return next((folder / name for name in TOKENIZERS if (folder / name).is_file()), None)


def _is_tied(config: dict[str, Any]) -> bool:
    text = config.get("text_config") or {}
    return bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def output_head(folder: Path) -> Span:
    """Where the output head of a model folder lies: lm_head.weight, or the embedding where the two are tied.

    A prefix does not matter (Kimi's is language_model.). Of a sharded checkpoint its index and the head's own file are
    opened, no other. Raises TargetError.
    """
    try:
        config = json.loads(plain_bytes(folder / "config.json"))
        return _find_head(folder, _is_tied(config))
    except OSError as error:
        raise TargetError(
            f"{error.filename or folder} cannot be read ({error.strerror}): give the folder that holds the target's "
            "weights."
        ) from None
    except TensorFileError as error:
        raise TargetError(str(error)) from None
    except (ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, TargetError):
            raise
        raise TargetError(
            f"{folder / 'config.json'} is no model's configuration: give the folder with the target."
        ) from None


def _find_head(folder: Path, tied: bool) -> Span:
    names = _files_by_name(folder)
    for end in ("lm_head.weight", "embed_tokens.weight") if tied else ("lm_head.weight",):
        found = [name for name in names if f".{name}".endswith(f".{end}")]
        if len(found) > 1:
            raise TargetError(f"{folder} has {len(found)} tensors named {end} ({', '.join(found)}), expected one.")
        if found:
            file = names[found[0]]
            if not file.is_file():
                raise TargetError(
                    f"{folder / INDEX} says that {found[0]} is in {file.name}, which is missing: copy it."
                )
            span = tensor_spans(file).get(found[0])
            if span is None:
                raise TargetError(
                    f"{folder / INDEX} says that {found[0]} is in {file.name}, which lacks it: copy both again."
                )
            return span
    packed = next((name for name in names if ".lm_head." in f".{name}"), None)
    if packed is not None:
        raise TargetError(
            f"{folder} has {packed}, as quantised heads do, and no lm_head.weight: name an unquantised one."
        )
    if not tied and any(f".{name}".endswith(".embed_tokens.weight") for name in names):
        raise TargetError(
            f"{folder} has an embedding but no lm_head.weight: write tie_word_embeddings = true into its config.json "
            "if the two are one there, else copy the file with the head."
        )
    raise TargetError(
        f"{folder} has no tensor named lm_head.weight{' or embed_tokens.weight' if tied else ''} in safetensors: "
        "give the folder that holds the target's weights."
    )


def _files_by_name(folder: Path) -> dict[str, Path]:
    """The file of each tensor: by the index of a sharded checkpoint, else by the files' own headers."""
    if (folder / INDEX).is_file():
        try:
            index: dict[str, str] = json.loads(plain_bytes(folder / INDEX))["weight_map"]
            files = set(index.values())
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise TargetError(f"{folder / INDEX} has no weight_map: copy it again.") from None
        if any(not isinstance(file, str) or Path(file).name != file for file in files):
            raise TargetError(f"{folder / INDEX} names a file that is not in its folder: copy it again.")
        return {name: folder / file for name, file in index.items()}
    return {name: file for file in sorted(folder.glob("*.safetensors")) for name in tensor_names(file)}
