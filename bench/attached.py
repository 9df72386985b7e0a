"""An engine that somebody else started: asked through its URL, never started, stopped or trusted.

Nothing shows from outside that its acceptance is not faked, so the gate holds whatever was measured on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from server.drafters import ActiveDrafter
from server.engine import EngineError
from server.enginekeys import EngineKeys, authorization, read_keys
from server.resolved import resolved_arguments

ANSWER_TIMEOUT_S = 30.0


class Attached:
    """What the bench needs of an engine, at a URL. Has the same names as server.engine.Engine.

    keys: a file as engines write it, {"api-key", "admin-api-key"}; without the second the caches cannot be emptied.
    Raises KeyFileError.
    """

    simulated = False  # so far as anybody can tell

    def __init__(self, name: str, url: str, key_file: Path | None = None) -> None:
        keys = read_keys(key_file) if key_file else EngineKeys("", "")
        self.url = url.rstrip("/")
        self.headers = authorization(keys.api)
        self.admin_headers = authorization(keys.admin) or self.headers
        self.drafter = ActiveDrafter(name, "NONE")
        self.served_name = ""
        self.version = ""
        self.state = "new"
        self.argv: list[str] = []
        self.resolved: dict[str, Any] = {}

    def start(self, progress: Callable[[str], None]) -> None:
        """Ask it what it is. Raises EngineError."""
        progress(f"asking {self.url}")
        try:
            answer = httpx.get(
                f"{self.url}/server_info", headers=self.headers, timeout=ANSWER_TIMEOUT_S, trust_env=False
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineError(f"{self.url} does not answer ({error}): is it up, and is it SGLang?") from None
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise EngineError(f"{self.url} wants its key ({answer.status_code}): name its key file, --key-file.")
        try:
            info = answer.raise_for_status().json()
            self.version = str(info["version"])
            self.served_name = str(info["served_model_name"])
            self.resolved = resolved_arguments(info)
            self.drafter = self._drafter(info)
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError) as error:
            raise EngineError(f"{self.url}/server_info is not what SGLang 0.5.23 answers ({error!r}).") from None
        self.state = "ready"

    def stop(self) -> None:
        """It goes on."""

    def log_tail(self, lines: int = 20) -> list[str]:
        """Its log is its owner's."""
        return []

    def _drafter(self, info: dict[str, Any]) -> ActiveDrafter:
        algorithm = info["speculative_algorithm"]
        if algorithm is None:
            return self.drafter
        return replace(
            self.drafter,
            algorithm=algorithm,
            num_steps=info["speculative_num_steps"],
            topk=info["speculative_eagle_topk"],
            draft_tokens=info["speculative_num_draft_tokens"],
        )
