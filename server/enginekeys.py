"""The two keys of an engine and the file that they travel in: a JSON object, which SGLang reads as YAML."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path


class KeyFileError(ValueError):
    """A key file that holds no key."""


@dataclass(frozen=True)
class EngineKeys:
    """What opens an engine's routes, and its admin routes. An empty key is none."""

    api: str
    admin: str

    def __repr__(self) -> str:
        return "EngineKeys(***)"

    @property
    def document(self) -> bytes:
        """The file's content."""
        return json.dumps({"api-key": self.api, "admin-api-key": self.admin}).encode()


def new_keys() -> EngineKeys:
    """Two keys that nobody has."""
    return EngineKeys(secrets.token_hex(24), secrets.token_hex(24))


def read_keys(file: Path) -> EngineKeys:
    """The keys of `{"api-key": …, "admin-api-key": …}`, of which one may be missing. Raises KeyFileError."""
    try:
        keys = json.loads(file.read_bytes())
    except OSError as error:
        raise KeyFileError(f"key file {file} cannot be read ({error.strerror}): give the engine's key file.") from None
    except ValueError:
        raise KeyFileError(
            f"key file {file} is not JSON: write one with `python -m server engine-keys {file}`, or give the one that "
            "the engine wrote."
        ) from None
    found = {name: keys.get(name) for name in ("api-key", "admin-api-key")} if isinstance(keys, dict) else {}
    if not any(isinstance(key, str) and key for key in found.values()):
        raise KeyFileError(f"key file {file} holds no api-key: give the one that the engine wrote.")
    api, admin = (key if isinstance(key, str) else "" for key in found.values())
    return EngineKeys(api, admin)


def authorization(key: str) -> dict[str, str]:
    """The header that carries `key`, none without one."""
    return {"authorization": f"Bearer {key}"} if key else {}


def write_new_keys(file: Path) -> None:
    """Make a file of new keys that its owner alone can read. Raises KeyFileError where there is one already."""
    try:
        file.touch(mode=0o600, exist_ok=False)
        file.write_bytes(new_keys().document)
    except FileExistsError:
        raise KeyFileError(f"{file} is there already: keys in use are not overwritten; remove it first.") from None
    except OSError as error:
        raise KeyFileError(f"{file} cannot be written ({error.strerror}).") from None
