"""Read any draft-vocabulary map, in the order of its file: a drafter folder, a safetensors file, or a list of ids.

d2t is an offset from its own row in most formats and the target id itself in some. Read the wrong way it is another
vocabulary and nothing fails, so the two are told apart by evidence alone, and where both fit a person must say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafter.checkpoint.vocab import DraftVocab, Ids, VocabError
from drafter.data.tensorfile import TensorFileError, map_tensors, plain_bytes, tensor_names

MAP_FORMATS = ("offset", "absolute")
FLAG = "--map-format"


@dataclass(frozen=True, eq=False)
class ReadMap:
    """A map as its file has it.

    target_ids: int64 [U], distinct, in the file's order; row u of that drafter's lm_head stands for target_ids[u].
    target_vocab_size: V, None where the source does not say. t2d: bool [V], None where the source has none.
    reading: "offset" or "absolute" (how d2t was read), "list" (the source is a list of ids) or "identity" (a drafter
    over the whole target vocabulary, which needs no map). evidence: why, a sentence each.
    """

    source: Path
    target_ids: Ids
    target_vocab_size: int | None
    t2d: NDArray[np.bool_] | None
    reading: str
    evidence: tuple[str, ...]

    @property
    def ascending(self) -> bool:
        """Whether the rows lie in the order of their target ids already."""
        return bool((np.diff(self.target_ids) > 0).all())

    def sorted(self, target_vocab_size: int | None = None) -> tuple[DraftVocab, Ids]:
        """The vocabulary, and int64 [U]: which row of the file each of its rows is.

        `target_vocab_size` is V for a source that does not say. Raises VocabError where V is unknown or another one.
        """
        size = agreed_size(self.source, {"its own": self.target_vocab_size, "the one given": target_vocab_size})
        if size is None:
            raise VocabError(
                f"{self.source} does not say how many tokens its target has: name a drafter folder, a map with t2d, "
                "or the target."
            )
        return DraftVocab.from_ids(self.target_ids, size)


def read_map(path: Path, map_format: str | None = None, target_vocab_size: int | None = None) -> ReadMap:
    """The map in a drafter folder, a .safetensors file with d2t, or a file of ids (a JSON list, or one a line).

    `map_format` ("offset" or "absolute") decides how a d2t without t2d is read; None decides by evidence.
    `target_vocab_size` is V for a file that does not say; it must agree with one that does. No weight is read. Raises
    VocabError.
    """
    assert map_format in (None, *MAP_FORMATS), map_format
    given = {"the target": target_vocab_size}
    try:
        if path.is_dir():
            return _read_folder(path, map_format, given)
        if path.suffix == ".safetensors":
            return _read_tensors(path, [path], map_format, given, whole=False)
        return _read_list(path, given)
    except TensorFileError as error:
        raise VocabError(str(error)) from None
    except OSError as error:
        raise VocabError(
            f"{error.filename or path} cannot be read ({error.strerror}): name a drafter folder, a .safetensors file "
            "with d2t, or a list of token ids."
        ) from None


def read_d2t(
    source: Path,
    d2t: Ids,
    t2d: NDArray[np.bool_] | None,
    target_vocab_size: int | None,
    map_format: str | None = None,
) -> tuple[Ids, str, tuple[str, ...]]:
    """Target ids in file order, the reading that was chosen, and the evidence for it; `source` is for messages alone.

    A reading fits where its ids are distinct, inside the target's vocabulary, and the very ones that t2d marks.
    `map_format` decides where there is no t2d to do so. Raises VocabError where no reading fits (or not the one that
    `map_format` names), and where both do.
    """
    readings = {"offset": d2t + np.arange(len(d2t)), "absolute": d2t}
    wrong = {name: _fault(ids, t2d, target_vocab_size) for name, ids in readings.items()}
    if map_format is not None and t2d is None:
        if wrong[map_format]:
            raise VocabError(
                f"{source}: d2t read as {map_format} {wrong[map_format]}: leave {FLAG} out to have the file decide, "
                "or name another file."
            )
        return readings[map_format], map_format, (f"{FLAG} {map_format}",)
    fits = [name for name in MAP_FORMATS if not wrong[name]]
    if not fits:
        said = "; ".join(f"read as {name} it {wrong[name]}" for name in MAP_FORMATS)
        raise VocabError(f"{source}: d2t is no map: {said}. Export it again, or repair it by the map it came from.")
    if len(fits) == 2 and not np.array_equal(readings["offset"], readings["absolute"]):
        row = int(np.flatnonzero(readings["offset"] != readings["absolute"])[0])
        raise VocabError(
            f"{source}: d2t can be read as offsets (row {row} is the target id {readings['offset'][row]}) and as "
            f"absolute ids ({readings['absolute'][row]}), and nothing in it decides: give {FLAG} offset or {FLAG} "
            "absolute."
        )
    chosen = fits[0]
    evidence = [f"read as {name} it {fault}" for name, fault in wrong.items() if fault]
    if t2d is not None:
        evidence.insert(0, f"read as {chosen} it names the {len(d2t):,} tokens that t2d marks")
    return readings[chosen], chosen, tuple(evidence)


def agreed_size(source: Path, sizes: dict[str, int | None]) -> int | None:
    """The target vocabulary's size, where somebody names it. Raises VocabError where two name different ones."""
    known = {who: size for who, size in sizes.items() if size is not None}
    if len(set(known.values())) > 1:
        said = ", ".join(f"{who} {size:,}" for who, size in known.items())
        raise VocabError(
            f"{source}: the target vocabulary's size is told in two ways ({said}): is it another target's?"
        )
    return next(iter(known.values()), None)


