"""Engines that outlive their gateway (`on_gateway_exit = keep`): what is written down, and how one is known again.

A kept engine is the process of the same pid and start time. It is taken over where the next gateway would start the
same: the hash of its arguments, environment and SGLang's version. Its keys stay in its run folder's 0600 file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

STOP_S = 20.0


@dataclass(frozen=True)
class Kept:
    """One kept engine: its guard's pid and start time (seconds since the epoch), and where to find it."""

    pid: int
    started: float
    arguments_sha256: str
    port: int
    run_dir: str


class KeptProcess:
    """A process that this one did not start: as much of subprocess.Popen as an Engine needs."""

    stdin = None

    def __init__(self, kept: Kept) -> None:
        self.pid = kept.pid
        self._kept = kept

    def poll(self) -> int | None:
        """None while it runs, else -1: nobody but its parent learns the exit code."""
        return None if runs(self._kept) else -1

    def terminate(self) -> None:
        """Tell the guard to end its engine."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Raises psutil.TimeoutExpired."""
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(self.pid).wait(timeout)
        return -1


def arguments_sha256(argv: Sequence[str], environment: Mapping[str, str], version: str) -> str:
    """The hash of what an engine is started with, its port and folder apart."""
    return hashlib.sha256(json.dumps([list(argv[1:]), dict(environment), version], sort_keys=True).encode()).hexdigest()


def record_file(runs_folder: Path, profile: Path, arm: str) -> Path:
    """Where the kept engine of this profile's arm is written down."""
    named = hashlib.sha256(f"{profile}\n{arm}".encode()).hexdigest()
    return runs_folder / "kept" / f"{named[:16]}.json"


def write_record(file: Path, kept: Kept) -> None:
    """Write it down, whole or not at all. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(kept)))
    temporary.replace(file)


def read_record(file: Path) -> Kept | None:
    """The engine that is written down and still runs, or None; then the record is removed."""
    try:
        kept = Kept(**json.loads(file.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        kept = None
    if kept is not None and runs(kept):
        return kept
    file.unlink(missing_ok=True)
    return None


def started_at(pid: int) -> float:
    """The process's start time. Raises psutil.NoSuchProcess."""
    return psutil.Process(pid).create_time()


def runs(kept: Kept) -> bool:
    """Whether the very process runs: a pid alone may have been given to another since."""
    try:
        process = psutil.Process(kept.pid)
        return abs(process.create_time() - kept.started) < 0.05 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
