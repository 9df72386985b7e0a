"""Sends prompts to an engine's chat endpoint as streams and keeps what each answer was and when it came.

Tokens come from `usage` and acceptance from the engine's own histogram; chunks are never counted as tokens, since
one chunk carries as many tokens as a verify step accepted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import aiohttp
import orjson

from drafter.acceptance import accepted_tokens, histogram_of_details, is_looping, verify_steps
from drafter.data.prompts import Message, Prompt
from drafter.report import ids_sha256

Thinking = Literal["default", "on", "off"]
IDLE_TIMEOUT_S = 600.0  # nothing at all from the engine for so long: it hangs
CONNECT_TIMEOUT_S = 10.0
FLUSH_TIMEOUT_S = 60.0
WARM_UP_TOKENS = 32


class LoadError(RuntimeError):
    """A request that did not give a trustworthy answer, in one sentence."""


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
    """What every request asks for. A request's own seed is `seed` plus its place in the run."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    thinking: Thinking = "default"


@dataclass(frozen=True)
class Answer:
    """One finished request.

    tokens: `usage.completion_tokens`. seconds: from sending to the end of the stream. ttft_s: from sending to the
    first piece of text, reasoning or tool call. gaps_s: seconds between pieces, one for each but the first.
    histogram: verify steps by accepted draft tokens; empty without speculation. output_ids: the engine's own ids.
    """

    prompt_id: str
    category: str
    tokens: int
    seconds: float
    ttft_s: float
    gaps_s: tuple[float, ...]
    histogram: tuple[int, ...]
    output_ids: tuple[int, ...]

    @cached_property
    def looping(self) -> bool:
        return is_looping(self.output_ids)

    @cached_property
    def output_sha256(self) -> str:
        return ids_sha256(self.output_ids)


@dataclass(frozen=True)
class Block:
    """One pass over the prompts: answers in the order of the prompts, and the wall time from first to last byte."""

    answers: tuple[Answer, ...]
    seconds: float


def warm_up(endpoint: Endpoint, sampling: Sampling, concurrency: int) -> None:
    """Let the engine compile and allocate on `concurrency` prompts of its own, which nothing is measured on.

    Raises LoadError.
    """
    prompts = [
        Prompt(f"warm-up/{index}", "warm-up", ({"role": "user", "content": f"Tell me {index + 2} facts about owls."},))
        for index in range(concurrency)
    ]
    short = Sampling(min(sampling.max_tokens, WARM_UP_TOKENS), sampling.temperature, sampling.seed, sampling.thinking)
    asyncio.run(_send_all(endpoint, prompts, short, concurrency, 0, lambda answer: None))


def send_block(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    concurrency: int,
    repeat: int,
    on_answer: Callable[[Answer], None],
) -> Block:
    """Empty the engine's caches, then send every prompt once, `concurrency` at a time, and time it.

    The flush makes blocks alike: no prefix is cached from before, and NGRAM has forgotten the answers it has seen.
    on_answer is called as each request finishes. Raises LoadError at the first request that fails.
    """
    asyncio.run(_flush(endpoint))
    return asyncio.run(_send_all(endpoint, prompts, sampling, concurrency, repeat, on_answer))


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
    repeat: int,
    on_answer: Callable[[Answer], None],
) -> Block:
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(prompts))
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=IDLE_TIMEOUT_S)
    # SGLang closes an idle connection after 5 s; ours must go first, or a request meets a closed one.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def work() -> None:
            for index, prompt in waiting:
                body = request_body(endpoint.model, prompt.messages, sampling, repeat * len(prompts) + index)
                answers[index] = await _ask(session, endpoint, prompt, body)
                on_answer(answers[index])

        started = time.perf_counter()
        workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(prompts)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        seconds = time.perf_counter() - started
    return Block(tuple(answers[index] for index in range(len(prompts))), seconds)


