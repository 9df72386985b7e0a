"""What must hold before a drafter is trained on: its vocabulary, its teacher, its remap, and that it sees what it saw.

A fine-tune that starts from the wrong map, layer or norm looks like one that learns: it relearns what it had.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafter.checkpoint.folder import DrafterFolder, open_folder
from drafter.checkpoint.manifest import read_manifest
from drafter.checkpoint.vocab import DraftVocab
from drafter.data.shards import ShardFolder
from drafter.training.agreement import compare, facts, read_served
from drafter.training.causes import diagnose
from drafter.training.documents import Documents
from drafter.training.errors import TrainingError
from drafter.training.model import Eagle3, load_drafter
from drafter.training.target import Target, best_tokens

TEACHER_DOCUMENTS = 24
TEACHER_SURE = 0.95  # share of the text that is the target's own choice above which nothing is wrong with it
TEACHER_SIZE = 0.05  # how far from 1 the size of a normed row may be
TEACHER_GAIN = 0.1  # what another reading of the final states must be better by
REMAP_DOCUMENTS = 24


@dataclass(frozen=True)
class Checked:
    """What was found before the first step; `probe` is None without a report, `remap` where there was none."""

    probe: dict[str, Any] | None
    remap: dict[str, Any] | None

    def sentence(self) -> str:
        """For the person who waits."""
        probe, remap = "not compared with serving (no --probe)", ""
        if self.probe:
            which = "the same" if self.probe["paired"] else "other"
            probe = (
                f"it walks at {self.probe['walked']:.3f} on the captured features, and was served at "
                f"{self.probe['served']:.3f} on {which} answers"
            )
        if self.remap:
            remap = f"; on kept tokens the first guess is right {self.remap['after']:.3f} of the time, as before"
        return f"before the first step: {probe}{remap}"


def check_vocab(vocab: DraftVocab, parent: Path, wanted: Path, target: Path) -> None:
    """Raises TrainingError where the drafter `parent` has another vocabulary than the data's, the file `wanted`."""
    other = DraftVocab.load(wanted)
    if vocab.hash != other.hash:
        shared = int(np.isin(vocab.target_ids, other.target_ids).sum())
        words = ["python", "-m", "drafter", "remap", parent, "--vocab", wanted, "--verifier", target]
        command = shlex.join([*map(str, words), "--init", "scaled", "--out", f"{str(parent).rstrip('/')}-remapped"])
        raise TrainingError(
            f"drafter {parent} has the vocabulary {vocab.hash[:16]} ({len(vocab):,} tokens), {wanted} is "
            f"{other.hash[:16]} ({len(other):,}, of which it has {shared:,}): trained so, every row of lm_head would "
            f"stand for another token. Move its rows first: {command}"
        )


def check_teacher(documents: Documents, target: Target) -> None:
    """Raises TrainingError where the shards' final states are not those after the final norm, beside their tokens.

    After an RMS norm a row over the norm's weight has the size 1. Beyond that, the states must choose the text no worse
    than when they are read as something else.
    """
    chosen = (documents.held + documents.train)[:TEACHER_DOCUMENTS]
    device = documents.ranks.device
    batches = [documents.batch([index]).to(device) for index in chosen]
    norm_H, head_VH = target.norm_H.float().to(device), target.head_VH.to(device)
    before = "before the final norm, where they must be after it"
    final_MH = torch.cat([batch.final_TH.float() for batch in batches])
    factors = [weight_H for weight_H in (norm_H, 1 + norm_H) if weight_H.all()]  # Gemma's norms multiply by 1 + weight
    off = [float((_size(final_MH / weight_H) - 1).abs().median()) for weight_H in factors]
    if "rms_norm_eps" in target.config and len(off) == 2 and min(off) > TEACHER_SIZE:
        raise TrainingError(
            f"{documents.shards.path}: the final hidden states over the final norm's weight have a size that is "
            f"{min(off):.2f} off the 1 that it makes: they are those {before}. Capture again."
        )
    if documents.agreement >= TEACHER_SURE:
        return
    readings: dict[str, Callable[[Tensor], Tensor]] = {
        "": lambda x: x,
        "after the final norm twice": lambda x: x / norm_H.where(norm_H.abs() > 1e-3, torch.inf),
        "one position early beside their tokens": lambda x: x.roll(1, 0),
        "one position late beside their tokens": lambda x: x.roll(-1, 0),
    }
    shares: dict[str, float] = {}
    for name, reading in readings.items():
        right = rows = 0
        for batch in batches:
            best_T = best_tokens(reading(batch.final_TH.float()), head_VH)[1:-2]  # no roll is felt within
            counted_T = batch.generated_T[2:-1]
            right += int((best_T == batch.tokens_T[2:-1])[counted_T].sum())
            rows += int(counted_T.sum())
        shares[name] = right / max(rows, 1)
    best = max(shares, key=lambda name: shares[name])
    if shares[best] > shares[""] + TEACHER_GAIN:
        raise TrainingError(
            f"{documents.shards.path}: the final hidden states choose {shares['']:.0%} of the answers' tokens, and "
            f"{shares[best]:.0%} when they are taken for states {best}: they are that. Capture again."
        )


