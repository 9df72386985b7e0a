"""One engine without a gateway: until Ctrl-C, or for as long as one command runs beside it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from server.display import StageDisplay
from server.engine import Engine, EngineError
from server.notify import notify
from server.serve import probe_text, show_findings, speculation_text

POLL_S = 0.2
COMMAND_GRACE_S = 60.0  # for a command that has been told to end: it may be writing its state


def run_engine(engine: Engine, command: Sequence[str]) -> int:
    """Start the engine, run `command` (where there is one) once it is ready, and stop the engine.

    `{url}` and `{key_file}` in the command's words are the engine's. Returns the command's exit code, or 0.
    Raises EngineError where the engine does not start or ends by itself, KeyboardInterrupt on Ctrl-C.
    """
    ended = threading.Event()
    engine.on_end = lambda _: ended.set()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    show_findings(engine)
    try:
        with StageDisplay() as display:
            engine.start(display)
        notify("READY=1", "STATUS=ready")
        what = speculation_text(engine.drafter)
        if engine.capture:
            what = f"no drafter; layers {engine.capture.layer_ids} go to {engine.capture.folder}"
        for line in probe_text(engine):
            print(f"eyas: probe: {line}", file=sys.stderr, flush=True)
        if command:
            print(f"eyas: engine ready with {what}; its log is {engine.log_file}", file=sys.stderr, flush=True)
            code = _run_beside(engine, command, ended)
        else:
            print(f"eyas: engine ready at {engine.url} with {what}")
            print(f"  its keys are in {engine.key_file}, its log is {engine.log_file}. Ctrl-C stops it.", flush=True)
            ended.wait()
            code = 0
        if engine.state in ("dead", "hung"):
            tail = "\n  ".join(engine.log_tail())
            raise EngineError(f"{engine.detail}. Its last log lines ({engine.log_file}):\n  {tail}")
        return code
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        notify("STOPPING=1")
        engine.stop()


def _run_beside(engine: Engine, command: Sequence[str], ended: threading.Event) -> int:
    words = [word.replace("{url}", engine.url).replace("{key_file}", str(engine.key_file)) for word in command]
    try:
        process = subprocess.Popen(words)
    except OSError as error:
        raise EngineError(f"{words[0]} cannot be run ({error.strerror}): what stands after -- is a command.") from None
    try:
        while process.poll() is None and not ended.wait(POLL_S):
            pass
    finally:  # the engine has ended, or we were told to; Ctrl-C on a terminal has reached the command too
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(COMMAND_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
