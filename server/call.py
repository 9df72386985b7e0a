"""A client's request as it comes in: read within a limit, parsed once, and made ready for the engine.

What the gateway adds is spliced into the client's own bytes, so no number or text of theirs is written anew.
"""

from __future__ import annotations

import asyncio
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.types import Receive

from server.errors import ApiError

ROUTES = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}

# The gateway sets these itself; a client's own are read and then dropped, so that none stands there twice.
OWN_FIELDS = ("rid", "return_spec_tokens_details", "stream_options")
MAX_ANSWERS = 128  # of one prompt, as OpenAI's API has it
MAX_DEPTH = 128  # of a body: half of what orjson can write again, and no schema of a tool comes near it
GLANCE_BYTES = 64 * 1024
_SHORT = reprlib.Repr()  # a client's own value within an error
_SHORT.maxlevel, _SHORT.maxstring = 2, 100


def new_rid() -> str:
    """An id for one attempt, of fixed length: SGLang aborts every request whose id begins with the one it is told."""
    return os.urandom(16).hex()


class ClientGone(Exception):
    """The client closed its connection."""


@dataclass(slots=True)
class Call:
    """A request as far as the gateway must know it.

    raw, tail: the engine gets the client's bytes less their last brace, then `tail`, which holds `rid`. wants_*: what
    the client asked for itself. prompts: how many a list holds, None for a single one. each: answers to a prompt.
    structured: the answer is held to a schema, a grammar or a tool's arguments. asked: the client's
    own fields, read only. key_id, arm_wish: the ticket's.
    """

    path: str
    rid: str
    raw: bytes
    tail: bytes
    stream: bool
    wants_usage: bool
    wants_details: bool
    prompts: int | None
    each: int
    structured: bool
    asked: dict[str, Any]
    key_id: str = "none"
    arm_wish: str | None = None

    @property
    def chat(self) -> bool:
        """It is a conversation, not a text to continue."""
        return ROUTES[self.path] == "chat"

    @property
    def answers_one(self) -> bool:
        """Exactly one answer comes back."""
        return self.each == 1 and self.prompts is None

    @property
    def answers(self) -> int:
        """How many answers come back."""
        return self.each * (self.prompts or 1)

    @property
    def abort_ids(self) -> list[str]:
        """The ids under which the engine can be told to stop; for n > 1 it mints its own, so there are none."""
        if self.each > 1:
            return []
        return [self.rid] if self.prompts is None else [f"{self.rid}_{at}" for at in range(self.prompts)]

    @property
    def body(self) -> bytes:
        """What the engine gets, as one."""
        return self.raw[:-1] + self.tail

    @property
    def parts(self) -> tuple[memoryview, bytes]:
        """The same without copying the client's bytes."""
        return memoryview(self.raw)[:-1], self.tail

    def renew(self) -> None:
        """Take another id for another attempt: an engine that still knows the last one must not meet it twice."""
        rid = new_rid()
        self.tail = self.tail.replace(self.rid.encode(), rid.encode())
        self.rid = rid

    def forget(self) -> None:
        """Let go of the client's body, which may be large: its answer has begun."""
        self.raw = b""
        self.asked = {}


def read_call(path: str, raw: bytes, rid: str, served_name: str, vocab_size: int | None) -> Call:
    """Parse a client's body once, and splice in what the gateway adds. Raises ApiError for what no engine shall see.

    vocab_size: the target's, where it is known; an engine dies of a token id outside it.
    """
    try:
        asked = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}.", code="invalid_json") from None
    if not isinstance(asked, dict):
        raise ApiError(400, f"the body is a JSON {type(asked).__name__}, expected an object.", code="invalid_json")
    # A small body shows at a glance that it cannot be deep; in a large one the bytes are many and the objects few.
    flat = len(raw) < GLANCE_BYTES and raw.count(b"{") + raw.count(b"[") <= MAX_DEPTH
    if not flat and _deeper(asked, MAX_DEPTH):
        raise ApiError(400, f"the body is nested more than {MAX_DEPTH} levels deep.", code="invalid_json")
    model = asked.get("model")
    if not isinstance(model, str):
        raise ApiError(400, f"'model' is missing or no string: this server serves {served_name!r}.", param="model")
    if model != served_name:
        message = f"model {_SHORT.repr(model)} does not exist: this server serves {served_name!r}."
        raise ApiError(404, message, code="model_not_found", param="model")
    stream = _flag(asked, "stream")
    options = asked.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise ApiError(400, f"'stream_options' is {_SHORT.repr(options)}, expected an object.", param="stream_options")
    added: dict[str, Any] = {"rid": rid, "return_spec_tokens_details": True}
    if stream:
        added["stream_options"] = {**(options or {}), "include_usage": True}
    dropped = [name for name in OWN_FIELDS if name in asked]
    # In OpenAI's API a null stands for the default; SGLang refuses it here.
    dropped += [name for name in ("stream", "n") if name in asked and asked[name] is None]
    if dropped:
        raw = orjson.dumps({name: value for name, value in asked.items() if name not in dropped})
    prompts = _listed_prompts(asked["prompt"], vocab_size) if asked.get("prompt") is not None else None
    return Call(
        path=path,
        rid=rid,
        raw=raw.rstrip(),
        tail=b"," + orjson.dumps(added)[1:],
        stream=stream,
        wants_usage=_flag(options or {}, "include_usage"),
        wants_details=_flag(asked, "return_spec_tokens_details"),
        prompts=prompts,
        each=_answers(asked.get("n")),
        structured=_structured(asked),
        asked=asked,
    )


