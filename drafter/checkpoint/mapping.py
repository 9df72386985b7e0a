"""Checks of a drafter's vocabulary map. SGLang adds d2t to the row's number and looks at nothing else.

A permuted map in range passes every check here: what it costs shows in the acceptance length alone (server/probe.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from drafter.checkpoint import shapes
from drafter.checkpoint.findings import Finding, error, info, warning
from drafter.checkpoint.folder import DrafterFolder, TensorInfo
from drafter.checkpoint.maps import read_d2t
from drafter.checkpoint.specials import COSTS, missing
from drafter.checkpoint.subject import Subject
from drafter.checkpoint.vocab import Ids, VocabError
from drafter.data.tensorfile import map_tensors

INTEGERS = ("I64", "I32")
WITH_ITS_MAP = "export it with the map that its lm_head was trained under"


def d2t_tensor(subject: Subject) -> Iterator[Finding]:
    """One d2t with one entry a row; without one, the rows are the target's tokens."""
    folder, rows, size = subject.folder, _rows(subject), subject.config["vocab_size"]
    found = _named(folder, "d2t")
    if len(found) > 1:
        yield error(
            f"drafter {folder.path} has {len(found)} tensors that SGLang takes for d2t ({', '.join(found)[:200]})",
            "one",
            WITH_ITS_MAP,
        )
    elif not found and rows != size:
        yield error(
            f"drafter {folder.path} drafts over {rows:,} of {size:,} tokens but has no d2t, and SGLang would take "
            "draft ids for target ids",
            "a d2t",
            WITH_ITS_MAP,
        )
    for name, tensor in found.items():
        if tensor.shape != (rows,) or tensor.dtype not in INTEGERS:
            yield error(
                f"drafter {folder.path}: {name} is {tensor.dtype} {list(tensor.shape)}",
                f"integers [{rows}], one for each draft token",
                WITH_ITS_MAP,
            )


def d2t_reading(subject: Subject) -> Iterator[Finding]:
    """SGLang reads offsets. Absolute ids, where the file gives evidence of them, would be another vocabulary."""
    d2t, t2d, size = _d2t(subject), _sound_t2d(subject), subject.config["vocab_size"]
    if d2t is None:
        return
    try:
        _, reading, evidence = read_d2t(subject.folder.path, d2t, t2d, size)
    except VocabError as refused:
        if _fits(d2t, size) and _fits(d2t + np.arange(len(d2t)), size) and t2d is None:
            # Offsets stay the same from one token of a vocabulary to the next id; ids never do.
            ascending = bool((np.diff(d2t) > 0).all()) and len(d2t) > 1
            say = error if ascending else warning
            yield say(
                f"{refused!s:.400}".rstrip("."),
                "offsets, as SGLang reads them",
                "rewrite d2t as offsets if it holds ids (`python -m drafter convert --to sglang`)",
            )
        return
    if reading == "absolute":
        yield error(
            f"drafter {subject.folder.path}: d2t holds absolute target ids ({'; '.join(evidence)}), and SGLang would "
            "add each row's number to them",
            "offsets",
            "rewrite d2t as offsets (`python -m drafter convert --to sglang`)",
        )


def d2t_range(subject: Subject) -> Iterator[Finding]:
    """An id outside of the target's vocabulary ends the engine at its first use, or reads other memory."""
    ids, size = target_ids(subject), subject.config["vocab_size"]
    if ids is not None and (ids.min() < 0 or ids.max() >= size):
        row = int(np.flatnonzero((ids < 0) | (ids >= size))[0])
        yield error(
            f"drafter {subject.folder.path}: d2t names the target id {ids[row]} at row {row}, but the target has "
            f"{size:,} tokens",
            f"ids (row + d2t[row]) of 0 to {size - 1}",
            WITH_ITS_MAP,
        )


def d2t_unique(subject: Subject) -> Iterator[Finding]:
    """Two rows of one token: one of them was trained for another."""
    ids = target_ids(subject)
    if ids is not None:
        ordered = np.sort(ids)
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(repeated):
            yield error(
                f"drafter {subject.folder.path}: d2t names the target id {repeated[0]} twice, {len(repeated):,} "
                "repeats in all",
                f"{len(ids):,} distinct ids (row + d2t[row])",
                WITH_ITS_MAP,
            )


def d2t_placeholder(subject: Subject) -> Iterator[Finding]:
    """What an untouched buffer looks like: all zero, or 0, 1, 2 …"""
    d2t = _d2t(subject)
    if d2t is None or len(d2t) == subject.config["vocab_size"] or len(d2t) < 2:
        return
    for pattern, what in ((np.zeros_like(d2t), "all zero"), (np.arange(len(d2t)), "0, 1, 2 …")):
        if np.array_equal(d2t, pattern):
            yield error(
                f"drafter {subject.folder.path}: d2t is {what}, as a buffer that nobody filled, with a reduced "
                "vocabulary",
                "the offsets of the tokens that lm_head was trained on",
                WITH_ITS_MAP,
            )


