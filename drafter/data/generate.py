"""Lets a target write the conversations that its drafter learns from, through any OpenAI endpoint of SGLang's.

The target writes user prompts of its own, or is given a file of them, and answers. The engine's own token ids are
kept, so that no template is run again. Works on hundreds at a time; an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from drafter.acceptance import before_loop, is_looping
from drafter.data.conversations import Conversation, read_conversations
from drafter.data.overlap import Overlap
from drafter.data.prompts import Prompt

CONNECT_TIMEOUT_S, IDLE_TIMEOUT_S = 10.0, 900.0
ATTEMPTS = 3
ATTEMPTS_FOR_ONE = 20  # conversations tried for each that is kept, before giving up
PROBE_TOKENS = 16
BYTES_A_TOKEN = 11  # of a line: one id as text, and the text of the prompt
MIN_PROMPT_WORDS = 4
# At 1.0 a small model's prompts stop making sense. No top_k: one request that has it makes SGLang's sampler on a CPU
# sort the whole vocabulary for every request of the batch, which was half of the time of a step.
PROMPT_TEMPERATURE = 0.8
MIN_ANSWER_TOKENS = 8
SENTENCE_END = re.compile(r"[.?!:](?=\s)|\n")
PLACEHOLDER = re.compile(r"\[[A-Za-z][^\]\n]{2,40}\](?!\()|(?<!\w)<[A-Z][A-Za-z _]{2,30}>|\{\{.*?\}\}|_{4,}")


class GenerateError(RuntimeError):
    """An endpoint that cannot write the conversations, in one sentence with the fix."""


@dataclass(frozen=True)
class Endpoint:
    """Where to ask. `headers` carry the key, where there is one."""

    url: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Template:
    """The target's chat template around a first user message: what stands before it, and what ends it."""

    before: str
    end: str
    end_ids: frozenset[int]

    @classmethod
    def of_folder(cls, folder: Path, own_prompts: bool) -> Template:
        """Read it from a target folder; without prompts of its own only the end tokens matter. Raises GenerateError."""
        import transformers

        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            found = json.loads((folder / "config.json").read_text("utf-8")).get("eos_token_id")
            end_ids = {*(found if isinstance(found, list) else [found]), tokenizer.eos_token_id} - {None}
            if not own_prompts:
                return cls("", "", frozenset(end_ids))
            marked = tokenizer.apply_chat_template([{"role": "user", "content": "\x00"}], tokenize=False)
        except (OSError, ValueError) as error:
            raise GenerateError(
                f"{folder} has no usable tokenizer with a chat template ({error}): name the target's folder."
            ) from None
        before, _, after = marked.partition("\x00")
        ids = tokenizer.encode(after.strip(), add_special_tokens=False)
        if not ids:
            raise GenerateError(
                f"the chat template of {folder} puts no token after a user's message, so the target's own prompts "
                "would have no end: give prompts to answer with --prompts."
            )
        return cls(before, tokenizer.decode(ids[:1]), frozenset(end_ids))


@dataclass(frozen=True)
class Plan:
    """What is to be written.

    prompts: to be answered, in turn; where there are none the target writes its own, each beginning with one of
    `openers` (an empty one leaves the beginning open too). Each prompt is answered once at each of `temperatures`.
    past: so many tokens are generated after the answer's end, which a walk of greedy answers needs.
    """

    count: int
    prompts: Sequence[Prompt] = ()
    openers: Sequence[str] = ("",)
    max_tokens: int = 256
    prompt_tokens: int = 96
    temperatures: Sequence[float] = (0.0, 0.7)
    past: int = 0
    concurrency: int = 64
    seed: int = 0


class Rejected(ValueError):
    """A prompt or an answer that is not worth learning from. Its text is the reason, one of few."""


def check_prompt(text: str, overlap: Overlap) -> None:
    """Raise Rejected unless a prompt that the target wrote reads as a request of its own."""
    if len(text.split()) < MIN_PROMPT_WORDS:
        raise Rejected("prompt too short")
    if PLACEHOLDER.search(text):
        raise Rejected("prompt with a placeholder")
    if overlap.with_prompt(text):
        raise Rejected("prompt of a benchmark")


def whole_sentences(text: str) -> str:
    """A prompt that was cut short, up to where its last whole sentence or line ends. Raises Rejected if it has none."""
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    if not ends:
        raise Rejected("prompt without an end")
    return text[: ends[-1]]


