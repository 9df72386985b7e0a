"""What goes to the log and how: text for a person, or one JSON object a line. Never a prompt, never an answer, no key."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from drafter.settings import read_settings

requests = logging.getLogger("eyas.requests")


class JsonFormatter(logging.Formatter):
    """{"ts", "level", "logger", "message", …}: what a record carries in `fields` stands beside them."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        told: dict[str, Any] = {"ts": at, "level": record.levelname.lower(), "logger": record.name}
        told["message"] = record.getMessage()
        told |= getattr(record, "fields", {})
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(told, default=str).decode()


def configure_logs(how: Literal["text", "json"]) -> None:
    """Send everything to stderr from the level of EYAS_LOG on. One line for each request is written in JSON alone."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if how == "json" else logging.Formatter("eyas: %(message)s"))
    level = read_settings().log.upper()
    logging.basicConfig(level=level, handlers=[handler], force=True)
    requests.disabled = how != "json" or not requests.isEnabledFor(logging.INFO)
    for talkative in ("httpx", "httpcore", "asyncio", "aiohttp.access"):
        logging.getLogger(talkative).setLevel("WARNING")
