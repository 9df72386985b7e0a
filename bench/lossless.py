"""Does speculation change a greedy answer? Where it does: at which token, and was that a near tie?

In exact arithmetic it changes none, and in float32 none is expected. In bfloat16 a verify step adds up in another order
than a decode step, so two tokens that the target finds all but equally likely may change places; after that the answers
differ because the texts do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from bench.load import CONNECT_TIMEOUT_S, IDLE_TIMEOUT_S, Endpoint, Sampling, request_body
from bench.stream import Answer, LoadError, error_text
from drafter.data.prompts import Prompt
from drafter.workers import run_workers

# Nats between the two tokens below which rounding can change which is first: a few units in the last place of logits
# of a usual size (16 to 32, where one unit of bfloat16 is 0.125, of float16 0.016, and of float32 2e-6).
NEAR_TIE = {"float32": 1e-3, "float16": 0.06, "bfloat16": 0.5}
AT_ONCE = 4


@dataclass(frozen=True)
class Pair:
    """An answer and the baseline's to the same request. `repeat` is the pass they are of."""

    repeat: int
    mine: Answer
    theirs: Answer

    @property
    def position(self) -> int | None:
        """The first token in which they differ, from 0; the shorter one's length where it only ends; None if equal."""
        if self.mine.output_ids == self.theirs.output_ids:
            return None
        both = zip(self.mine.output_ids, self.theirs.output_ids, strict=False)
        shorter = min(len(self.mine.output_ids), len(self.theirs.output_ids))
        return next((place for place, (a, b) in enumerate(both) if a != b), shorter)

    @property
    def tokens(self) -> tuple[int, int] | None:
        """The baseline's and this token at that position, where both have one."""
        place = self.position
        if place is None or place >= min(len(self.mine.output_ids), len(self.theirs.output_ids)):
            return None
        return self.theirs.output_ids[place], self.mine.output_ids[place]


@dataclass(frozen=True)
class Question:
    """How likely are two tokens after a prompt and so many tokens of an answer?"""

    prompt_id: str
    thinking: str
    before: tuple[int, ...]
    tokens: tuple[int, int]


Gaps = Mapping[Question, float | None]


def question_of(pair: Pair, thinking: str) -> Question | None:
    """What to ask about a pair that differs; None where nothing can be asked."""
    place, tokens = pair.position, pair.tokens
    if place is None or tokens is None:
        return None
    return Question(pair.mine.prompt_id, thinking, pair.mine.output_ids[:place], tokens)


def greedy_equal(pairs: Sequence[Pair], thinking: str, gaps: Gaps | None, dtype: str) -> dict[str, Any]:
    """How many answers are the baseline's, token for token, and what is known of those that are not.

    gaps: nats by which the target prefers the baseline's token; None where nobody was asked, and then nothing is said
    of near ties.
    """
    different = [pair for pair in pairs if pair.position is not None]
    found: dict[str, Any] = {"equal": len(pairs) - len(different), "total": len(pairs)}
    if gaps is None:
        return found
    rows = []
    for pair in different:
        row: dict[str, Any] = {"prompt_id": pair.mine.prompt_id, "repeat": pair.repeat, "position": pair.position}
        question = question_of(pair, thinking)
        gap = gaps.get(question) if question else None
        if gap is not None:
            row |= {"gap": gap} | ({"near_tie": abs(gap) <= NEAR_TIE[dtype]} if dtype in NEAR_TIE else {})
        rows.append(row)
    return found | {"near_ties": sum(row.get("near_tie", False) for row in rows), "differences": rows}


def ask_gaps(
    endpoint: Endpoint, questions: Sequence[Question], prompts: Mapping[str, Prompt], sampling: Sampling
) -> dict[Question, float | None]:
    """Ask an engine that does not speculate. None where the engine gave no figure. Raises LoadError."""
    return asyncio.run(_ask_all(endpoint, questions, prompts, sampling))


def prompt_ids(endpoint: Endpoint, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[int]]:
    """The token ids of each prompt by the engine's own template. Raises LoadError."""

    async def ask() -> list[list[int]]:
        async with _session() as session:
            return [await _prompt_ids(session, endpoint, prompt, sampling) for prompt in prompts]

    return asyncio.run(ask())


async def _ask_all(
    endpoint: Endpoint, questions: Sequence[Question], prompts: Mapping[str, Prompt], sampling: Sampling
) -> dict[Question, float | None]:
    found: dict[Question, float | None] = {}
    known: dict[tuple[str, str], list[int]] = {}
    waiting = iter(dict.fromkeys(questions))
    async with _session() as session:

        async def work() -> None:
            for question in waiting:
                key = (question.prompt_id, question.thinking)
                if key not in known:
                    known[key] = await _prompt_ids(
                        session, endpoint, prompts[question.prompt_id], _thinking(sampling, question.thinking)
                    )
                found[question] = await _gap(session, endpoint, known[key], question)

        await run_workers(work, AT_ONCE)
    return found


def _thinking(sampling: Sampling, thinking: str) -> Sampling:
    assert thinking in ("default", "on", "off")
    return Sampling(sampling.max_tokens, sampling.temperature, sampling.seed, thinking)  # type: ignore[arg-type]


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=IDLE_TIMEOUT_S)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(keepalive_timeout=2.0))


async def _prompt_ids(
    session: aiohttp.ClientSession, endpoint: Endpoint, prompt: Prompt, sampling: Sampling
) -> list[int]:
    body = request_body(endpoint.model, prompt.messages, sampling, 0)
    for name in ("stream", "stream_options", "n"):
        body.pop(name, None)
    answer = await _post(
        session, endpoint, "/v1/chat/completions", body | {"max_tokens": 1, "return_input_ids_in_sglext": True}
    )
    ids = (answer.get("sglext") or {}).get("input_ids")
    if not isinstance(ids, list):
        raise LoadError(f"prompt {prompt.id}: the engine sent no input ids (return_input_ids_in_sglext)")
    return [int(token) for token in ids]


async def _gap(
    session: aiohttp.ClientSession, endpoint: Endpoint, prompt: Sequence[int], question: Question
) -> float | None:
    body = {
        "input_ids": [*prompt, *question.before],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "token_ids_logprob": list(question.tokens),
    }
    answer = await _post(session, endpoint, "/generate", body)
    rows = answer.get("meta_info", {}).get("output_token_ids_logprobs") or []
    likely = {row[1]: row[0] for row in (rows[0] if rows else [])}
    theirs, mine = (likely.get(token) for token in question.tokens)
    return None if theirs is None or mine is None else float(theirs - mine)


async def _post(session: aiohttp.ClientSession, endpoint: Endpoint, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {**endpoint.headers, "content-type": "application/json"}
    try:
        async with session.post(f"{endpoint.url}{path}", data=orjson.dumps(body), headers=headers) as response:
            raw = await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise LoadError(f"{path}: the connection failed ({str(error) or type(error).__name__})") from error
    if response.status != 200:
        raise LoadError(f"{path} answered {response.status}: {error_text(raw)}")
    found: dict[str, Any] = orjson.loads(raw)
    return found
