"""A training run's state on disk: one safetensors file of weights and AdamW moments, its counters as JSON inside.

The order of documents is a function of (seed, epoch) and nothing else is drawn at random, so this is all there is to a
run: going on from it gives the same weights, bit for bit, as never having stopped.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from drafter.training.errors import TrainingError
from drafter.training.ranks import like, whole


@dataclass
class Progress:
    """Where a run stands. `seconds` is time spent in training so far, over all its starts."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float = 0.0
    best_step: int = 0
    evaluations_since_best: int = 0
    evaluated: int = -1  # the step of the last evaluation


def save_tensors(file: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Written beside, synced and renamed: the file is the old one or the new one, whole. Raises TrainingError."""
    beside = file.with_name(file.name + ".tmp")
    try:
        save_file(
            {name: x.detach().contiguous() for name, x in tensors.items()},
            beside,
            metadata={"facts": json.dumps(facts)},
        )
        with beside.open("rb") as stream:
            os.fsync(stream.fileno())
        beside.replace(file)
    except (SafetensorError, OSError) as error:
        beside.unlink(missing_ok=True)
        raise TrainingError(
            f"{file} could not be written ({error}): make room or mend the disk, and run the same command again; it "
            "goes on from the checkpoint before."
        ) from None


def load_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_tensors` wrote. Raises TrainingError where it is broken or not there."""
    try:
        with safe_open(file, framework="pt") as found:
            facts: dict[str, Any] = json.loads(found.metadata()["facts"])
            return {name: found.get_tensor(name) for name in found.keys()}, facts  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _broken(file, error) from None


def check_tensors(file: Path) -> None:
    """Raises TrainingError where `load_tensors` would find no whole file. Nothing but its header is read."""
    try:
        with safe_open(file, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise _broken(file, error) from None


def _broken(file: Path, error: Exception) -> TrainingError:
    return TrainingError(
        f"{file} is no checkpoint ({error}): put it back, or remove {file.parent} to start the run anew."
    )


def save_run(
    file: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    identity: dict[str, Any],
    write: bool = True,
) -> None:
    """`identity` is what must be the same for the run to go on. Of shards all ranks call this, one to `write`."""
    tensors = {name: whole(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"adamw.{key}.{name}"] = whole(value)
    if write:
        save_tensors(file, tensors, {"progress": asdict(progress), "identity": identity})


def load_run(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, identity: dict[str, Any]) -> Progress:
    """Put a run's state into `model` and `optimizer`. Raises TrainingError where the run was another one."""
    tensors, facts = load_tensors(file)
    for key in identity.keys() | facts["identity"].keys():
        if identity.get(key) != facts["identity"].get(key):
            raise TrainingError(
                f"{file.parent} holds a run with {key} {facts['identity'].get(key)!r}, this one has "
                f"{identity.get(key)!r}: go on with the same settings, or name another --out."
            )
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(like(tensors[name], parameter))
        names = {key: f"adamw.{key}.{name}" for key in ("step", "exp_avg", "exp_avg_sq")}
        state = {
            key: tensors[full].to(parameter.device) if key == "step" else like(tensors[full], parameter)
            for key, full in names.items()
            if full in tensors
        }
        if state:
            optimizer.state[parameter] = state
    return Progress(**facts["progress"])
