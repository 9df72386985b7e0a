"""The arms: the engines that take requests, as the gateway sees them.

A supervisor thread writes `state` and `detail` by plain attribute writes; the gateway reads them at each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from server.call import Call
from server.errors import RETRY_AFTER_LOADING_S, ApiError

ArmState = Literal["starting", "ready", "down"]
# ok: an answer came whole. refused: the engine's 4xx, the request's own fault. busy: its 429 or 503. error: another
# 5xx, or an error within a stream. unreachable, died, timeout: as they say. gone: the client left, or we stopped.
Outcome = Literal["ok", "refused", "busy", "error", "unreachable", "died", "timeout", "gone"]


@dataclass
class Arm:
    """One engine and how to reach it.

    `url` has no path; `served_name` is the model that requests name; `drafter` is the drafter's name, or `none`.
    `vocab_size`: tokens that the target knows, None where nobody said. `detail` says in one sentence why the arm is not
    ready; clients read it. An empty key means an engine without one.
    """

    name: str
    url: str
    api_key: str
    admin_key: str
    served_name: str
    drafter: str
    state: ArmState = "starting"
    detail: str = ""
    vocab_size: int | None = None


class Arms:
    """The arms of one deployment, which all serve the same model."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self.all = list(arms)

    @property
    def served_name(self) -> str:
        return self.all[0].served_name

    @property
    def vocab_size(self) -> int | None:
        return self.all[0].vocab_size

    def choose(self, call: Call) -> Arm:
        """The arm that takes `call`. Raises ApiError 503 where none can."""
        for arm in self.all:
            if arm.state == "ready":
                return arm
        arm = self.all[0]
        code = "model_loading" if arm.state == "starting" else "engine_down"
        detail = arm.detail or ("the model is loading" if code == "model_loading" else "the engine is down")
        raise ApiError(503, f"{detail}.", code=code, headers={"retry-after": str(RETRY_AFTER_LOADING_S)})

    def choose_again(self, call: Call, failed: Sequence[Arm], outcome: Outcome) -> Arm | None:
        """The arm that takes `call` after these have failed it, the last with `outcome`, before its first byte.

        None for no other attempt.
        """
        return None

    def report(self, arm: Arm, outcome: Outcome) -> None:
        """How an attempt on `arm` ended."""
