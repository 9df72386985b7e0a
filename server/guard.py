"""Keeps an engine from outliving the process that started it.

Run with a pipe from the starter as standard input and the engine's command as arguments. When the pipe closes,
however the starter ended, the engine's whole process group is told to stop, then killed. With --keep it is SIGTERM that
says so, and the engine outlives its starter. What the engine prints goes to --log FILE BYTES FILES, which is turned
over at that size. Standard library only.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

GRACE_S = 6.0
PR_SET_PDEATHSIG = 1


def signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def runs(group: int) -> bool:
    """Whether a process of the group runs. One that ended and that nobody has collected yet does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def end_group(group: int) -> None:
    signal_group(group, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and runs(group):
        time.sleep(0.1)
    signal_group(group, signal.SIGKILL)


def die_with_guard() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def turn_over(log: Path, files: int) -> None:
    """log becomes log.1, log.1 becomes log.2 and so on; the oldest goes."""
    for at in range(files - 1, 0, -1):
        older = log if at == 1 else log.with_name(f"{log.name}.{at - 1}")
        if older.exists():
            older.replace(log.with_name(f"{log.name}.{at}"))
    if files == 1:
        log.unlink(missing_ok=True)


def open_log(log: Path) -> int:
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def write_log(source: int, log: Path, limit: int, files: int) -> None:
    """Copy what comes out of `source` to the log until its end. A disk that is full loses lines, not the engine."""
    out = open_log(log)
    size = os.fstat(out).st_size
    line_ended = True
    while block := os.read(source, 1 << 16):
        with contextlib.suppress(OSError):
            if size > limit and line_ended:
                turn_over(log, files)
                os.close(out)
                out, size = open_log(log), 0
            line_ended = block.endswith(b"\n")
            size += os.write(out, block)


def main() -> int:
    arguments = sys.argv[1:]
    keep = arguments[0] == "--keep"
    log, limit, files, *command = arguments[keep:]
    told = threading.Event()
    # A terminal's Ctrl-C is the starter's business: it closes the pipe when it is done. A handler that does nothing,
    # not SIG_IGN, which the engine would inherit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    if keep:
        signal.signal(signal.SIGTERM, lambda *_: told.set())
    engine = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_guard,
        restore_signals=True,
    )
    group = engine.pid
    assert engine.stdout
    writing = (engine.stdout.fileno(), Path(log), int(limit), int(files))
    writer = threading.Thread(target=write_log, args=writing, daemon=True)
    writer.start()

    def watch_starter() -> None:
        while os.read(0, 1024):
            pass
        end_group(group)

    def watch_told() -> None:
        told.wait()
        end_group(group)

    threading.Thread(target=watch_told if keep else watch_starter, daemon=True).start()
    code = engine.wait()
    end_group(group)  # a scheduler that no longer answers must not stay behind
    writer.join(1.0)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