def request_body(model: str, messages: Sequence[Message], sampling: Sampling, place: int) -> dict[str, Any]:
    """The chat request. Thinking goes to the chat template under both of the names that templates use."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [dict(message) for message in messages],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed + place,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_spec_tokens_details": True,
        "return_output_ids_in_sglext": True,
    }
    if sampling.thinking != "default":
        wanted = sampling.thinking == "on"
        body["chat_template_kwargs"] = {"thinking": wanted, "enable_thinking": wanted}
    return body


async def _ask(session: aiohttp.ClientSession, endpoint: Endpoint, prompt: Prompt, body: dict[str, Any]) -> Answer:
    stream = _Stream()
    started = time.perf_counter()
    try:
        async with session.post(
            f"{endpoint.url}/v1/chat/completions", data=orjson.dumps(body), headers=_json_headers(endpoint)
        ) as response:
            if response.status != 200:
                raise LoadError(f"answered {response.status}: {_error_text(await response.read())}")
            async for data, arrived in _frames(response.content):
                stream.take(data, arrived - started)
        seconds = time.perf_counter() - started
        return stream.answer(prompt, seconds, endpoint.speculates)
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


class _Stream:
    """What has been read of one answer so far."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.finished_at: float | None = None
        self.usage: Mapping[str, Any] | None = None
        self.details: Any = None
        self.output_ids: Any = None
        self.done = False

    def take(self, data: bytes, at: float) -> None:
        """Read one event that arrived `at` seconds after sending. Raises LoadError on an error in the stream."""
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise LoadError(f"the stream has an event that is not JSON: {data[:200]!r}") from None
        if chunk.get("error"):
            raise LoadError(f"the engine broke the stream off: {_error_text(data)}")
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            if delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
                self.arrivals.append(at)
            reason = choice.get("finish_reason")
            if reason == "abort":
                raise LoadError("the engine aborted the request")
            if reason:
                self.finished_at = at
        extension = chunk.get("sglext") or {}
        self.details = extension.get("spec_tokens_details", self.details)
        self.output_ids = extension.get("output_ids", self.output_ids)
        self.usage = chunk.get("usage") or self.usage

    def answer(self, prompt: Prompt, seconds: float, speculates: bool) -> Answer:
        """The whole answer. Raises LoadError or ValueError where a part is missing or contradicts another."""
        if not self.done or self.finished_at is None:
            raise LoadError("the stream ended before the answer did")
        if self.usage is None:
            raise LoadError("the stream carried no usage, so its tokens cannot be counted")
        if not isinstance(self.output_ids, list) or len(self.output_ids) != 1:
            raise LoadError("the stream carried no output ids (return_output_ids_in_sglext): SGLang 0.5.23 sends them")
        tokens, (output_ids,) = self.usage["completion_tokens"], self.output_ids
        if tokens != len(output_ids):
            raise LoadError(f"usage counts {tokens} completion tokens but the engine sent {len(output_ids)} ids")
        if speculates and self.details is None and tokens > 1:
            raise LoadError(f"the engine speculates but sent no speculation details with {tokens} tokens")
        if not speculates and self.details is not None:
            raise LoadError("the engine should not speculate, but it sent speculation details")
        histogram = histogram_of_details(self.details) if self.details is not None else []
        # Prefill gives the first token, each step its accepted ones and one more; only the last step may be cut.
        surplus = 1 + verify_steps(histogram) + accepted_tokens(histogram) - tokens
        if histogram and surplus > len(histogram) - 1:
            raise LoadError(
                f"the histogram {histogram} accounts for {surplus} tokens more than the {tokens} that came: do not "
                "trust acceptance figures of this engine version"
            )
        return Answer(
            prompt_id=prompt.id,
            category=prompt.category,
            tokens=tokens,
            seconds=seconds,
            ttft_s=self.arrivals[0] if self.arrivals else self.finished_at,
            gaps_s=tuple(after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)),
            histogram=tuple(histogram),
            output_ids=tuple(output_ids),
        )


def _json_headers(endpoint: Endpoint) -> dict[str, str]:
    return {**endpoint.headers, "content-type": "application/json"}


def _error_text(body: bytes) -> str:
    """The message in an error body of any of SGLang's shapes, or the start of the body."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace").strip()[:300]
    error = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:300]


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
