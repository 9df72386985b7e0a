"""Keeps an engine from outliving the process that started it.

Run with a pipe from the starter as standard input and the engine's command as arguments. When the pipe closes,
however the starter ended, the engine's whole process group is told to stop, then killed. Standard library only.
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


def main() -> int:
    # A terminal's Ctrl-C is the starter's business: it closes the pipe when it is done. A handler that does nothing,
    # not SIG_IGN, which the engine would inherit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    engine = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_guard, restore_signals=True
    )
    group = engine.pid

    def watch_starter() -> None:
        while os.read(0, 1024):
            pass
        end_group(group)

    threading.Thread(target=watch_starter, daemon=True).start()
    code = engine.wait()
    end_group(group)  # a scheduler that no longer answers must not stay behind
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
