"""The few keys of a profile that a preflight needs, by tomllib alone. `server/config.py` owns the whole schema."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from drafter.checkpoint.folder import DrafterError
from drafter.checkpoint.subject import Deployment


def read_deployment(profile: Path, folder: Path) -> Deployment:
    """How a profile would serve the drafter in `folder`, by the table of [drafters] whose path is that folder, or
    names it as the registry does.

    Raises DrafterError.
    """
    try:
        tables: dict[str, Any] = tomllib.loads(profile.read_bytes().decode("utf-8"))
        engine = tables["engine"]
        name, table = _table_of(tables.get("drafters", {}), profile.parent, folder)
        layer_ids = table.get("layer_ids")
        return Deployment(
            name=name,
            device=str(engine["device"]),
            context_length=int(engine["context_length"]),
            layer_ids=None if layer_ids is None else [int(layer) for layer in layer_ids],
            sha256=_text(table, "sha256"),
            attention_backend=_text(engine, "attention_backend") or _text(engine, "decode_attention_backend"),
            draft_attention_backend=_text(table, "attention_backend"),
            quantization=_text(engine, "quantization"),
            draft_quantization=_text(table, "quantization"),
            trust_remote_code=tables["target"].get("trust_remote_code") is True,
            extra_args=tuple(str(word) for word in engine.get("extra_args", [])),
        )
    except OSError as error:
        raise DrafterError(f"profile {profile} cannot be read ({error.strerror}): name a TOML profile.") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DrafterError(
            f"profile {profile} is not one ({type(error).__name__}: {error!s:.100}): `python -m server plan --profile "
            f"{profile}` says more."
        ) from None


def _table_of(drafters: dict[str, dict[str, Any]], base: Path, folder: Path) -> tuple[str, dict[str, Any]]:
    for name, table in drafters.items():
        path = table.get("path")
        if not isinstance(path, str):
            continue
        if path == folder.resolve().name or (base / Path(path).expanduser()).resolve() == folder.resolve():
            return name, table
    return folder.name, {}


def _text(table: dict[str, Any], key: str) -> str | None:
    return None if table.get(key) is None else str(table[key])
