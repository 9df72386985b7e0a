"""The arm: one engine that takes requests, as the gateway sees it.

A supervisor thread writes `state` and `detail` by plain attribute writes; the gateway reads them at each request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ArmState = Literal["starting", "ready", "down"]


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
