"""A fake of one SGLang engine, for the gateway's tests alone: it speaks 0.5.23's answers, streams, errors and faults.

What it does with a request is chosen by the request's `user` field; what it saw is kept in `requests` and `aborts`.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.app_thread import AppThread, cut

API_KEY, ADMIN_KEY = "engine-api-key", "engine-admin-key"
MODEL = "tiny"
TEXT = 'Zażółć gęślą jaźń, 日本語, 🦅 and \\n\\n; "choices":[{ or [DONE] or data: are only words here.'
LEAKED = "<|tool_calls_section_begin|><|tool_call_begin|>functions.fly:0"
QUEUE_FULL = {"object": "error", "message": "The request queue is full.", "type": "ServiceUnavailable", "code": 503}
TOOL_PIECES = [
    {"index": 0, "delta": {"role": "assistant", "content": None, "reasoning_content": "Let me \u2026"}},
    {"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "functions.fly:0", "function": {"name": "fly"}}]}},
    {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"to": "no'}}]}},
    {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": 'rth \\u0017\n\n"}'}}]}},
]
TOO_LONG = {"object": "error", "message": "The input is too long.", "type": "BadRequest", "param": None, "code": 400}


@dataclass
class Seen:
    """One request: what came in, what went out, and how it ended."""

    path: str
    headers: dict[str, str]
    raw: bytes
    body: dict[str, Any]
    sent: bytes = b""
    details: Any = None
    usage: dict[str, int] = field(default_factory=dict)
    finished: bool = False
    closed_at: float | None = None


@dataclass
class Abort:
    rid: str
    authorization: str
    at: float


class FakeEngine(AppThread):
    """Runs in a thread of its own between `start` and `stop`. `delay` is what its slow behaviours wait, in seconds."""

    def __init__(self) -> None:
        self.requests: list[Seen] = []
        self.aborts: list[Abort] = []
        self.touched: list[str] = []  # paths of the engine's own surface that somebody reached
        self.delay = 0.6
        self.pace = 0.0
        self.gate = threading.Event()  # the behaviour "gated" waits for it before its headers

    def stop(self) -> None:
        self.gate.set()
        super().stop()

    def stop_listening(self) -> None:
        """As a killed engine: nobody answers at its address."""
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(10)

    def listen_again(self) -> None:
        """As an engine that was started anew at the same address."""

        async def up() -> None:
            self.runner = web.AppRunner(self.app(), handler_cancellation=True, shutdown_timeout=0.1)
            await self.runner.setup()
            await web.TCPSite(self.runner, "127.0.0.1", int(self.url.rpartition(":")[2]), reuse_address=True).start()

        asyncio.run_coroutine_threadsafe(up(), self.loop).result(10)

    def seen(self, count: int = 1) -> list[Seen]:
        """The requests, once `count` of them have come in."""
        wait_until(lambda: len(self.requests) >= count)
        return self.requests

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_route("*", "/{rest:.*}", self._touched)
        return app

    async def _touched(self, request: web.Request) -> web.Response:
        self.touched.append(request.path)
        return web.json_response({"api_key": API_KEY, "admin_api_key": ADMIN_KEY})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        # Held for a while: who waits for the answer to an abort before closing the connection comes too late.
        await asyncio.sleep(0.05)
        self.aborts.append(Abort(body["rid"], request.headers.get("authorization", ""), time.monotonic()))
        if request.headers.get("authorization") != f"Bearer {ADMIN_KEY}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.Response(status=200)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        if request.headers.get("authorization") != f"Bearer {API_KEY}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        seen = Seen(request.path, dict(request.headers), raw, json.loads(raw))
        self.requests.append(seen)
        try:
            answer = await self._behave(request, seen)
        except (asyncio.CancelledError, ConnectionResetError):
            seen.closed_at = time.monotonic()
            raise
        seen.finished = True
        return answer

    async def _behave(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        how = seen.body.get("user", "")
        if how in ("slow", "slow_then_error", "slow_then_dead"):
            await asyncio.sleep(self.delay)
        if how == "gated":
            await asyncio.to_thread(self.gate.wait)
        if how == "hangs_at_once":
            await asyncio.sleep(3600)
        if how in ("flat_error", "slow_then_error"):
            return web.json_response(TOO_LONG, status=400)
        if how == "queue_full":
            return web.json_response(QUEUE_FULL, status=503)
        if how == "unauthorized":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if how == "text_error":
            return web.Response(status=500, text="Internal Server Error")
        if how == "redirect":
            return web.Response(status=307, headers={"location": f"{self.url}/server_info"})
        if how in ("dies_at_once", "slow_then_dead"):
            cut(request)
            return web.Response()
        if seen.body.get("stream"):
            return await self._stream(request, seen, how)
        return await self._plain(request, seen, how)

    async def _plain(self, request: web.Request, seen: Seen, how: str) -> web.StreamResponse:
        answer = plain_answer(seen, how)
        text = json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
        seen.sent = text
        if how == "no_json":
            return web.Response(body=b"<html>", content_type="application/json")
        if how == "dies":
            response = web.StreamResponse(
                headers={"content-length": str(len(text)), "content-type": "application/json"}
            )
            await response.prepare(request)
            await response.write(text[: len(text) // 2])
            cut(request)
            return response
        return web.Response(body=text, content_type="application/json")

    async def _stream(self, request: web.Request, seen: Seen, how: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        async for part in stream_parts(seen, how):
            if part is None:
                await asyncio.sleep(3600)
            seen.sent += part
            await response.write(part)
            if self.pace:
                await asyncio.sleep(self.pace)
        if how in ("dies", "dies_inside_a_frame"):
            cut(request)
            return response
        await response.write_eof()
        return response


def details_for(seen: Seen, how: str) -> Any:
    """Speculation statistics of 3 steps a step, random but fixed by the request's id; a list for n > 1."""
    if how == "no_statistics" or not seen.body.get("return_spec_tokens_details"):
        return None
    dice = random.Random(seen.body["rid"])
    answers = []
    for _ in range(seen.body.get("n", 1)):
        histogram = [dice.randrange(1, 9) for _ in range(4)]
        steps, accepted = sum(histogram), sum(i * h for i, h in enumerate(histogram))
        answers.append(
            {
                "spec_accept_rate": accepted / (3 * steps),
                "spec_accept_length": 1 + accepted / steps,
                "spec_num_correct_drafts": accepted + (how == "contradiction"),
                "spec_num_proposed_drafts": accepted - 1 if how == "proposed_too_few" else 3 * steps,
                "spec_verify_ct": steps,
                "spec_correct_drafts_histogram": histogram,
                "spec_cap_lens_histogram": [],
            }
        )
    return answers if seen.body.get("n", 1) > 1 else answers[0]


