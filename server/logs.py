"""What goes to the log, and how: text for a person, or a JSON object a line. Never a prompt, an answer or a key."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import orjson

from drafter.settings import read_settings

if TYPE_CHECKING:
    from server.exchange import Exchange

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


def log_refused(path: str, status: int, request_id: bytes, key_id: str | None, code: str | None) -> None:
    """One line for a request that no engine saw, whose key is not known where it has none."""
    fields = {
        "route": path,
        "status": status,
        "request_id": request_id.decode("latin-1"),
        "key_id": key_id,
        "code": code,
    }
    requests.info("request refused", extra={"fields": fields})


def log_answered(exchange: Exchange, request_id: bytes) -> None:
    """One line for a request that is over."""
    call, arm, first = exchange.call, exchange.arm, exchange.first_frame_at
    fields = {
        "route": call.path,
        "status": exchange.status,
        "request_id": request_id.decode("latin-1"),
        "rid": call.rid,
        "key_id": call.key_id,
        "arm": arm.name if arm else None,
        "drafter": arm.drafter if arm else None,
        "stream": call.stream,
        "tokens": exchange.tokens,
        "queued_s": round(exchange.ticket.queued_s, 6),
        "first_s": None if first is None else round(first - exchange.begun, 6),
        "seconds": round(exchange.age_s, 6),
    }
    requests.info("request", extra={"fields": fields})
