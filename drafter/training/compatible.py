"""Whether shards, target and drafter belong together. A mismatch trains without an error and serves at length 1.00."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drafter.checkpoint import shapes
from drafter.checkpoint.fit import rope_shown, rotary
from drafter.checkpoint.manifest import read_manifest
from drafter.checkpoint.preflight import read_folder
from drafter.data.shards import ShardFolder, check_target
from drafter.training.errors import TrainingError
from drafter.training.target import Target

HASHES = ("config_sha256", "tokenizer_sha256", "lm_head_sha256")


def check_shards(shards: ShardFolder, target: Target) -> None:
    """Raises ShardError where the shards come from another target, TrainingError where their states do not fit it."""
    check_target(shards.manifest, target.path)
    hidden = target.embed_VH.shape[1]
    if shards.manifest["hidden_size"] != hidden:
        raise TrainingError(
            f"{shards.path} has hidden size {shards.manifest['hidden_size']}, target {target.path} has {hidden}: give "
            "the target that the shards came from."
        )
    if shards.manifest["final_hidden"] != "after_norm":
        raise TrainingError(
            f"{shards.path} holds final hidden states {shards.manifest['final_hidden']!r}, expected 'after_norm': the "
            "loss takes lm_head of them as they are. Capture again."
        )


def check_drafter(folder: Path, shards: ShardFolder) -> None:
    """Raises TrainingError where the drafter in `folder` was made for another target or other layers than the shards'.

    Every difference is named. A foreign folder (without eyas.json) has only its layer ids and its sizes to be judged
    by; a hash that a manifest lacks is not compared.
    """
    manifest, read = read_manifest(folder), read_folder(folder)
    found: dict[str, Any] = {"layer_ids": read.layer_ids, "hidden_size": shapes.target_hidden(read.config)}
    if manifest is not None:
        found |= {key: manifest["target"][key] for key in HASHES if key in manifest["target"]} | manifest["capture"]
    wanted = {key: shards.manifest["target"][key] if key in HASHES else shards.manifest[key] for key in found}
    other = [key for key in found if found[key] != wanted[key]]
    if other:
        said = "; ".join(f"{key} {found[key]}, the shards in {shards.path} have {wanted[key]}" for key in other)
        raise TrainingError(
            f"drafter {folder} has {said}: capture shards from the drafter's own target with its layer ids, or name "
            "another drafter."
        )


def differences(config: dict[str, Any], target: Target) -> list[str]:
    """Where a drafter's config is not its target's, a sentence each: it keeps its own, as it was trained."""
    said = [
        f"{key} {config.get(key)}, the target's is {target.config[key]}"
        for key in ("rms_norm_eps", "max_position_embeddings", "bos_token_id", "eos_token_id")
        if target.config.get(key) is not None and config.get(key) != target.config[key]
    ]
    ours, theirs = rotary(config), rotary(target.config)
    if ours != theirs:
        said.insert(0, f"rope {rope_shown(ours)}, the target's is {rope_shown(theirs)}")
    return said