def extension_for(seen: Seen, how: str) -> dict[str, Any]:
    """The `sglext` object, with what the request asked for."""
    seen.details = details_for(seen, how)
    extension = {} if seen.details is None else {"spec_tokens_details": seen.details}
    if seen.body.get("return_output_ids_in_sglext"):
        extension["output_ids"] = [[5, 6, 7]]
    return extension


def usage_for(seen: Seen) -> dict[str, int]:
    completion = seen.body.get("max_tokens", 16) * seen.body.get("n", 1)
    seen.usage = {"prompt_tokens": 7, "total_tokens": 7 + completion, "completion_tokens": completion}
    return seen.usage


def plain_answer(seen: Seen, how: str) -> dict[str, Any]:
    chat = seen.path.endswith("chat/completions")
    choices = []
    for index in range(seen.body.get("n", 1)):
        text = {"message": {"role": "assistant", "content": TEXT}} if chat else {"text": TEXT}
        if how == "says_nothing":
            text = {"message": {"role": "assistant", "content": None}} if chat else {"text": ""}
        if how == "leaks":
            text = {"message": {"role": "assistant", "content": LEAKED}} if chat else {"text": LEAKED}
        choices.append({"index": index, **text, "logprobs": None, "finish_reason": "stop"})
    answer = {
        "id": seen.body["rid"],
        "object": "chat.completion" if chat else "text_completion",
        "created": 1,
        "model": MODEL,
        "choices": choices,
        "usage": usage_for(seen),
        "metadata": {"weight_version": "default"},
    }
    extension = extension_for(seen, how)
    return {**answer, "sglext": extension} if extension else answer


def frame(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def stream_parts(seen: Seen, how: str) -> AsyncIterator[Any]:
    """The bytes of each write; None means to hang for ever."""
    frames = list(stream_frames(seen, how))
    if how == "error_frame_first":
        yield b"data: " + json.dumps({"error": QUEUE_FULL}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"
    elif how == "error_frame":
        yield b"".join(frames[:3])
        yield b"data: " + json.dumps({"error": TOO_LONG}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"
    elif how == "error_frame_last":
        yield frames[0]
        yield b"data: " + json.dumps({"error": TOO_LONG}).encode() + b"\n\n"
    elif how in ("hangs", "dies"):
        yield frames[0]
        yield frames[1]
        if how == "hangs":
            yield None
    elif how == "dies_inside_a_frame":
        yield frames[0]
        yield frames[1][:40]
    elif how == "truncated":
        for each in frames[:-1]:
            yield each
    elif how == "empty":
        return
    elif how == "endless":
        while True:
            yield frames[1]
            await asyncio.sleep(0.01)
    elif how == "flood":
        while True:
            yield frames[1] * 1000
    elif how == "byte_by_byte":
        for byte in b"".join(frames):
            yield bytes([byte])
    elif how == "at_once":
        yield b"".join(frames)
    else:
        for each in frames:
            yield each


def stream_frames(seen: Seen, how: str) -> list[bytes]:
    """A whole stream as SGLang cuts it: pieces, the finish, `sglext`, usage, the end."""
    chat = seen.path.endswith("chat/completions")
    base = {
        "id": seen.body["rid"],
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1,
        "model": MODEL,
    }

    def piece(index: int, text: str | None, finish: str | None = None) -> bytes:
        held = {"delta": {"reasoning_content": None, "content": text}} if chat else {"text": text or ""}
        return frame({**base, "choices": [{"index": index, **held, "logprobs": None, "finish_reason": finish}]})

    answers = range(seen.body.get("n", 1))
    words: list[str | None] = [TEXT[at : at + 5] for at in range(0, len(TEXT), 5)]
    if how == "says_nothing":
        words = [None]
    if how == "leaks":
        words = ["", LEAKED]
    frames = [piece(index, word) for word in words for index in answers]
    if how == "tool_call":
        frames = [frame({**base, "choices": [choice]}) for choice in TOOL_PIECES]
    frames += [piece(index, None, "stop") for index in answers]
    extension = extension_for(seen, how)
    if extension:
        frames.append(frame({**base, "choices": [], "usage": None, "sglext": extension}))
    usage = usage_for(seen)
    if (seen.body.get("stream_options") or {}).get("include_usage"):
        frames.append(frame({**base, "choices": [], "usage": usage}))
    return [*frames, b"data: [DONE]\n\n"]


def wait_until(holds: Callable[[], Any], timeout: float = 10.0) -> None:
    """Wait for another thread's doing. Fails the test where it does not come."""
    until = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < until, "what the test waits for did not happen"
        time.sleep(0.005)