def _deeper(document: dict[str, Any], levels: int) -> bool:
    """Whether objects and lists stand in each other more than so many levels deep: the engine's JSON, and ours when it
    writes a body anew, give up on such a body with an error of their own."""
    level: list[Any] = [document]
    for _ in range(levels):
        level = [
            held
            for each in level
            for held in (each.values() if isinstance(each, dict) else each)
            if isinstance(held, dict | list)
        ]
        if not level:
            return False
    return True


def _structured(asked: dict[str, Any]) -> bool:
    """Whether the engine will hold the answer to a grammar, which together with speculation is where engines hang."""
    form = asked.get("response_format")
    if isinstance(form, dict) and form.get("type") not in (None, "text"):
        return True
    if any(asked.get(name) is not None for name in ("json_schema", "regex", "ebnf")):
        return True
    tools = asked.get("tools")
    if not isinstance(tools, list):
        return False
    choice = asked.get("tool_choice")
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    strict = any(isinstance(function, dict) and function.get("strict") for function in functions)
    return choice == "required" or isinstance(choice, dict) or strict


def _listed_prompts(prompt: Any, vocab_size: int | None) -> int | None:
    """How many prompts a list holds; None for a single one, which may be a list of token ids. Raises ApiError."""
    if isinstance(prompt, str):
        return None
    if not isinstance(prompt, list) or not prompt:
        raise ApiError(400, "'prompt' is neither text nor a list of texts or of token ids.", param="prompt")
    if type(prompt[0]) is int:
        _check_ids(prompt, vocab_size)
        return None
    for each in prompt:
        if isinstance(each, list) and each:
            _check_ids(each, vocab_size)
        elif not isinstance(each, str):
            raise ApiError(400, "'prompt' holds something that is neither text nor token ids.", param="prompt")
    return len(prompt)


def _check_ids(ids: list[Any], vocab_size: int | None) -> None:
    """Raise ApiError unless all are token ids of the target: the engine looks them up unchecked, and dies."""
    for token in ids:
        if type(token) is not int or token < 0 or (vocab_size is not None and token >= vocab_size):
            below = f" below {vocab_size:,}" if vocab_size else ""
            raise ApiError(400, f"'prompt' holds {_SHORT.repr(token)}, expected token ids{below}.", param="prompt")


def _answers(n: Any) -> int:
    """How many answers are asked for. Raises ApiError."""
    if n is None:
        return 1
    if type(n) is not int or not 1 <= n <= MAX_ANSWERS:
        raise ApiError(400, f"'n' is {_SHORT.repr(n)}, expected a whole number from 1 to {MAX_ANSWERS}.", param="n")
    return n


def _flag(asked: dict[str, Any], name: str) -> bool:
    """A boolean field; strict, since the gateway and the engine must read it alike."""
    value = asked.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ApiError(400, f"{name!r} is {_SHORT.repr(value)}, expected true or false.", param=name)


async def read_body(heads: Mapping[bytes, bytes], receive: Receive, limit: int, timeout_s: float) -> bytes:
    """The request's body. Raises ApiError 413 past `limit` bytes, announced or read, 408 past its time; ClientGone."""
    announced = heads.get(b"content-length")
    if announced is not None and int(announced) > limit:
        raise _too_large(limit)
    task = asyncio.current_task()
    assert task is not None
    # A timer by hand: asyncio.timeout() costs three times as much, for each request.
    timer = asyncio.get_running_loop().call_later(timeout_s, task.cancel, "slow body")
    parts = []
    size = 0
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)
    except asyncio.CancelledError as cancelled:
        if cancelled.args != ("slow body",):
            raise
        task.uncancel()
        raise ApiError(408, f"the body did not come within {timeout_s:g} s.", code="body_timeout") from None
    finally:
        timer.cancel()


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes.", code="request_too_large")
