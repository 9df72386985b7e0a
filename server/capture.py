"""An engine that captures: its folder before the start, and after it the proof that the plugin runs as planned."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from drafter.data.spool import HANDSHAKE, Handshake, SpoolError, clear, inputs_of, read_handshake, spool_of
from server.launch import CapturePlan


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
