"""Every environment variable that Eyas reads, in one place. None of them changes a result."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Settings:
    """Where state lives and who may come in.

    home: root of `models/`, `drafters/`, `runs/`, `rollout/`.
    keys_file, admin_key_file: the gateway's own keys, where it has any.
    capture_dir: set on an engine process alone, by `python -m server engine --capture`.
    log: one of debug, info, warning, error.
    notify_socket: set by systemd for a unit of Type=notify.
    local_world: set by torchrun, the processes that it started on this machine.
    """

    home: Path
    keys_file: Path | None
    admin_key_file: Path | None
    capture_dir: Path | None
    log: str
    notify_socket: str | None = None
    local_world: int = 1

    @property
    def models(self) -> Path:
        return self.home / "models"

    @property
    def drafters(self) -> Path:
        return self.home / "drafters"

    @property
    def runs(self) -> Path:
        return self.home / "runs"


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from `environ` (default: the process's own).

    Raises ValueError on a value that cannot be meant.
    """
    env = os.environ if environ is None else environ

    def path(name: str) -> Path | None:
        return Path(env[name]).expanduser() if env.get(name) else None

    data_home = path("XDG_DATA_HOME") or Path(env.get("HOME") or "~").expanduser() / ".local" / "share"
    log = env.get("EYAS_LOG", "info").lower()
    if log not in LOG_LEVELS:
        raise ValueError(
            f"EYAS_LOG is {log!r}, expected one of {', '.join(LOG_LEVELS)}: unset it or choose one of these."
        )
    return Settings(
        home=path("EYAS_HOME") or data_home / "eyas",
        keys_file=path("EYAS_KEYS_FILE"),
        admin_key_file=path("EYAS_ADMIN_KEY_FILE"),
        capture_dir=path("EYAS_CAPTURE_DIR"),
        log=log,
        notify_socket=env.get("NOTIFY_SOCKET") or None,
        local_world=int(env.get("LOCAL_WORLD_SIZE") or 1),
    )
