"""Sends prompts to an engine's chat endpoint as streams, so many at a time, and times it.

What an answer is, and what is read out of its stream, is in bench/stream.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import aiohttp
import orjson

from bench.stream import Answer, LoadError, Stream, error_text
from drafter.data.prompts import Message, Prompt
from drafter.workers import run_workers

__all__ = ["Answer", "Block", "Endpoint", "Load", "LoadError", "Sampling", "flush", "send_block", "warm_up"]

Thinking = Literal["default", "on", "off"]
IDLE_TIMEOUT_S = 600.0  # nothing at all from the engine for so long: it hangs
CONNECT_TIMEOUT_S = 10.0
FLUSH_TIMEOUT_S = 60.0
WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Endpoint:
    """An engine to ask. `speculates` says whether its answers must carry speculation details, or must not."""

    url: str
    model: str
    speculates: bool
    headers: Mapping[str, str] = field(repr=False)
    admin_headers: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class Sampling:
    """What every request asks for. A request's own seed is `seed` plus its place in the run. answers: how many (n)."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    thinking: Thinking = "default"
    answers: int = 1


@dataclass(frozen=True)
class Load:
    """How a block is sent: so many requests at a time, with thinking on, off, or as the template has it."""

    concurrency: int
    thinking: Thinking = "default"


@dataclass(frozen=True)
class Block:
    """One pass over some prompts: answers in the order of the prompts, and the wall time from first to last byte.

    flushed: whether the engine's caches were emptied before it.
    """

    answers: tuple[Answer, ...]
    seconds: float
    flushed: bool = True


def warm_up(endpoint: Endpoint, sampling: Sampling, concurrency: int) -> None:
    """Let the engine compile and allocate on `concurrency` prompts of its own, which nothing is measured on.

    Raises LoadError.
    """
    prompts = [
        Prompt(f"warm-up/{index}", "warm-up", ({"role": "user", "content": f"Tell me {index + 2} facts about owls."},))
        for index in range(concurrency)
    ]
    short = replace(sampling, max_tokens=min(sampling.max_tokens, WARM_UP_TOKENS))
    asyncio.run(_send_all(endpoint, prompts, short, concurrency, range(concurrency), lambda answer: None))


def send_block(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    concurrency: int,
    places: Sequence[int],
    on_answer: Callable[[Answer], None],
) -> Block:
    """Send every prompt once, `concurrency` at a time, and time it. places: each prompt's place in the run.

    on_answer is called as each answer finishes. Raises LoadError at the first request that fails.
    """
    return asyncio.run(_send_all(endpoint, prompts, sampling, concurrency, places, on_answer))


def flush(endpoint: Endpoint) -> None:
    """Empty the engine's caches. Raises LoadError where it will not.

    It makes blocks alike: no prefix is cached from before, and NGRAM has forgotten the answers it has seen.
    """
    asyncio.run(_flush(endpoint))


async def _flush(endpoint: Endpoint) -> None:
    timeout = aiohttp.ClientTimeout(total=FLUSH_TIMEOUT_S + CONNECT_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(
                f"{endpoint.url}/flush_cache",
                params={"timeout": str(FLUSH_TIMEOUT_S)},
                headers=endpoint.admin_headers,
            ) as response,
        ):
            if response.status != 200:
                text = (await response.text()).strip()
                raise LoadError(f"/flush_cache answered {response.status}: {text[:300]}")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise LoadError(f"/flush_cache failed: {_words(error)}") from error


async def _send_all(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    concurrency: int,
    places: Sequence[int],
    on_answer: Callable[[Answer], None],
) -> Block:
    found: dict[int, list[Answer]] = {}
    waiting = iter(enumerate(zip(prompts, places, strict=True)))
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=IDLE_TIMEOUT_S)
    # SGLang closes an idle connection after 5 s; ours must go first, or a request meets a closed one.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def work() -> None:
            for index, (prompt, place) in waiting:
                body = request_body(endpoint.model, prompt.messages, sampling, place)
                found[index] = await _ask(session, endpoint, prompt, body, sampling.answers)
                for answer in found[index]:
                    on_answer(answer)

        started = time.perf_counter()
        await run_workers(work, min(concurrency, len(prompts)))
        seconds = time.perf_counter() - started
    return Block(tuple(answer for index in range(len(prompts)) for answer in found[index]), seconds)


def request_body(model: str, messages: Sequence[Message], sampling: Sampling, place: int) -> dict[str, Any]:
    """The chat request. Thinking goes to the chat template under both of the names that templates use."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [dict(message) for message in messages],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed + place,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_spec_tokens_details": True,
        "return_output_ids_in_sglext": True,
    }
    if sampling.answers > 1:
        body["n"] = sampling.answers
    if sampling.thinking != "default":
        wanted = sampling.thinking == "on"
        body["chat_template_kwargs"] = {"thinking": wanted, "enable_thinking": wanted}
    return body


async def _ask(
    session: aiohttp.ClientSession, endpoint: Endpoint, prompt: Prompt, body: dict[str, Any], answers: int
) -> list[Answer]:
    stream = Stream(answers)
    started = time.perf_counter()
    try:
        async with session.post(
            f"{endpoint.url}/v1/chat/completions", data=orjson.dumps(body), headers=_json_headers(endpoint)
        ) as response:
            if response.status != 200:
                raise LoadError(f"answered {response.status}: {error_text(await response.read())}")
            async for data, arrived in _frames(response.content):
                stream.take(data, arrived - started)
        seconds = time.perf_counter() - started
        return stream.answers(prompt, seconds, endpoint.speculates)
    except aiohttp.SocketTimeoutError:
        raise LoadError(f"prompt {prompt.id}: nothing came from the engine for {IDLE_TIMEOUT_S:g} s") from None
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        raise LoadError(f"prompt {prompt.id}: the connection failed ({_words(error)})") from error
    except (LoadError, ValueError) as error:
        raise LoadError(f"prompt {prompt.id}: {error}") from None


async def _frames(content: aiohttp.StreamReader) -> AsyncIterator[tuple[bytes, float]]:
    """The data of each server-sent event and when its last byte was read."""
    pending = b""
    async for piece in content.iter_any():
        arrived = time.perf_counter()
        *whole, pending = (pending + piece).split(b"\n\n")
        for frame in whole:
            for line in frame.split(b"\n"):
                if line.startswith(b"data:"):
                    yield line[5:].strip(), arrived


def _json_headers(endpoint: Endpoint) -> dict[str, str]:
    return {**endpoint.headers, "content-type": "application/json"}


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
