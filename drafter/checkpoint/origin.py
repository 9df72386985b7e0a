"""Checks against eyas.json: whether a drafter is still what its maker wrote. A foreign folder has none to ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drafter.checkpoint.findings import Finding, error
from drafter.checkpoint.folder import DrafterError
from drafter.checkpoint.manifest import MANIFEST, read_manifest
from drafter.checkpoint.mapping import target_ids
from drafter.checkpoint.subject import Subject
from drafter.checkpoint.vocab import DraftVocab


def manifest(subject: Subject) -> Iterator[Finding]:
    """The manifest can be read, and the files are those that it names by hash."""
    folder = subject.folder
    try:
        found = read_manifest(folder.path)
    except DrafterError as refused:
        yield error(f"{refused!s:.300}".rstrip("."), "a manifest that can be read", "copy it again, or remove it")
        return
    except OSError as refused:
        yield error(
            f"{folder.path / MANIFEST} cannot be read ({refused.strerror})",
            "a plain file, or none",
            "copy it again, or remove it",
        )
        return
    named = (found or {}).get("sha256")
    for name, sha256 in (named if isinstance(named, dict) else {}).items():
        have = folder.file_sha256.get(name)
        if have != sha256:
            yield error(
                f"{folder.path / str(name)} has sha256 {have}, {MANIFEST} names {sha256!s:.64}: it was changed since",
                "the files that its maker wrote",
                f"copy the drafter again, or remove {MANIFEST} if you changed it and mean it",
            )


def vocab_hash(subject: Subject) -> Iterator[Finding]:
    """The map's tokens are those that the maker wrote, whatever else was changed since."""
    named, ids = manifest_of(subject).get("vocab_hash"), target_ids(subject)
    if named is None or ids is None:
        return
    vocab, _ = DraftVocab.from_ids(ids, subject.config["vocab_size"])
    if vocab.hash != named:
        yield error(
            f"drafter {subject.folder.path} has a vocabulary with the hash {vocab.hash[:16]}, {MANIFEST} names "
            f"{named!s:.16}",
            "the vocabulary that lm_head was trained under",
            "give lm_head its own map back, or move its rows (`python -m drafter remap --rows-vocab`)",
        )


def manifest_of(subject: Subject) -> dict[str, Any]:
    """The manifest; empty where there is none, or none that can be read, which the check `manifest` tells."""
    try:
        return read_manifest(subject.folder.path) or {}
    except (DrafterError, OSError):
        return {}
