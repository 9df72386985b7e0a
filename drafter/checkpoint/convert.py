"""A drafter folder in another format: names by the tables of `formats`, numbers as they are, in no more memory.

Of the numbers only the order of lm_head's rows can change: SGLang and speculators get ascending target ids, which
slicing a teacher's logits by t2d takes for granted; Model-Optimizer gets the rows as they lie.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from drafter.checkpoint import formats, shapes
from drafter.checkpoint.findings import run_checks
from drafter.checkpoint.folder import DrafterError, DrafterFolder, open_folder
from drafter.checkpoint.formats import FormatError
from drafter.checkpoint.maps import read_d2t
from drafter.checkpoint.preflight import OF_THE_FOLDER, refuse
from drafter.checkpoint.rows import Rows
from drafter.checkpoint.subject import Subject, TargetFacts
from drafter.checkpoint.vocab import DraftVocab, Ids
from drafter.data.tensorfile import Span, array_part, map_tensors, span_part, tensor_spans, to_float32
from drafter.data.tensorwriter import write_parts

NormOutput = Literal["fed-back", "head-only"]
Kind = Literal["flat", "speculators"]
EMBED = "embed_tokens.weight"
HEAD = "lm_head.weight"
MENDED = ("d2t-reading",)  # what a conversion puts right


@dataclass(frozen=True)
class Source:
    """A drafter to convert. `config` is as its format writes it; `spans` by canonical name.

    target_ids: int64 [U], the target id of each row of lm_head; None where it has a row for every token, in order.
    """

    path: Path
    kind: Kind
    config: dict[str, Any]
    spans: dict[str, Span]
    target_ids: Ids | None
    target_vocab_size: int
    folder: DrafterFolder


def read_source(path: Path, map_format: str | None = None) -> Source:
    """A drafter in SGLang's, Model-Optimizer's or speculators' format. Raises DrafterError or VocabError."""
    folder = open_folder(path)
    kind: Kind = "speculators" if "speculators_model_type" in folder.config else "flat"
    if kind == "flat":
        _refuse_faults(folder)
        size, architecture = folder.config["vocab_size"], folder.architecture
    else:
        size = (folder.config.get("transformer_layer_config") or {}).get("vocab_size")
        architecture = shapes.LLAMA
        if type(size) is not int:
            raise DrafterError(f"{path / 'config.json'} names no vocab_size in its transformer_layer_config.")
    found: dict[str, Span] = {}
    for file in dict.fromkeys(tensor.file for tensor in folder.tensors.values()):
        found |= tensor_spans(path / file)
    maps = {end: next((s for n, s in found.items() if f".{n}".endswith(f".{end}")), None) for end in ("d2t", "t2d")}
    spans = {
        shapes.canonical_name(name, architecture): span for name, span in found.items() if span not in maps.values()
    }
    ids = None
    if maps["d2t"] is not None:
        arrays = {end: np.array(map_tensors(span.file, [span.name])[span.name]) for end, span in maps.items() if span}
        mask = arrays["t2d"].astype(np.bool_) if "t2d" in arrays else None
        ids, _, _ = read_d2t(path, arrays["d2t"].astype(np.int64), mask, size, map_format)
    return Source(path, kind, folder.config, spans, ids, size, folder)


def _refuse_faults(folder: DrafterFolder) -> None:
    """A folder whose config is SGLang's must be sound by itself: what is converted would be as wrong, and look new."""
    refuse(run_checks(OF_THE_FOLDER, Subject(folder)), MENDED)


def flat_config(source: Source, target: TargetFacts | None, norm_output: NormOutput | None) -> dict[str, Any]:
    """The source's config as SGLang reads it. Raises FormatError where it cannot be one, or a flag must decide."""
    if source.kind == "speculators":
        ids = source.config.get(formats.LAYERS_KEY)
        known = needed(target, "speculators counts captured layers by their inputs, SGLang by the target's class")
        inputs = formats.default_inputs(known) if ids is None else ids
        if not isinstance(inputs, list) or not all(type(layer) is int and layer >= 0 for layer in inputs):
            raise FormatError(f"{source.path / 'config.json'}: {formats.LAYERS_KEY} is {ids!r:.80}, expected layers.")
        _check_embedding(source, known)
        flat = formats.from_speculators(source.config, formats.ids_of(inputs, known))
        _refuse_faults(replace(source.folder, config=flat))
        return flat
    config = dict(source.config)
    if config.get("norm_output"):
        if norm_output is None:
            raise FormatError(
                f"{source.path / 'config.json'}: norm_output is set, which SGLang and speculators take as feeding the "
                "normed state back and SpecForge as a norm before lm_head alone: give --norm-output fed-back, or "
                "--norm-output head-only if SpecForge trained it."
            )
        if norm_output == "head-only":
            del config["norm_output"]
    return config


