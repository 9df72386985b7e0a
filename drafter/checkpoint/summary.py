"""What a drafter folder is, in a page: for `inspect`. Judges nothing; that is `preflight`."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from drafter.checkpoint import shapes
from drafter.checkpoint.fit import rotary
from drafter.checkpoint.folder import DrafterError, DrafterFolder, open_folder
from drafter.checkpoint.manifest import read_manifest
from drafter.checkpoint.maps import read_map
from drafter.checkpoint.vocab import VocabError

OPTIONS = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "bias",
    "sliding_window",
    "target_hidden_size",
)


def summarise(path: Path) -> dict[str, Any]:
    """JSON-able facts: format, class, sizes, vocabulary, layers, rope, tensors, manifest. Raises DrafterError."""
    folder = open_folder(path)
    config = folder.config
    nested = config.get("transformer_layer_config")
    layer = nested if isinstance(nested, dict) else config
    return {
        "drafter": str(path),
        "sha256": folder.sha256,
        "format": format_of(folder),
        "architecture": folder.architecture,
        "sizes": {
            key: layer.get(key, config.get(key))
            for key in (
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "max_position_embeddings",
            )
        },
        "parameters": sum(prod(tensor.shape) for tensor in _weights(folder).values()),
        "bytes": sum(tensor.end - tensor.begin for tensor in folder.tensors.values()),
        "dtypes": dict(Counter(tensor.dtype for tensor in _weights(folder).values())),
        "vocabulary": _vocabulary(path, layer.get("vocab_size"), config.get("draft_vocab_size")),
        "layer_ids": config.get("eagle_aux_hidden_state_layer_ids") if layer is not config else folder.layer_ids,
        "rope": dict(zip(("theta", "scaling"), rotary(layer), strict=True)),
        "options": {key: config[key] for key in OPTIONS if config.get(key)} | _nested_options(config),
        "tensors": {
            name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "file": tensor.file}
            for name, tensor in folder.tensors.items()
        },
        "manifest": _manifest(path),
    }


def format_of(folder: DrafterFolder) -> str:
    """Whose format a folder is in, as far as it tells."""
    if "speculators_model_type" in folder.config:
        return f"speculators ({folder.config['speculators_model_type']!s:.40})"
    maps = {end for end in ("d2t", "t2d") if any(f".{name}".endswith(f".{end}") for name in folder.tensors)}
    if maps == {"d2t"}:
        return "Model-Optimizer (d2t alone)"
    older = any(name.startswith("midlayer.") for name in folder.tensors)
    return "SpecForge, SGLang or EAGLE (midlayer)" if older else "SGLang or Model-Optimizer (layers.0)"


def render(found: dict[str, Any], tensors: bool) -> str:
    """The facts for a person, one a line; the tensors too where asked for."""
    vocabulary, rope, manifest = found["vocabulary"], found["rope"], found["manifest"]
    rows = {
        "format": found["format"],
        "class": found["architecture"] or "none named",
        "sizes": ", ".join(f"{key} {value}" for key, value in found["sizes"].items() if value is not None),
        "weights": f"{found['parameters']:,} parameters, {found['bytes'] / 1e6:,.1f} MB, "
        + ", ".join(f"{count} {dtype}" for dtype, count in found["dtypes"].items()),
        "vocabulary": vocabulary.get("error")
        or f"{vocabulary['size']:,} of {vocabulary['target_vocab_size'] or 0:,} tokens, "
        + f"read as {vocabulary['reading']}, "
        + ("ascending" if vocabulary["ascending"] else "in another order")
        + (f", hash {vocabulary['hash'][:16]}" if vocabulary["hash"] else ""),
        "layers": f"{found['layer_ids']}" if found["layer_ids"] is not None else "not named: the engine's default",
        "rope": f"theta {rope['theta']:g}" + (f", {rope['scaling']}" if rope["scaling"] else ""),
        "options": ", ".join(f"{key} {value}" for key, value in found["options"].items()) or "none",
        "sha256": found["sha256"],
        "manifest": "none: a foreign folder"
        if manifest is None
        else manifest.get("error")
        or f"{manifest.get('name')}, {manifest.get('state')}, made by {_kind(manifest)} on {manifest.get('created')}",
    }
    lines = [found["drafter"], *(f"  {key:<10} {value}" for key, value in rows.items())]
    if tensors:
        width = max(map(len, found["tensors"]), default=0)
        lines += [f"  {name:<{width}}  {t['dtype']:<5} {t['shape']}" for name, t in found["tensors"].items()]
    return "\n".join(lines)


def _weights(folder: DrafterFolder) -> dict[str, Any]:
    return {name: t for name, t in folder.tensors.items() if not f".{name}".endswith((".d2t", ".t2d"))}


def _vocabulary(path: Path, size: Any, rows: Any) -> dict[str, Any]:
    try:
        found = read_map(path)
        vocab, _ = found.sorted() if found.target_vocab_size else (None, None)
    except VocabError as error:
        return {"error": str(error), "size": rows, "target_vocab_size": size}
    return {
        "size": len(found.target_ids),
        "target_vocab_size": found.target_vocab_size,
        "reading": found.reading,
        "evidence": list(found.evidence),
        "ascending": found.ascending,
        "hash": vocab.hash if vocab else None,
    }


def _nested_options(config: dict[str, Any]) -> dict[str, Any]:
    return {"norm_before_fc": True} if shapes.norm_before_fc(config) else {}


def _manifest(path: Path) -> dict[str, Any] | None:
    try:
        return read_manifest(path)
    except (DrafterError, OSError) as error:
        return {"error": str(error)}


def _kind(manifest: dict[str, Any]) -> str:
    origin = manifest.get("origin")
    return str(origin.get("kind")) if isinstance(origin, dict) else "nobody knows what"
