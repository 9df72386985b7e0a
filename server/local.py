"""An arm whose engine is this gateway's own: started in a thread, and started again where another arm serves on."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from time import monotonic

from server.arms import Arm
from server.display import StageDisplay
from server.engine import Engine, EngineError

logger = logging.getLogger(__name__)

RESTART_S = 1.0  # before the first new start; each that follows soon waits twice as long
RESTART_AT_MOST_S = 60.0
SETTLED_S = 300.0  # an engine that lasted so long begins with a short pause again


class LocalArm:
    """One engine after another, under one arm.

    make: a new Engine, not yet started. alone: the gateway ends with this engine, instead of starting another.
    on_change: called from the arm's thread whenever its state is another. on_ready: with the engine and the seconds
    that its start took. on_lost: with the reason why the gateway must end. on_restart: why one was started again.
    """

    def __init__(
        self,
        arm: Arm,
        make: Callable[[], Engine],
        *,
        alone: bool,
        keep: bool,
        on_change: Callable[[], None],
        on_ready: Callable[[Engine, float], None],
        on_lost: Callable[[str], None],
        on_restart: Callable[[str], None],
    ) -> None:
        self.arm = arm
        self.alone = alone
        self.keep = keep
        self.engine = make()
        self._make = make
        self._on_change = on_change
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_restart = on_restart
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"arm-{arm.name}", daemon=True)

    def start(self) -> None:
        """Begin, without waiting for the engine."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the engine, or leave it to the next gateway where it is to be kept and is ready. Blocks."""
        self._stopping.set()
        self._ended.set()
        if self.keep and self.engine.state == "ready":
            self.engine.leave()
        else:
            self.engine.stop()

    def _run(self) -> None:
        pause = RESTART_S
        while not self._stopping.is_set():
            begun = monotonic()
            error, reason = self._one_life()
            if self._stopping.is_set():
                return
            if self.alone:
                self._on_lost(error)
                return
            if monotonic() - begun > SETTLED_S:
                pause = RESTART_S
            logger.error("arm %s: %s", self.arm.name, error)
            self._stopping.wait(pause)
            pause = min(RESTART_AT_MOST_S, 2 * pause)
            self.engine = self._make()
            self._on_restart(reason)

    def _one_life(self) -> tuple[str, str]:
        """Start the engine and wait for its end. Returns (why it ended, in one word)."""
        engine, arm = self.engine, self.arm
        self._ended.clear()
        engine.on_end = lambda _: self._ended.set()
        begun = monotonic()
        arm.state, arm.detail = "starting", ""
        try:
            with StageDisplay() if self.alone else nullcontext(self._say) as say:
                engine.start(say)
        except Exception as error:  # noqa: BLE001 (whatever ends this thread must be told: the service waits for it)
            known = isinstance(error, EngineError)
            told = str(error) if known else f"the engine was not started: {type(error).__name__}: {error}"
            self._down(told.splitlines()[0].rstrip("."))
            return told, "start"
        arm.url, arm.api_key, arm.admin_key = engine.url, engine.api_key, engine.admin_key
        arm.vocab_size, arm.drafter, arm.capacity = engine.vocab_size, engine.drafter.name, engine.capacity
        arm.ready_since, arm.state = monotonic(), "ready"
        self._on_change()
        self._on_ready(engine, monotonic() - begun)
        self._ended.wait()
        if self._stopping.is_set():
            return "", ""
        self._down(engine.detail)
        tail = "\n  ".join(engine.log_tail())
        return f"{engine.detail}. Its last log lines ({engine.log_file}):\n  {tail}", engine.state

    def _down(self, detail: str) -> None:
        self.arm.state, self.arm.detail = "down", detail
        self._on_change()
        if not self.alone and not self._stopping.is_set():
            self.engine.stop()

    def _say(self, stage: str) -> None:
        print(f"eyas: arm {self.arm.name}: {stage}", file=sys.stderr, flush=True)
