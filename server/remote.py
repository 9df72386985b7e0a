"""A gateway before an engine that runs elsewhere: it asks whether the engine is ready, and starts and stops nothing."""

from __future__ import annotations

import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import uvicorn

from server.app import create_app
from server.arms import Arm, ArmState
from server.config import Profile
from server.enginekeys import EngineKeys
from server.notify import notify
from server.serve import Terminated, gateway_of, uvicorn_config

POLL_S = 1.0
START_POLL_S = 0.1
ANSWER_TIMEOUT_S = 10.0
LOST_AFTER = 3  # polls without an answer: an engine's one process is late under load


class Refused(Exception):
    """An engine that answers, and is not the one that the profile means."""


@dataclass
class Watch:
    """Keeps an arm's state by asking its engine. `served_name` is what the engine must serve."""

    arm: Arm
    unanswered: int = 0
    known: bool = False  # whether this engine has said what it is since it was last away

    def ask(self, client: httpx.Client) -> None:
        """One poll: writes the arm's state and detail."""
        arm = self.arm
        try:
            status = client.get(f"{arm.url}/ready").status_code
            self.unanswered = 0
            if status != httpx.codes.OK:
                self._set("starting", "the engine is loading, or takes no requests now")
                return
            if not self.known:
                self._learn(client)
            self._set("ready", "")
        except (httpx.TransportError, httpx.InvalidURL) as error:
            self.unanswered += 1
            if self.unanswered >= LOST_AFTER or arm.state != "ready":
                self._set("down", f"the engine at {arm.url} does not answer ({type(error).__name__})")
        except Refused as error:
            self._set("down", str(error))

    def _set(self, state: ArmState, detail: str) -> None:
        if state != "ready":
            self.known = False  # whoever answers next may be another engine
        if (state, detail) != (self.arm.state, self.arm.detail):
            said = "ready, speculation " + self.arm.drafter if state == "ready" else detail
            print(f"eyas: {self.arm.url}: {said}", file=sys.stderr, flush=True)
        self.arm.state, self.arm.detail = state, detail

    def _learn(self, client: httpx.Client) -> None:
        """What it serves and what speculates there. Raises Refused."""
        headers = {"authorization": f"Bearer {self.arm.api_key}"} if self.arm.api_key else {}
        answer = client.get(f"{self.arm.url}/server_info", headers=headers)
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise Refused("the engine refuses the gateway's key: give both the same key file")
        try:
            info = answer.raise_for_status().json()
            served, drafter = str(info["served_model_name"]), _drafter_of(info)
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError):
            raise Refused("what answers there is no SGLang 0.5.23") from None
        if served != self.arm.served_name:
            raise Refused(f"the engine serves {served!r}, the profile names {self.arm.served_name!r}")
        self.arm.drafter = drafter
        self.known = True


def _drafter_of(info: dict[str, Any]) -> str:
    """The drafter's name: its folder's, or the algorithm of one without weights."""
    algorithm, path = info["speculative_algorithm"], info.get("speculative_draft_model_path")
    return Path(path).name if path else str(algorithm or "none").lower()


def serve_remote(profile: Profile, url: str, keys: EngineKeys, host: str | None, port: int | None, version: str) -> int:
    """Serve before the engine at `url` until a signal. Returns an exit code; raises ProfileError."""
    gateway = gateway_of(profile, host, port)
    arm = Arm("default", url.rstrip("/"), keys.api, keys.admin, profile.target.served_name, drafter="unknown")
    config = uvicorn_config(gateway)
    config.app = create_app(arm, gateway, version=version)
    server, stopping = uvicorn.Server(config), threading.Event()

    def watch() -> None:
        seen, told = Watch(arm), False
        with httpx.Client(timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
            while not stopping.wait(POLL_S if told else START_POLL_S):
                seen.ask(client)
                if server.started and not told:
                    notify("READY=1", "STATUS=serving")  # live at once: /readyz says when the engine is ready
                    told = True

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    threading.Thread(target=watch, name="engine-watch", daemon=True).start()
    print(f"eyas: http://{config.host}:{config.port}/v1 before the engine at {arm.url}", file=sys.stderr, flush=True)
    try:
        server.run()
    except KeyboardInterrupt:
        return 130
    except Terminated:
        return 0
    finally:
        stopping.set()
        notify("STOPPING=1")
    return 0