def _fault(ids: Ids, t2d: NDArray[np.bool_] | None, size: int | None) -> str | None:
    """What speaks against `ids` as the target ids of a map."""
    size = size if t2d is None else len(t2d)
    low, high = int(ids.min()), int(ids.max())
    if low < 0:
        return f"names the target id {low}"
    if size is not None and high >= size:
        return f"names the target id {high} of a target with {size:,} tokens"
    ordered = np.sort(ids)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        return f"names the target id {repeated[0]} twice"
    if t2d is not None and not np.array_equal(np.flatnonzero(t2d), ordered):
        missing = int((~t2d[ids]).sum())
        return f"names {missing:,} of {len(ids):,} tokens that t2d (which marks {int(t2d.sum()):,}) does not"
    return None


def _read_folder(folder: Path, map_format: str | None, sizes: dict[str, int | None]) -> ReadMap:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise VocabError(f"{folder} has no .safetensors file: name a drafter folder, or a file with d2t.")
    config = read_config(folder / "config.json")
    body = config.get("transformer_layer_config") or config.get("text_config") or config
    size = body.get("vocab_size") if isinstance(body, dict) else None
    rows = config.get("draft_vocab_size")
    for name, value in (("vocab_size", size), ("draft_vocab_size", rows)):
        if value is not None and (type(value) is not int or value < 1):
            raise VocabError(f"{folder / 'config.json'}: {name} is {value!r:.40}, expected a whole number above 0.")
    head = _one_tensor(folder, files, "lm_head.weight")
    told = {"draft_vocab_size": rows, "lm_head.weight": len(head) if head is not None and head.ndim else None}
    found = _read_tensors(folder, files, map_format, sizes | {"config.json": size}, whole=True)
    for name, count in told.items():
        if count is None or count == len(found.target_ids):
            continue
        if found.reading == "identity":
            raise VocabError(
                f"{folder} drafts over {count:,} of {len(found.target_ids):,} tokens ({name}) but has no d2t: export "
                "it with its map."
            )
        raise VocabError(
            f"{folder}: d2t has {len(found.target_ids):,} rows but {name} {count:,}: they belong to different drafters."
        )
    return found


def read_config(file: Path) -> dict[str, Any]:
    """A config.json, whoever's. Raises VocabError, or what `plain_bytes` does."""
    try:
        found = json.loads(plain_bytes(file))
    except (ValueError, RecursionError) as error:
        raise VocabError(f"{file} is not JSON ({error}): copy it again.") from None
    if not isinstance(found, dict):
        raise VocabError(f"{file} is no JSON object: copy it again.")
    return found


def _read_tensors(
    source: Path, files: Sequence[Path], map_format: str | None, sizes: dict[str, int | None], whole: bool
) -> ReadMap:
    """`whole`: without d2t it is a drafter over every target token."""
    d2t, t2d = (_one_tensor(source, files, end) for end in ("d2t", "t2d"))
    if t2d is not None:
        if t2d.ndim != 1 or t2d.dtype not in (np.bool_, np.uint8):
            raise VocabError(f"{source}: t2d is {t2d.dtype} {list(t2d.shape)}, expected booleans [V].")
        t2d, sizes = t2d.astype(np.bool_), sizes | {"t2d": len(t2d)}
    size = agreed_size(source, sizes)
    if d2t is None:
        if size is None or not whole:
            raise VocabError(f"{source} has no d2t: name a file or a drafter folder that has its map.")
        ids = np.arange(size)
        return ReadMap(source, ids, size, t2d, "identity", ("it has no d2t: every target token is its own row",))
    if d2t.ndim != 1 or d2t.dtype not in (np.int64, np.int32) or not len(d2t):
        raise VocabError(f"{source}: d2t is {d2t.dtype} {list(d2t.shape)}, expected integers [U].")
    ids, reading, evidence = read_d2t(source, d2t.astype(np.int64), t2d, size, map_format)
    return ReadMap(source, ids, size, t2d, reading, evidence)


def _one_tensor(source: Path, files: Sequence[Path], end: str) -> np.ndarray | None:
    """The tensor of that name, by memory map."""
    named = [(file, name) for file in files for name in tensor_names(file) if f".{name}".endswith(f".{end}")]
    if len(named) > 1:
        where = ", ".join(f"{name} in {file.name}" for file, name in named)
        raise VocabError(f"{source} has {len(named)} tensors named {end} ({where}), expected one: remove the others.")
    return map_tensors(named[0][0], [named[0][1]])[named[0][1]] if named else None


def _read_list(file: Path, sizes: dict[str, int | None]) -> ReadMap:
    raw = file.read_bytes()
    try:
        found = json.loads(raw) if file.suffix == ".json" else [int(word) for word in raw.decode("utf-8").split()]
        if not isinstance(found, list) or not found or any(type(token) is not int for token in found):
            raise ValueError("no list of whole numbers")
        ids = np.array(found, dtype=np.int64)
    except (ValueError, OverflowError, RecursionError) as error:
        raise VocabError(
            f"{file} is no list of token ids ({error!s:.80}): expected a JSON list, or ids with space between them; a "
            "map of tensors is named .safetensors."
        ) from None
    size = agreed_size(file, sizes)
    fault = _fault(ids, None, size)
    if fault:
        raise VocabError(f"{file} {fault}: expected distinct ids of the target's tokens.")
    return ReadMap(file, ids, size, None, "list", ("it is a list of token ids",))
