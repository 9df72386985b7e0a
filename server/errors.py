"""Errors in the shape that OpenAI's clients read: {"error": {"message", "type", "param", "code"}}.

SGLang answers errors flat, or as a bare string, so a client library sees no message: they are wrapped here anew,
with their status kept, since that is what clients decide to retry by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.types import Send

Headers = Sequence[tuple[bytes, bytes]]

DONE_FRAME = b"data: [DONE]\n\n"
RETRY_AFTER_BUSY_S = 1  # an engine's queue moves within seconds
RETRY_AFTER_LOADING_S = 5

# SGLang ends a refused field's message with the place in its own source, a path of the engine's machine.
_SOURCE_LINE = '\n\n  File "'
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error. `status` is its HTTP status, `headers` go out with it where nothing was sent yet."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's error type, by status."""
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def document(self) -> dict[str, Any]:
        """The error as a JSON object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        """The error as the body of a plain answer."""
        return orjson.dumps(self.document())

    def frame(self) -> bytes:
        """The error as a frame of a stream that has already begun."""
        return b"data: " + self.body() + b"\n\n"


async def send_error(send: Send, error: ApiError, headers: Headers) -> None:
    """Answer with `error` alone; `headers` are added to its own."""
    body = error.body()
    own = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    described = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": error.status, "headers": [*described, *own, *headers]})
    await send({"type": "http.response.body", "body": body})


def reason(error: ApiError) -> str:
    """How a request that no engine saw is counted."""
    return error.code or {405: "wrong_method"}.get(error.status, "invalid_request")


def engine_answered(status: int, raw: bytes) -> ApiError:
    """The engine's answer `raw` with a status other than 200, wrapped anew. A status that is no error becomes 502."""
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError:
        found = None
    return _wrapped(status, found)


def engine_framed(found: Any) -> ApiError:
    """The `error` of a frame that came as the first thing of a stream: it names its status in `code`."""
    status = found.get("code") if isinstance(found, dict) else None
    return _wrapped(status if isinstance(status, int) else 502, found)


def _wrapped(status: int, found: Any) -> ApiError:
    if not 400 <= status <= 599:
        return ApiError(502, f"the engine answered with status {status} where an answer or an error was expected.")
    inner = found.get("error", found) if isinstance(found, dict) else None
    fields = inner if isinstance(inner, dict) else {"message": inner}
    message, code, param = fields.get("message"), fields.get("code"), fields.get("param")
    if isinstance(message, str):
        message = message.split(_SOURCE_LINE, 1)[0].strip()
    headers = {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    elif status in (429, 503):
        headers["retry-after"] = str(RETRY_AFTER_BUSY_S)
    return ApiError(
        status,
        message if message and isinstance(message, str) else f"the engine answered with status {status}.",
        code=code if isinstance(code, str) else None,
        param=param if isinstance(param, str) else None,
        headers=headers,
    )