def d2t_order(subject: Subject) -> Iterator[Finding]:
    """SGLang serves rows in any order, but trainers that slice a teacher's logits by t2d assume an ascending one."""
    ids = target_ids(subject)
    if ids is not None and len(ids) > 1 and (np.diff(ids) < 0).any():
        yield info(
            f"drafter {subject.folder.path}: the rows of lm_head are not in the order of their target ids "
            f"({int((np.diff(ids) < 0).sum()):,} of {len(ids) - 1:,} steps go down)",
            "either a drafter of Model-Optimizer, whose rows go by frequency, or an ascending map",
            "look where the map comes from: one that does not belong to lm_head serves at acceptance length 1",
        )


def t2d(subject: Subject) -> Iterator[Finding]:
    """SGLang does not read t2d, but one that disagrees says that the map is not this drafter's."""
    folder, size = subject.folder, subject.config["vocab_size"]
    for name, tensor in _named(folder, "t2d").items():
        if tensor.shape != (size,) or tensor.dtype not in ("BOOL", "U8"):
            yield error(
                f"drafter {folder.path}: {name} is {tensor.dtype} {list(tensor.shape)}",
                f"booleans [{size}], one for each target token",
                "write it anew from d2t, or leave it out, since SGLang does not read it",
            )
    marked, ids = _sound_t2d(subject), target_ids(subject)
    if marked is not None and ids is not None and not np.array_equal(np.flatnonzero(marked), np.sort(ids)):
        yield error(
            f"drafter {folder.path}: d2t names {len(ids):,} target tokens and t2d {int(marked.sum()):,}, and they are "
            "not the same ones",
            "two maps of one vocabulary",
            WITH_ITS_MAP,
        )


def special_tokens(subject: Subject) -> Iterator[Finding]:
    """A special token without a row is never drafted: each costs the rest of the step where the target says it."""
    ids = target_ids(subject)
    if subject.target is None or ids is None:
        return
    if subject.target.specials is None:
        yield info(
            f"target {subject.target.path} does not name its special tokens",
            "tokenizer.json, or a tokenizer_config.json with added_tokens_decoder",
            "put the target's tokenizer.json there to have them looked for",
        )
        return
    lacking = missing(subject.target.specials, ids)
    for kind in dict.fromkeys(special.kind for special in lacking):
        tokens = [special.token for special in lacking if special.kind == kind]
        yield (info if kind == "media" else warning)(
            f"the draft vocabulary lacks {', '.join(tokens)}: {COSTS[kind]}",
            "the tokens that structure answers to be in it",
            "move the drafter to a vocabulary that has them (`python -m drafter remap`) and train on",
        )


def _rows(subject: Subject) -> int:
    rows: int = subject.config.get("draft_vocab_size") or subject.config["vocab_size"]
    return rows


def _named(folder: DrafterFolder, end: str) -> dict[str, TensorInfo]:
    """SGLang's Llama style takes any name with d2t in it, its MLA style the whole last part."""
    loose = folder.architecture == shapes.LLAMA
    return {
        name: tensor
        for name, tensor in folder.tensors.items()
        if (end in name if loose else f".{name}".endswith(f".{end}")) and not (loose and end == "t2d" and "d2t" in name)
    }


def _d2t(subject: Subject) -> Ids | None:
    """d2t as the file has it, int64 [U]; None where the drafter has none."""
    for name, tensor in _named(subject.folder, "d2t").items():
        file = subject.folder.path / tensor.file
        return np.array(map_tensors(file, [name])[name]).astype(np.int64)
    return None


def target_ids(subject: Subject) -> Ids | None:
    """The target id of each row as SGLang reads the map, int64 [U]."""
    d2t = _d2t(subject)
    return None if d2t is None else d2t + np.arange(len(d2t))


def _sound_t2d(subject: Subject) -> NDArray[np.bool_] | None:
    for name, tensor in _named(subject.folder, "t2d").items():
        if tensor.shape == (subject.config["vocab_size"],) and tensor.dtype in ("BOOL", "U8"):
            return np.array(map_tensors(subject.folder.path / tensor.file, [name])[name]).astype(np.bool_)
    return None


def _fits(ids: Ids, size: int) -> bool:
    return bool(ids.min() >= 0 and ids.max() < size and len(np.unique(ids)) == len(ids))