def write_converted(
    source: Source,
    to: str,
    folder: Path,
    target: TargetFacts | None,
    norm_output: NormOutput | None = None,
    progress: Callable[[int], object] = int,
) -> None:
    """config.json and model.safetensors in `folder`, as the format `to` has them. Raises DrafterError."""
    flat = flat_config(source, target, norm_output)
    config, names, spans = flat, formats.WEIGHT_MAPS[to], dict(source.spans)
    if to == "speculators":
        known = needed(target, "speculators keeps the target's name and embedding in the drafter")
        if known.size("vocab_size") != source.target_vocab_size or known.size("hidden_size") != flat["hidden_size"]:
            raise FormatError(f"target {known.path} is of another size than the drafter's: name its own target.")
        config = formats.to_speculators(flat, known, formats.inputs_of(shapes.layer_ids(flat), known))
        spans[EMBED] = embedding_of(known)
    elif shapes.target_hidden(flat) == flat["hidden_size"]:
        spans.pop(EMBED, None)  # the target's, which the engine puts there anyway
    kept = [name for name in spans if name in names]
    lost = [name for name in spans if name not in names and not name.endswith("rotary_emb.inv_freq")]
    if lost:
        raise FormatError(f"drafter {source.path} has {', '.join(lost)[:200]}, for which {to} has no place.")
    order, ids = None, source.target_ids
    if ids is not None and to != "modelopt":
        vocab, order = DraftVocab.from_ids(ids, source.target_vocab_size)
        ids = vocab.target_ids
    parts = []
    if ids is not None:
        parts.append(array_part("d2t", ids - np.arange(len(ids))))
    for name in kept:
        span = replace(spans[name], name=names[name])
        part = span_part(span)
        if order is not None and name == HEAD and not np.array_equal(order, np.arange(len(order))):
            part = replace(part, chunks=_in_order(span, order), lies=None)
        parts.append(part)
    if ids is not None and to != "modelopt":
        parts.append(array_part("t2d", np.isin(np.arange(source.target_vocab_size), ids)))
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    write_parts(folder / "model.safetensors", parts, {"format": "pt"}, progress)


def needed(target: TargetFacts | None, why: str) -> TargetFacts:
    """The target, where a conversion cannot do without. Raises FormatError."""
    if target is None:
        raise FormatError(f"the target is needed ({why}): give --target DIR.")
    return target


def embedding_of(target: TargetFacts) -> Span:
    """Where the target's embedding lies. Raises FormatError."""
    for file in sorted(target.path.glob("*.safetensors")):
        for name, span in tensor_spans(file).items():
            if f".{name}".endswith(f".{EMBED}") and span.shape[0] == target.size("vocab_size"):
                return span
    raise FormatError(f"target {target.path} has no {EMBED} in its .safetensors files: give a whole checkpoint.")


def _check_embedding(source: Source, target: TargetFacts) -> None:
    """SGLang drafts with the target's embedding: a drafter trained with another would say something else."""
    own = source.spans.get(EMBED)
    if own is None:
        return
    if not _same(own, embedding_of(target)):
        raise FormatError(
            "the conversion would change what the drafter says: its embedding is not the target's, and SGLang drafts "
            "with the target's. Name the target that it was trained for, or keep it in its own format."
        )


def _same(own: Span, theirs: Span) -> bool:
    """Whether two matrices hold the same numbers, as far as the shorter of their dtypes can tell."""
    if own.shape != theirs.shape:
        return False
    with Rows(own) as a, Rows(theirs) as b:
        for begin in range(0, a.count, a.chunk):
            numbers = np.arange(begin, min(begin + a.chunk, a.count))
            left, right = to_float32(a.read(numbers)), to_float32(b.read(numbers))
            same = np.array_equal(left, right) if own.dtype == theirs.dtype else np.allclose(left, right, rtol=2**-7)
            if not same:
                return False
    return True


def _in_order(span: Span, order: Ids) -> Callable[[], Iterator[memoryview]]:
    """The rows of a matrix in another order: row u of the result is row order[u]."""

    def chunks() -> Iterator[memoryview]:
        with Rows(span) as rows:
            for begin in range(0, len(order), rows.chunk):
                yield rows.read(order[begin : begin + rows.chunk]).reshape(-1).view(np.uint8).data

    return chunks