def worth_learning(answer_ids: Sequence[int], text: str, overlap: Overlap) -> Sequence[int]:
    """What of an answer is worth learning from: all of it, or what comes before it loops. Raises Rejected."""
    kept = before_loop(answer_ids) if is_looping(answer_ids) else answer_ids
    if len(kept) < MIN_ANSWER_TOKENS:
        raise Rejected("answer too short" if kept is answer_ids else "answer that loops")
    if overlap.with_prompt(text):
        raise Rejected("answer with a benchmark's text")
    return kept


def answer_length(output_ids: Sequence[int], max_tokens: int, end_ids: frozenset[int]) -> int:
    """Tokens of the answer within ids that were generated past its end: up to the first end token, at most
    `max_tokens`."""
    found = next((at + 1 for at, token in enumerate(output_ids) if token in end_ids), len(output_ids))
    return min(found, max_tokens)


def answer_id(name: str, at: int) -> str:
    """The id of a prompt's answer number `at`."""
    return f"{name}/{at}" if at else name


class Writer:
    """One run: asks, filters, counts."""

    def __init__(
        self, session: aiohttp.ClientSession, endpoint: Endpoint, template: Template, plan: Plan, overlap: Overlap
    ) -> None:
        self._session, self._endpoint, self._template = session, endpoint, template
        self._plan, self._overlap = plan, overlap
        self._seen: set[str] = set()
        self.rejected: Counter[str] = Counter()
        self.tokens = 0

    def skip(self, conversation: Conversation) -> None:
        """This one is there already: its prompt is not written again."""
        self._seen.add(str(conversation.messages[-1]["content"]))

    async def conversations(self, number: int) -> list[Conversation]:
        """Write prompt `number` and its answers; their choices follow from the plan's seed and the number alone.

        What is not worth learning from is counted in `rejected`. Raises GenerateError.
        """
        try:
            name, messages, choice = await self._asked(number)
        except Rejected as reason:
            self.rejected[str(reason)] += 1
            return []
        answers = await asyncio.gather(
            *(
                self._answer(answer_id(name, at), messages, temperature, choice.getrandbits(31))
                for at, temperature in enumerate(self._plan.temperatures)
            )
        )
        return [answer for answer in answers if answer is not None]

    async def _asked(self, number: int) -> tuple[str, list[dict[str, Any]], random.Random]:
        choice = random.Random(f"{self._plan.seed} {number}")
        if self._plan.prompts:
            prompt = self._plan.prompts[number]
            if not self._plan.past and any(self._overlap.with_prompt(str(said["content"])) for said in prompt.messages):
                raise Rejected("prompt of a benchmark")
            messages, name = [dict(message) for message in prompt.messages], prompt.id
        else:
            text = await self._prompt(choice)
            messages, name = [{"role": "user", "content": text}], f"self/{self._plan.seed}/{number}"
        return name, messages, choice

    async def _prompt(self, choice: random.Random) -> str:
        opener = choice.choice(self._plan.openers)
        body = {
            "prompt": self._template.before + opener,
            "max_tokens": self._plan.prompt_tokens,
            "temperature": PROMPT_TEMPERATURE,
            "seed": choice.getrandbits(31),
            "stop": [self._template.end],
        }
        written = (await self._post("/v1/completions", body))["choices"][0]
        text: str = opener + written["text"]
        text = (text if written["finish_reason"] == "stop" else whole_sentences(text)).strip()
        check_prompt(text, self._overlap)
        if text in self._seen:
            raise Rejected("prompt written before")
        self._seen.add(text)
        return text

    async def _answer(
        self, name: str, messages: list[dict[str, Any]], temperature: float, seed: int
    ) -> Conversation | None:
        plan = self._plan
        body = {
            "messages": messages,
            "max_tokens": plan.max_tokens + plan.past,
            "temperature": temperature,
            "seed": seed,
            "ignore_eos": plan.past > 0,
            "return_input_ids_in_sglext": True,
            "return_output_ids_in_sglext": True,
        }
        answer = await self._post("/v1/chat/completions", body)
        try:
            given = answer["sglext"]
            (output_ids,), input_ids = given["output_ids"], given["input_ids"]
            text = answer["choices"][0]["message"]["content"] or ""
        except (KeyError, TypeError, ValueError, IndexError):
            raise GenerateError(
                f"{self._endpoint.url} sent no token ids (sglext.input_ids, sglext.output_ids): it takes SGLang 0.5.23."
            ) from None
        self.tokens += len(output_ids)
        length = answer_length(output_ids, plan.max_tokens, self._template.end_ids) if plan.past else len(output_ids)
        output_ids = output_ids[: length + plan.past]
        if plan.past == 0:  # a benchmark's own answers are asked for to be walked, never to be learned from
            try:
                output_ids = list(worth_learning(output_ids, text, self._overlap))
            except Rejected as reason:
                self.rejected[str(reason)] += 1
                return None
        meta = {"temperature": temperature} | ({"past": len(output_ids) - length} if plan.past else {})
        return Conversation(name, messages, input_ids, output_ids, meta)

    async def _post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask, again where the connection failed. Raises GenerateError."""
        body["model"] = self._endpoint.model
        for attempt in range(ATTEMPTS):
            try:
                async with self._session.post(
                    f"{self._endpoint.url}{route}", json=body, headers=self._endpoint.headers
                ) as response:
                    if response.status in (429, 503) and attempt + 1 < ATTEMPTS:
                        await asyncio.sleep(2**attempt)
                        continue
                    if response.status != 200:
                        said = (await response.text()).strip()[:300]
                        raise GenerateError(f"{self._endpoint.url}{route} answered {response.status}: {said}")
                    found: dict[str, Any] = await response.json()
                    return found
            except (aiohttp.ClientError, TimeoutError) as error:
                if attempt + 1 == ATTEMPTS:
                    raise GenerateError(
                        f"{self._endpoint.url} does not answer ({error or type(error).__name__}): is the engine up? "
                        "Run the same command again to go on."
                    ) from None
                await asyncio.sleep(2**attempt)
        raise AssertionError("the last attempt returns or raises")


def existing(file: Path) -> list[Conversation]:
    """The conversations that an interrupted run has left; a line that was cut short is taken off the file."""
    if not file.exists():
        return []
    raw = file.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if whole != raw:
        with file.open("r+b") as stream:
            stream.truncate(len(whole))
    return list(read_conversations(file)) if whole else []


def numbers_left(plan: Plan, there: Sequence[Conversation]) -> Sequence[int]:
    """Which conversations are still to be written: the prompts not yet answered, or numbers past the highest one."""
    if plan.prompts:
        done = {conversation.id for conversation in there}
        return [
            number
            for number, prompt in enumerate(plan.prompts)
            if not any(answer_id(prompt.id, at) in done for at in range(len(plan.temperatures)))
        ]
    prefix = f"self/{plan.seed}/"
    used = [int(name.id.removeprefix(prefix).split("/")[0]) for name in there if name.id.startswith(prefix)]
    start = max(used, default=-1) + 1
    return range(start, start + ATTEMPTS_FOR_ONE * plan.count)


@dataclass(frozen=True)
class Outcome:
    """What a run has written. tokens: generated in this run, rejected ones included."""

    written: int
    there_before: int
    rejected: Mapping[str, int]
    tokens: int
    seconds: float


async def probe(endpoint: Endpoint, concurrency: int) -> float:
    """Tokens per second at this concurrency, by one short burst. Raises GenerateError."""
    async with _session() as session:
        writer = Writer(session, endpoint, Template("", "", frozenset()), Plan(1), Overlap(()))
        body = {"prompt": "The", "max_tokens": PROBE_TOKENS, "temperature": 1.0, "ignore_eos": True}
        start = time.perf_counter()
        await asyncio.gather(*(writer._post("/v1/completions", dict(body)) for _ in range(concurrency)))
        return concurrency * PROBE_TOKENS / (time.perf_counter() - start)


async def generate(
    endpoint: Endpoint,
    template: Template,
    plan: Plan,
    overlap: Overlap,
    out: Path,
    on_progress: Callable[[int, Writer], None],
) -> Outcome:
    """Append conversations to `out` until it holds `plan.count` of them, or answers to each prompt.

    on_progress is called after each prompt, with the number of its answers that were kept.
    Raises GenerateError or ConversationError; what was written stays.
    """
    there = existing(out)
    wanted = max(0, plan.count - len(there))
    numbers = iter(numbers_left(plan, there))
    written = 0
    started = time.perf_counter()
    async with _session() as session:
        writer = Writer(session, endpoint, template, plan, overlap)
        for conversation in there:
            writer.skip(conversation)
        with out.open("a", encoding="utf-8") as stream:

            async def work() -> None:
                nonlocal written
                for number in numbers:
                    if written >= wanted:
                        return
                    found = (await writer.conversations(number))[: max(0, wanted - written)]
                    # In one piece: a prompt that has one answer on disk is not asked again.
                    stream.write("".join(conversation.to_json() + "\n" for conversation in found))
                    stream.flush()
                    written += len(found)
                    on_progress(len(found), writer)

            workers = [asyncio.create_task(work()) for _ in range(plan.concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
    seconds = time.perf_counter() - started
    return Outcome(written, len(there), dict(writer.rejected), writer.tokens, seconds)


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=IDLE_TIMEOUT_S)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0))
