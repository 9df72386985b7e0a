"""An engine's process: started under its guard, and ended with everything that it started."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from server import guard
from server.enginetable import EngineTable
from server.keep import KeptProcess

EngineProcess = subprocess.Popen[bytes] | KeptProcess


def start_guarded(
    argv: Sequence[str], environment: Mapping[str, str], log_file: Path, engine: EngineTable, *, outlives: bool
) -> subprocess.Popen[bytes]:
    """The guard that runs `argv` in the log's folder; it ends its group with this process unless it `outlives` it."""
    log_to = [str(log_file), str(engine.log_max_bytes), str(engine.log_files)]
    with log_file.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, *(["--keep"] if outlives else []), *log_to, *argv],
            stdin=subprocess.DEVNULL if outlives else subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=log_file.parent,
            start_new_session=True,
        )


def end_process(process: EngineProcess) -> None:
    """End the whole group, by force where the guard's grace was not enough. Blocks."""
    if process.stdin is None:  # it was to outlive us
        process.terminate()
    else:
        with contextlib.suppress(OSError):
            process.stdin.close()  # the guard ends the group
    try:
        process.wait(guard.GRACE_S + 5)
    except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.wait()


def write_private(path: Path, data: bytes) -> None:
    """Write a new file that its owner alone can read; an older one of that name goes. Raises OSError."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
