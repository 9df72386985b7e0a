"""Write into a profile which drafter it means: its folder, the hub's revision, the hash of its files, its layers.

Lines of the drafter's own table are changed and nothing else, so that comments stay; what the text then says is read
back and compared before the file is replaced, whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter.report import write_text
from server.config import Profile
from server.drafters import LaunchError, check_drafter, resolve_drafter

# A download of huggingface_hub lies in …/snapshots/COMMIT.
REVISION = re.compile(r"^[0-9a-f]{40}$")


@dataclass(frozen=True)
class Pin:
    """What was written into [drafters.NAME] of a profile."""

    name: str
    values: dict[str, Any]

    def __str__(self) -> str:
        return f"pinned {self.name}: " + ", ".join(f"{key} = {_toml(value)}" for key, value in self.values.items())


def pin(profile: Profile, asked: str, forced: Collection[str] = ()) -> Pin:
    """Pin a drafter of the profile: `NAME` to the folder that its path already names, `NAME=DIR` to another.

    The folder passes the preflight first (`forced`: checks to pass over). Raises LaunchError or DrafterError.
    """
    name, given, folder_named = asked.partition("=")
    table = profile.drafters.get(name)
    if table is None or table.algorithm != "EAGLE3":
        names = ", ".join(name for name, each in profile.drafters.items() if each.algorithm == "EAGLE3")
        raise LaunchError(f"--pin {name}: profile {profile.source} has no EAGLE3 drafter of that name, only {names}.")
    values: dict[str, Any] = {}
    if given:
        folder = Path(folder_named).expanduser().absolute()
        values["path"] = str(folder)
        if folder.parent.name == "snapshots" and REVISION.match(folder.name):
            values["revision"] = folder.name
    found = table.model_copy(update={**values, "sha256": None})
    tried = profile.model_copy(update={"drafters": {**profile.drafters, name: found}})
    drafter = resolve_drafter(tried, name)
    if drafter.folder is None:
        raise LaunchError(
            f"--pin {name}: {drafter.path} is not on this disk: download it, and say where: --pin {name}=DIR."
        )
    check_drafter(tried, drafter, forced)
    values["sha256"] = drafter.folder.sha256
    if table.layer_ids is None and drafter.folder.layer_ids is not None:
        values["layer_ids"] = drafter.folder.layer_ids
    _write(profile, name, values)
    return Pin(name, values)


def _write(profile: Profile, name: str, values: dict[str, Any]) -> None:
    raw = profile.source.read_bytes()
    if hashlib.sha256(raw).hexdigest() != profile.sha256:
        raise LaunchError(f"profile {profile.source} was changed meanwhile: run the command again.")
    text = raw.decode("utf-8")
    edited = with_values(text, f"drafters.{name}", values)
    wanted = tomllib.loads(text)
    wanted["drafters"][name].update(values)
    if edited is None or _read(edited) != wanted:
        lines = "; ".join(f"{key} = {_toml(value)}" for key, value in values.items())
        raise LaunchError(
            f"profile {profile.source} does not write drafter {name} as a table [drafters.{name}] with a key on a "
            f"line, so write it yourself: {lines}."
        )
    mode = profile.source.stat().st_mode & 0o777
    write_text(profile.source, edited)
    profile.source.chmod(mode)


def with_values(text: str, table: str, values: dict[str, Any]) -> str | None:
    """TOML text with the keys of one `[table]` set: in their own lines where they have one, else in new lines after its
    path. None where there is no such table."""
    lines = text.splitlines(keepends=True)
    header = re.compile(rf"^\s*\[\s*{re.escape(table)}\s*\]")
    start = next((at for at, line in enumerate(lines) if header.match(line)), None)
    if start is None:
        return None
    end = next((at for at in range(start + 1, len(lines)) if re.match(r"^\s*\[", lines[at])), len(lines))
    after = start + 1
    for key, value in values.items():
        own = re.compile(rf"^(\s*){key}\s*=")
        at = next((at for at in range(start + 1, end) if own.match(lines[at])), None)
        if at is None:
            lines.insert(after, f"{key} = {_toml(value)}\n")
            end += 1
            after += 1
        else:
            lines[at] = f"{key} = {_toml(value)}{_comment(lines[at])}\n"
            after = max(after, at + 1)
    return "".join(lines)


def _comment(line: str) -> str:
    """The comment at the end of a `key = value` line, with the space before it."""
    value = line.split("=", 1)[1]
    found = re.match(r"""\s*(?:"(?:[^"\\]|\\.)*"|'[^']*'|[^#"'])*?(\s*#.*)?$""", value.rstrip("\r\n"))
    return (found.group(1) or "") if found else ""


def _toml(value: Any) -> str:
    """A string or a list of numbers, as TOML; JSON's spelling of both is TOML's."""
    return json.dumps(value, ensure_ascii=False)


def _read(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
