"""Gateway and engine together: `make serve`. One ends with the other, and nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Collection
from types import FrameType

import uvicorn

from server.app import create_app
from server.arms import Arm
from server.config import Profile, ProfileError
from server.display import StageDisplay
from server.engine import Engine, EngineError, port_obstacle
from server.launch import ALONE, ActiveDrafter, Node, ngram_obstacle, resolve_drafter
from server.plan import warned

DRAIN_S = 3  # how long open streams may go on after Ctrl-C


class Terminated(Exception):
    """SIGTERM, as an exception, so that the engine is stopped on the way out."""


def serve(
    profile: Profile,
    drafter: str | None,
    host: str | None,
    port: int | None,
    version: str,
    force: Collection[str] = (),
    node: Node = ALONE,
) -> int:
    """Serve until a signal or the engine's end. `force`: checks to pass over. `node`: the first of several, where the
    profile has them. Returns an exit code."""
    gateway = profile.gateway.model_copy(
        update={"host": host or profile.gateway.host, "port": profile.gateway.port if port is None else port}
    )
    obstacle = port_obstacle(gateway.host, gateway.port)
    if obstacle:
        raise ProfileError(obstacle)
    chosen = resolve_drafter(profile, drafter)
    obstacle = ngram_obstacle(os.environ) if chosen.algorithm == "NGRAM" else None
    if obstacle:
        print(f"eyas: {obstacle}: serving without speculation.", file=sys.stderr)
        drafter = "none"
    engine = Engine(profile, drafter, node=node, force=force)
    show_findings(engine)
    return _Service(engine, uvicorn_config(profile, gateway.host, gateway.port), version).run()


def uvicorn_config(profile: Profile, host: str, port: int) -> uvicorn.Config:
    """One process; HTTP by httptools on uvloop; the application is set by the service."""
    return uvicorn.Config(
        app="",
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=DRAIN_S,
        server_header=False,
    )


class _Service:
    def __init__(self, engine: Engine, config: uvicorn.Config, version: str) -> None:
        self.engine = engine
        self.arm = Arm(
            name="default",
            url="",
            api_key=engine.api_key,
            admin_key=engine.admin_key,
            served_name=engine.served_name,
            drafter=engine.drafter.name,
        )
        config.app = create_app(self.arm, engine.profile.gateway, version=version)
        self.server = uvicorn.Server(config)
        self.error: str | None = None
        engine.on_end = self._engine_ended

    def run(self) -> int:
        def terminate(number: int, frame: FrameType | None) -> None:
            raise Terminated

        signal.signal(signal.SIGTERM, terminate)
        starter = threading.Thread(target=self._start_engine, name="engine-start", daemon=True)
        code = 0
        try:
            starter.start()
            self.server.run()
        except KeyboardInterrupt:
            code = 130
        except Terminated:
            code = 0
        finally:
            # A second signal must not cut this short: the guard ends the engine within seconds.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            self.arm.state = "down"
            if self.error is None:
                print("eyas: stopping the engine", file=sys.stderr, flush=True)
            self.engine.stop()
        if self.error is not None:
            print(f"eyas: {self.error}", file=sys.stderr, flush=True)
            return 1
        return code

    def _start_engine(self) -> None:
        try:
            with StageDisplay() as display:
                self.engine.start(display)
                elapsed = display.elapsed_s
        except Exception as error:  # noqa: BLE001 (whatever ends this thread must end the service, which waits for it)
            if not self.server.should_exit:
                known = isinstance(error, EngineError)
                self.error = str(error) if known else f"the engine was not started: {type(error).__name__}: {error}"
                self.server.should_exit = True
            return
        self.arm.url = self.engine.url
        self.arm.vocab_size = self.engine.vocab_size
        self.arm.drafter = self.engine.drafter.name
        self.arm.state = "ready"
        print(ready_text(self.engine, self.server.config.host, self.server.config.port, elapsed), flush=True)

    def _engine_ended(self, engine: Engine) -> None:
        self.arm.state, self.arm.detail = "down", engine.detail
        tail = "\n  ".join(engine.log_tail())
        self.error = f"{engine.detail}. Its last log lines ({engine.log_file}):\n  {tail}"
        self.server.should_exit = True


def show_findings(engine: Engine) -> None:
    """What the preflight warns of, before the engine starts."""
    for line in warned(engine.findings):
        print(f"eyas: {line}", file=sys.stderr, flush=True)


def speculation_text(drafter: ActiveDrafter) -> str:
    """One phrase: what speculates, and how far."""
    match drafter.algorithm:
        case "NONE":
            return "no speculation"
        case "NGRAM":
            return f"NGRAM speculation, {drafter.draft_tokens} tokens verified in a step"
        case "EAGLE3":
            return (
                f"EAGLE3 speculation by {drafter.name}, {drafter.num_steps} steps, top {drafter.topk}, "
                f"{drafter.draft_tokens} tokens verified in a step"
            )


def probe_text(engine: Engine) -> list[str]:
    """What the probe found, or why there was none; nothing where nothing was there to probe."""
    if engine.probe is not None:
        low = engine.probe.acceptance_length < engine.profile.probe.floor
        return [engine.probe.text + (f", under the floor of {engine.profile.probe.floor:.2f} (forced)" * low)]
    return [f"none: {engine.not_probed}"] if engine.drafter.algorithm == "EAGLE3" else []


def ready_text(engine: Engine, host: str, port: int, elapsed_s: float) -> str:
    """The lines that say that it serves: URL, a curl to copy, what speculates, what is limited."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{shown}:{port}"
    body = {
        "model": engine.served_name,
        "messages": [{"role": "user", "content": "What is an eyas?"}],
        "max_tokens": 64,
    }
    lines = [
        f"eyas: ready after {elapsed_s:.0f} s at {url}/v1 (OpenAI API), metrics at {url}/metrics",
        f"  serves   {engine.served_name} on SGLang {engine.version}, {speculation_text(engine.drafter)}",
        f"  try      curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{json.dumps(body)}'",
    ]
    lines += [f"  probe    {line}" for line in probe_text(engine)]
    if engine.profile.engine.device == "cpu":
        lines.append(
            "  limits   CPU: correctness and acceptance are real, speed says nothing about a GPU; "
            f"{engine.profile.engine.max_running_requests} requests at once, "
            f"{engine.profile.engine.context_length:,} tokens of context, no images"
        )
    lines.append(f"  log      {engine.log_file}")
    lines.append("  Ctrl-C stops everything.")
    return "\n".join(lines)
