"""An engine that only speaks: SGLang's answers and streams, at a fixed pace, with nothing behind them.

What stands between it and a client is then all that is measured. It answers what routers ask of an engine, too.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

MODEL = "synthetic"
PACE_S = 0.02
TEXT = " eyas"
HISTOGRAM = [10, 20, 30, 40]
DETAILS = {
    "spec_accept_rate": 2.0 / 3.0,
    "spec_accept_length": 3.0,
    "spec_num_correct_drafts": 200,
    "spec_num_proposed_drafts": 300,
    "spec_verify_ct": 100,
    "spec_correct_drafts_histogram": HISTOGRAM,
    "spec_cap_lens_histogram": [],
}
JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
ABOUT = {"model_path": MODEL, "served_model_name": MODEL, "is_generation": True, "tp_size": 1, "dp_size": 1}


async def upstream(scope: Scope, receive: Receive, send: Send) -> None:
    """The engine, as a raw ASGI application. A request's limit of tokens is the number of its stream's pieces."""
    if scope["type"] == "lifespan":
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    parts = []
    more = True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    path = scope["path"]
    if path not in ("/v1/chat/completions", "/v1/completions"):
        listed = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "sglang"}]}
        await answer(send, listed if path == "/v1/models" else ABOUT)
        return
    asked = orjson.loads(b"".join(parts))
    if asked.get("stream"):
        await stream(send, asked)
    else:
        await answer(send, plain_answer(asked))


async def answer(send: Send, document: dict[str, Any]) -> None:
    """A plain answer."""
    raw = orjson.dumps(document)
    length = (b"content-length", b"%d" % len(raw))
    await send({"type": "http.response.start", "status": 200, "headers": [*JSON, length]})
    await send({"type": "http.response.body", "body": raw})


async def stream(send: Send, asked: dict[str, Any]) -> None:
    """A stream of chat: the headers with the first piece, a piece at each tick of the pace, statistics, usage, end."""
    base = {"id": asked.get("rid", "0"), "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    delta = {"role": None, "content": TEXT, "reasoning_content": None, "tool_calls": None}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "matched_stop": None}
    piece = frame({**base, "choices": [choice], "usage": None})
    count = asked.get("max_completion_tokens") or asked.get("max_tokens") or 1
    tick = asyncio.get_running_loop().time()
    for at in range(count):
        tick += PACE_S
        await asyncio.sleep(tick - asyncio.get_running_loop().time())
        if at == 0:
            await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    finish = {**choice, "delta": {}, "finish_reason": "stop"}
    last = [frame({**base, "choices": [finish], "usage": None})]
    if asked.get("return_spec_tokens_details"):
        last.append(frame({**base, "choices": [], "usage": None, "sglext": {"spec_tokens_details": DETAILS}}))
    if (asked.get("stream_options") or {}).get("include_usage"):
        last.append(frame({**base, "choices": [], "usage": usage(count)}))
    for each in [*last, b"data: [DONE]\n\n"]:
        await send({"type": "http.response.body", "body": each, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def plain_answer(asked: dict[str, Any]) -> dict[str, Any]:
    """A plain answer of chat, with the statistics where they were asked for."""
    message = {"role": "assistant", "content": TEXT * 16, "reasoning_content": None, "tool_calls": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "matched_stop": None}
    found = {
        "id": asked.get("rid", "0"),
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
        "usage": usage(16),
        "metadata": {"weight_version": "default"},
    }
    return {**found, "sglext": {"spec_tokens_details": DETAILS}} if asked.get("return_spec_tokens_details") else found


def usage(completion: int) -> dict[str, Any]:
    """Tokens, as SGLang counts them."""
    return {"prompt_tokens": 8, "total_tokens": 8 + completion, "completion_tokens": completion}


def frame(document: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + orjson.dumps(document) + b"\n\n"
