"""One client's connection: uvicorn's HTTP on httptools, less what that lets a client do.

There a head may take for ever and be of any size, so may what follows a refused body; who has pipelined a second
request leaves unnoticed; trailers become headers. What is malformed is told here in the shape of the other errors.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from server.errors import ApiError

HEAD_TIMEOUT_S = 30.0  # for a request's head, and for what still comes of a request that has been answered
LOOSE_BYTES = 64 * 1024  # of a head, of trailers, or of a chunk's extensions, beside what came with their first byte
CHUNK_BYTES = 32  # a chunk's own frame, amply


class _Nowhere(list[tuple[bytes, bytes]]):
    """Where trailers go."""

    def append(self, _: tuple[bytes, bytes]) -> None:
        pass


_NOWHERE = _Nowhere()


class Connection(HttpToolsProtocol):
    """Answers one request after another. One that comes before the last one's answer is dropped, and the connection
    ends with that answer, as HTTP/1.1 lets a server do (RFC 9112, 9.3.2)."""

    in_head = False
    dropping = False  # a pipelined request and all that follows it
    loose = 0  # bytes of this request, so far, that are no body
    hurry: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._hurry()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._rest()

    def data_received(self, data: bytes) -> None:
        if self.dropping:
            return
        self.loose += len(data)
        super().data_received(data)
        if self.dropping or self.transport.is_closing():
            return
        if self.loose > LOOSE_BYTES:
            self._refuse(ApiError(431, "the request's headers are too large.", code="headers_too_large"))
        elif self.hurry is None and self.timeout_keep_alive_task is None and self._idle:
            self._hurry()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.in_head, self.loose = True, 0

    def on_headers_complete(self) -> None:
        self.in_head = False
        if not self._idle:
            self.dropping, self.cycle.keep_alive = True, False
            return
        self._rest()
        super().on_headers_complete()
        self.headers = _NOWHERE

    def on_body(self, body: bytes) -> None:
        self.loose -= len(body) + CHUNK_BYTES
        if not self.dropping:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.dropping:
            return
        super().on_message_complete()
        if self.cycle.response_complete:  # it was answered before its body's end, which has come now
            self._rest()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def send_400_response(self, msg: str) -> None:
        if not self.dropping:
            self._refuse(ApiError(400, f"{msg[0].lower()}{msg[1:]}", code="invalid_http"))

    @property
    def _idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _hurry(self) -> None:
        self.hurry = self.loop.call_later(HEAD_TIMEOUT_S, self._too_slow)

    def _rest(self) -> None:
        if self.hurry is not None:
            self.hurry.cancel()
            self.hurry = None

    def _too_slow(self) -> None:
        if self.in_head:
            message = f"the request's headers did not come within {HEAD_TIMEOUT_S:g} s."
            self._refuse(ApiError(408, message, code="headers_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Tell the client, where no answer has begun that this would break into, and close."""
        if self._idle or not self.cycle.response_started:
            body = error.body()
            head: list[Any] = [STATUS_LINE[error.status], b"content-type: application/json\r\n"]
            head.append(b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body))
            self.transport.write(b"".join([*head, body]))
        self.transport.close()
