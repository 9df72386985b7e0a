"""An engine that captures: which layers and where to, its flags, and the proof after its start that the plugin runs."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from drafter.data.spool import HANDSHAKE, Handshake, SpoolError, clear, inputs_of, read_handshake, spool_of
from server.config import Profile
from server.drafters import ActiveDrafter, LaunchError

# Rows from a prefix cache are never computed, and a replayed graph does not pass the plugin: neither would be written.
CAPTURE_FLAGS: tuple[tuple[str, object], ...] = (
    ("--disable-radix-cache", True),
    ("--cuda-graph-backend-prefill", "disabled"),
)
CAPTURE_ALGORITHM = "EAGLE3"  # it names the convention only: SGLang resets it and loads no drafter


@dataclass(frozen=True)
class CapturePlan:
    """What an engine is to write and where. `convention` is None where the drafter's own ids are taken."""

    folder: Path
    layer_ids: list[int]
    convention: str | None


def plan_capture(profile: Profile, drafter: ActiveDrafter, folder: Path) -> CapturePlan:
    """Which layers to write: the profile's `[capture]` without a drafter, a drafter's own with one.

    Raises LaunchError where there are none.
    """
    folder = folder.expanduser().absolute()
    if drafter.algorithm == "NONE":
        if profile.capture is None:
            raise LaunchError(
                f"profile {profile.source} has no [capture] table: add one with layer_ids (three layers, low, middle "
                'and high) and convention ("output_of_layer" for a Llama target).'
            )
        return CapturePlan(folder, profile.capture.layer_ids, profile.capture.convention)
    if drafter.folder is None or drafter.folder.layer_ids is None:
        raise LaunchError(
            f"drafter {drafter.name} names no layers that could be captured: use an EAGLE3 drafter on this disk whose "
            "eagle_config has eagle_aux_hidden_state_layer_ids, or none."
        )
    override = drafter.table.override_layer_ids if drafter.table else None
    return CapturePlan(folder, override or drafter.folder.layer_ids, None)


def capture_flags(capture: CapturePlan) -> list[tuple[str, object]]:
    """What makes SGLang hand its hidden states to the plugin."""
    if capture.convention is None:
        return list(CAPTURE_FLAGS)
    return [
        *CAPTURE_FLAGS,
        ("--speculative-algorithm", CAPTURE_ALGORITHM),
        ("--enable-return-aux-hidden-states", True),
        ("--return-aux-hidden-state-layer-ids", capture.layer_ids),
    ]


def prepare_folder(folder: Path) -> None:
    """Make the folder and clear it of an earlier engine. Raises SpoolError where another engine uses it."""
    other: Handshake | None = None
    with contextlib.suppress(SpoolError):
        other = read_handshake(folder)
    if other:
        raise SpoolError(
            f"an engine (process {other.pid}) captures into {folder} already: stop it, or choose another folder."
        )
    try:
        spool_of(folder).mkdir(parents=True, exist_ok=True)
        (folder / HANDSHAKE).unlink(missing_ok=True)
        clear(folder)
    except OSError as error:
        raise SpoolError(f"the capture folder {folder} cannot be written ({error.strerror}).") from None


def check_handshake(plan: CapturePlan, processes: Collection[int]) -> None:
    """Raises SpoolError unless one of these processes captures what was planned.

    SGLang swallows what goes wrong in a plugin, so an engine without it would answer and write nothing.
    """
    try:
        found = read_handshake(plan.folder)
    except SpoolError:
        raise SpoolError(
            "the engine runs, but without Eyas's capture plugin; it was stopped. Install eyas anew in the engine's "
            "environment (`make install`), and let SGLANG_PLUGINS, where it is set, name eyas_capture."
        ) from None
    if found.pid not in processes:
        raise SpoolError(
            f"{plan.folder / HANDSHAKE} was written by process {found.pid}, which is not of this engine: "
            "choose a folder that no other engine uses."
        )
    wanted = inputs_of(plan.layer_ids, plan.convention or found.convention)
    if found.layer_ids != plan.layer_ids or found.inputs_to != wanted:
        raise SpoolError(
            f"layer_ids {plan.layer_ids} taken as {plan.convention or found.convention} are the inputs to layers "
            f"{wanted}, but this engine captures those to {found.inputs_to}: correct layer_ids or convention in "
            "[capture]."
        )