def _size(x_MH: Tensor) -> Tensor:
    return x_MH.square().mean(-1).sqrt()


def remap_parent(folder: DrafterFolder, given: Path | None) -> DrafterFolder | None:
    """The drafter that `folder` was remapped from: the one given, or that of its manifest beside it."""
    if given:
        return open_folder(given)
    origin = (read_manifest(folder.path) or {}).get("origin") or {}
    if origin.get("kind") != "remap":
        return None
    beside = folder.path.absolute().parent / str(origin["parent"])
    found = open_folder(beside) if beside.is_dir() else None
    if found is None or origin.get("parent_sha256") not in (None, found.sha256):
        raise TrainingError(
            f"drafter {folder.path} was remapped from {origin['parent']}, which is not beside it: give that folder as "
            "--remapped-from, so that the kept rows can be checked against it."
        )
    return found


def check_remap(model: Eagle3, parent: Eagle3, documents: Documents) -> dict[str, Any]:
    """First-token accuracy on kept tokens, before and after a remap, over positions whose label was kept.

    The guess is the best of the kept rows in both, so that the two must be equal. `after_all`: with the new rows.
    Raises TrainingError where they are not.
    """
    kept = np.intersect1d(model.vocab.target_ids, parent.vocab.target_ids)
    if not len(kept):
        raise TrainingError("the remapped drafter kept no token of the one it came from: is that its parent?")
    rows = {each: torch.from_numpy(each.vocab.rows[kept]) for each in (parent, model)}
    kept_V = torch.zeros(len(model.embed_VH), dtype=torch.bool).index_fill(0, torch.from_numpy(kept), True)
    right, all_right, count = {parent: 0, model: 0}, 0, 0
    with torch.no_grad():
        for index in documents.held[:REMAP_DOCUMENTS]:
            batch = documents.batch([index])
            shift = batch.shift(0)
            query_T = shift.valid_T & kept_V[batch.best_T[shift.label_T]]
            if not query_T.any():
                continue
            layout = batch.layout(query_T)
            best_R = batch.best_T[shift.label_T[layout.query_R]]
            count += len(best_R)
            for each in (parent, model):
                hidden_RH, _ = each.first(batch.aux_TA.float(), shift.token_T, layout)
                logits_RU = each.logits(hidden_RH)
                guess_R = torch.from_numpy(kept)[logits_RU[:, rows[each]].argmax(-1)]
                right[each] += int((guess_R == best_R).sum())
            all_right += int((model.target_ids_U[logits_RU.argmax(-1)] == best_R).sum())
    before, after = (right[each] / max(count, 1) for each in (parent, model))
    if right[parent] != right[model]:
        raise TrainingError(
            f"on tokens that were kept the first guess was right {before:.3f} of the time before the remap and "
            f"{after:.3f} after it, over {count:,} positions: rows of lm_head were moved to other tokens, or another "
            "weight was changed. Remap again from the parent."
        )
    return {"kept": len(kept), "positions": count, "before": before, "after": after, "after_all": all_right / count}


def check_before(
    folder: DrafterFolder,
    model: Eagle3,
    documents: Documents,
    shards: ShardFolder,
    target: Target,
    probe: Path | None,
    remapped_from: Path | None,
) -> Checked:
    """Everything that can be known before the first step of training `model` on. Raises TrainingError."""
    parent = remap_parent(folder, remapped_from)
    before = load_drafter(parent.path, target.embed_VH) if parent else None
    remap = check_remap(model, before, documents) if before else None
    if probe is None:
        return Checked(None, remap)
    models, folders = {folder.sha256: model}, {folder.sha256: folder.path}
    if parent and before:
        models[parent.sha256], folders[parent.sha256] = before, parent.path
    served = read_served(probe, folders)
    walker = models[served.drafter_sha256]
    indices = documents.held + documents.train
    agreement = compare(walker, shards, indices, documents.max_length, served)
    if not agreement.holds:
        walked, told = agreement.lengths
        which = "the answers that it served" if agreement.paired else "other answers than it served"
        changed = " (the folder was changed since)" if served.changed else ""
        found = diagnose(walker, target, shards.manifest["layer_ids"], agreement)
        raise TrainingError(
            f"the drafter reached {told:.3f} when it was served ({probe}){changed}, and {walked:.3f} on the captured "
            f"features of {which} ({len(agreement.answers)}): training does not see what serving sees. "
            f"{found.sentence()}"
        )
    return Checked(facts(agreement), remap)
