"""One side of the gateway's bench in a process of its own: the engine that only speaks, the yardstick, or Eyas.

The CPU time of a process is read from outside it, by the clock that the kernel keeps for it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import orjson
import psutil
import uvicorn
from starlette.types import ASGIApp

from bench.minimal_relay import minimal_relay
from bench.synthetic import MODEL, upstream
from server.app import create_app
from server.arms import Arm
from server.auth import KeyRing
from server.config import GatewayTable, Limits
from server.gateway import Gateway

KEY = "eyas_0000beef_" + "k" * 43
RATES = {"requests_per_minute": 10**9, "tokens_per_minute": 10**12, "max_inflight": 10**4}
CAPACITY = 256
REPO = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0


class ServedError(RuntimeError):
    """A side that did not start, or that cannot be found."""


def eyas(upstream_url: str) -> ASGIApp:
    """The gateway before one engine, with what an operator would have on: keys, rates, a queue, metrics."""
    arm = Arm("bench", upstream_url, "engine-key", "admin-key", MODEL, "synthetic", "ready", "", 1 << 17, CAPACITY)
    entry = {"name": "bench", "sha256": hashlib.sha256(KEY.encode()).hexdigest(), "created": "2026"}
    with tempfile.NamedTemporaryFile() as file:
        file.write(orjson.dumps({"format": 1, "keys": {KEY.split("_")[1]: {**entry, **RATES}}}))
        file.flush()
        keys = KeyRing(Path(file.name), Limits())
    return create_app(Gateway(GatewayTable(), [arm], version="bench", keys=keys))


SIDES: dict[str, Callable[[str], ASGIApp]] = {"upstream": lambda _: upstream, "minimal": minimal_relay, "eyas": eyas}


class Side:
    """A side under measurement: where it answers, and what CPU its processes have used."""

    def __init__(self, name: str, port: int, pids: Sequence[int]) -> None:
        self.name = name
        self.port = port
        self.pids = list(pids)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cpu_s(self) -> float | None:
        """Seconds of CPU that its processes have used since they started; None where they are not known."""
        return sum(process_cpu_s(pid) for pid in self.pids) if self.pids else None


class Started(Side):
    """A side that this bench starts, and stops on leaving."""

    def __init__(self, name: str, upstream_url: str = "", port: int = 0) -> None:
        argv = [sys.executable, "-m", "bench.served", name, upstream_url, str(port)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=REPO, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.strip().isdecimal():
            raise ServedError(f"{name} did not start: its output is above (exit code {self.process.wait()}).")
        super().__init__(name, int(line), [self.process.pid])
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise ServedError(f"{self.name} did not answer on port {self.port} within {START_TIMEOUT_S:.0f} s.")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def peer_at(name: str, port: int) -> Side:
    """A proxy that somebody else has started on this machine: whatever process listens on `port`, and its children.

    Raises ServedError where nothing listens.
    """
    for process in psutil.process_iter():
        try:
            listens = [each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        if any(each.laddr.port == port for each in listens):
            family = [process, *process.children(recursive=True)]
            return Side(name, port, [each.pid for each in family])
    raise ServedError(f"--peer {name}: nothing of this user listens on port {port}: start it first.")


def process_cpu_s(pid: int) -> float:
    """CPU seconds of a process, all its threads and those that have ended, to the nanosecond. Raises OSError."""
    clock = ctypes.c_int()
    status = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    if status:
        raise OSError(status, os.strerror(status), f"process {pid}")
    return time.clock_gettime(clock.value)


def main(argv: list[str]) -> None:
    """Serve a side in this process: its name, the upstream's URL, the port (0: the system chooses). Prints the port."""
    name, upstream_url, port = argv
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(port)))
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(SIDES[name](upstream_url), log_level="warning", access_log=False, timeout_keep_alive=75)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main(sys.argv[1:])
