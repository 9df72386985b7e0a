"""Which drafter an engine runs: found by the word that names it, and checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from drafter import registry
from drafter.checkpoint.findings import Finding
from drafter.checkpoint.folder import DrafterFolder, open_folder
from drafter.checkpoint.preflight import check_names, preflight, refuse
from drafter.checkpoint.subject import Deployment, Subject, read_target
from server import probe
from server.config import DrafterTable, Profile, resolve_path

Algorithm = Literal["NONE", "EAGLE3", "NGRAM"]


class LaunchError(ValueError):
    """A profile and a drafter that cannot be started together."""


@dataclass(frozen=True)
class ActiveDrafter:
    """What speculates. Steps, topk and draft tokens are those asked for; None where the engine decides."""

    name: str
    algorithm: Algorithm
    path: str | None = None
    sha256: str | None = None
    num_steps: int | None = None
    topk: int | None = None
    draft_tokens: int | None = None
    table: DrafterTable | None = None
    folder: DrafterFolder | None = None


def resolve_drafter(
    profile: Profile,
    name: str | None = None,
    *,
    num_steps: int | None = None,
    topk: int | None = None,
    draft_tokens: int | None = None,
    here: bool = True,
) -> ActiveDrafter:
    """Find a drafter: a reserved name, then `[drafters.NAME]` of the profile, then the registry, then a folder.

    `num_steps`, `topk` and `draft_tokens` override the profile's for an EAGLE3 drafter. A profile's `path` may be a
    registered name. The folder is opened, and checked by `check_drafter`; with `here` false it may be missing, as for a
    plan. Raises LaunchError or DrafterError.
    """
    name = profile.default_drafter if name is None else name
    if name == "none":
        return ActiveDrafter("none", "NONE")
    table = profile.drafters.get(name)
    if name == "ngram" and table is None:
        table = DrafterTable(algorithm="NGRAM")
    base = profile.source.parent
    if table is None:
        registered = registry.known()
        folder_path = registered.get(name) or folder_named(name)
        if folder_path is None:
            names = ", ".join(dict.fromkeys(["none", "ngram", *profile.drafters, *registered]))
            raise LaunchError(
                f"drafter {name!r} is neither known by name (here are {names}) nor a folder: check the spelling."
            )
        folder_path = folder_path.resolve()
        table, base, name = DrafterTable(path=str(folder_path)), Path("/"), folder_path.name
    if table.algorithm == "NGRAM":
        return ActiveDrafter(name, "NGRAM", draft_tokens=table.ngram.draft_tokens, table=table)

    assert table.path
    path = resolve_path(table.path, base)
    if not is_local(path) and (registered_path := registry.known().get(path)):
        path = str(registered_path.resolve())
    if here and not is_local(path) and "/" not in path:
        raise LaunchError(
            f"drafter {name}: {path!r} is neither a registered drafter nor a folder beside the profile: make it "
            "(`python -m drafter remap` or `train`, into the drafters folder of EYAS_HOME), or correct its path."
        )
    folder = open_folder(Path(path)) if is_local(path) and (here or os.path.lexists(path)) else None
    asked = profile.speculation
    chosen_topk = topk or table.topk or asked.topk
    chosen_steps = num_steps or table.num_steps or asked.num_steps
    chosen_tokens = draft_tokens or table.draft_tokens or (asked.draft_tokens if chosen_topk > 1 else None)
    if chosen_topk == 1:
        if chosen_tokens not in (None, chosen_steps + 1):
            raise LaunchError(
                f"drafter {name}: a chain of {chosen_steps} steps verifies {chosen_steps + 1} tokens, "
                f"not {chosen_tokens}: leave draft_tokens out."
            )
        chosen_tokens = chosen_steps + 1
    elif chosen_tokens is None:
        raise LaunchError(
            f"drafter {name}: a tree (topk {chosen_topk}) needs draft_tokens, the tokens verified in one step."
        )
    return ActiveDrafter(
        name, "EAGLE3", path, folder.sha256 if folder else None, chosen_steps, chosen_topk, chosen_tokens, table, folder
    )


def check_drafter(profile: Profile, drafter: ActiveDrafter, forced: Collection[str] = ()) -> list[Finding]:
    """The preflight of a drafter on this disk, for this profile; a target that is not on this disk is left out.

    `forced` names checks whose errors are passed over, the probe among them, which comes later. Raises DrafterError for
    any other error, ValueError for a name that is no check's.
    """
    check_names([name for name in forced if name != probe.NAME])
    if drafter.folder is None:
        return []
    assert drafter.table
    engine, model = profile.engine, Path(profile.model_path)
    deployment = Deployment(
        name=drafter.name,
        device=engine.device,
        context_length=engine.context_length,
        layer_ids=drafter.table.layer_ids,
        sha256=drafter.table.sha256,
        attention_backend=engine.attention_backend or engine.decode_attention_backend,
        draft_attention_backend=drafter.table.attention_backend,
        quantization=engine.quantization,
        draft_quantization=drafter.table.quantization,
        trust_remote_code=profile.target.trust_remote_code,
        extra_args=tuple(engine.extra_args),
    )
    target = read_target(model) if is_local(profile.model_path) and (model / "config.json").is_file() else None
    findings = preflight(Subject(drafter.folder, target, deployment), forced)
    refuse(findings, forced)
    return findings


def folder_named(name: str) -> Path | None:
    """The folder that a word of the command line means, if it means one."""
    try:
        path = Path(name).expanduser()
        return path if path.is_dir() else None
    except (OSError, RuntimeError):  # too long for a name, in a folder that is not ours, a home that is nobody's
        return None


def is_local(path: str) -> bool:
    return Path(path).is_absolute()
