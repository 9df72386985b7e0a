"""What is seen while an engine starts: a live line on a terminal, one line for each stage elsewhere, and by systemd."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Self, TextIO

from server.notify import notify

REFRESH_S = 0.2
FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class StageDisplay:
    """Called with the name of each stage as it begins. A context manager; leaving it clears the live line."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._began = time.monotonic()
        self._stage = ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._spin, daemon=True)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def __call__(self, stage: str) -> None:
        self._stage = stage
        notify(f"STATUS={stage}")
        if not self._live:
            print(f"eyas: {self.elapsed_s:5.1f} s  {stage}", file=self._stream, flush=True)

    def __enter__(self) -> Self:
        if self._live:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        if self._live:
            self._thread.join()
            print("\r\x1b[K", end="", file=self._stream, flush=True)

    def _spin(self) -> None:
        turn = 0
        while not self._done.wait(REFRESH_S):
            frame = FRAMES[turn % len(FRAMES)]
            print(f"\r\x1b[K{frame} {self.elapsed_s:3.0f} s  {self._stage}", end="", file=self._stream, flush=True)
            turn += 1
