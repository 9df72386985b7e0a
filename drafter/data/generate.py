"""Lets a target write the conversations that its drafter learns from, through any OpenAI endpoint of SGLang's.

The target writes user prompts of its own, or is given a file of them, and answers. The engine's own token ids are
kept, so that no template is run again. Works on hundreds at a time and on any number in all: nothing is held but what
is asked right now and the ids of what is done. A run that was killed goes on where it stopped (ledger.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from drafter.data.asking import Asker, Endpoint, GenerateError, Refused
from drafter.data.conversations import Conversation, read_conversations
from drafter.data.ledger import Ledger, answer_id
from drafter.data.overlap import Overlap
from drafter.data.prompts import Prompt, PromptSource
from drafter.data.template import Template
from drafter.data.worth import Rejected, check_prompt, whole_sentences, worth_learning
from drafter.workers import run_workers

ATTEMPTS_FOR_ONE = 20  # conversations tried for each that is kept, before giving up
PROBE_TOKENS, PROBE_S = 16, 5.0
FRUITLESS = 16  # prompts that were refused, and none answered, before it is taken for the run's fault
BYTES_A_TOKEN = 11  # of a line: one id as text, and the text of the prompt
# At 1.0 a small model's prompts stop making sense. No top_k: one request that has it makes SGLang's sampler on a CPU
# sort the whole vocabulary for every request of the batch, which was half of the time of a step.
PROMPT_TEMPERATURE = 0.8
Thinking = Literal["default", "on", "off"]


@dataclass(frozen=True)
class Plan:
    """What is to be written.

    prompts: to be answered, in turn; where there are none the target writes its own, each beginning with one of
    `openers` (an empty one leaves the beginning open too). Each prompt is answered once at each of `temperatures`.
    past: so many tokens are generated after the answer's end, which a walk of greedy answers needs.
    concurrency: requests at a time. thinking: on or off by the chat template, or as it is without a word.
    token_cap, byte_cap: no prompt is begun that could lead past so many generated tokens, or so large a file, in all.
    """

    count: int
    prompts: PromptSource = ()
    openers: Sequence[str] = ("",)
    max_tokens: int = 256
    prompt_tokens: int = 96
    temperatures: Sequence[float] = (0.0, 0.7)
    past: int = 0
    concurrency: int = 64
    seed: int = 0
    thinking: Thinking = "default"
    token_cap: int | None = None
    byte_cap: int | None = None

    @property
    def answer_tokens(self) -> int:
        """The most that the answers to one prompt can cost."""
        return len(self.temperatures) * (self.max_tokens + self.past)

    def body(self, messages: Sequence[Mapping[str, Any]], temperature: float, seed: int) -> dict[str, Any]:
        """What an answer is asked for with."""
        body = {
            "messages": messages,
            "max_tokens": self.max_tokens + self.past,
            "temperature": temperature,
            "seed": seed,
            "ignore_eos": self.past > 0,
            "return_input_ids_in_sglext": True,
            "return_output_ids_in_sglext": True,
        }
        if self.thinking != "default":  # templates know it by either name
            wanted = self.thinking == "on"
            body["chat_template_kwargs"] = {"thinking": wanted, "enable_thinking": wanted}
        return body


def answer_length(output_ids: Sequence[int], max_tokens: int, end_ids: frozenset[int]) -> int:
    """Tokens of the answer within ids that were generated past its end: up to the first end token, at most
    `max_tokens`."""
    found = next((at + 1 for at, token in enumerate(output_ids) if token in end_ids), len(output_ids))
    return min(found, max_tokens)


class Writer:
    """Asks for one prompt and its answers, filters them, and remembers which prompts the target has written."""

    def __init__(self, asker: Asker, template: Template, plan: Plan, overlap: Overlap) -> None:
        self._asker, self._template, self._plan, self._overlap = asker, template, plan, overlap
        self._seen: set[bytes] = set()

    def skip(self, prompt: str) -> None:
        """This one is there already: it is not written again."""
        self._seen.add(_digest(prompt))

    async def conversations(self, name: str, prompt: Prompt | None) -> Written:
        """The answers to a prompt, or to one that the target writes; what is chosen follows from the plan's seed and
        the prompt's place in it alone. Raises GenerateError."""
        choice = random.Random(f"{self._plan.seed} {name}")
        try:
            messages = self._taken(prompt) if prompt else [{"role": "user", "content": await self._prompt(choice)}]
        except (Rejected, Refused) as reason:
            return Written([], 0, Counter([_reason(reason)]), _refusal(reason))
        found = await asyncio.gather(
            *(
                self._answer(answer_id(name, at), messages, temperature, choice.getrandbits(31))
                for at, temperature in enumerate(self._plan.temperatures)
            )
        )
        rejected = Counter(_reason(each.why) for each in found if each.why is not None)
        kept = [each.conversation for each in found if each.conversation is not None]
        refusals = (_refusal(each.why) for each in found if each.why is not None)
        return Written(kept, sum(each.tokens for each in found), rejected, next((r for r in refusals if r), None))

    def _taken(self, prompt: Prompt) -> list[dict[str, Any]]:
        if not self._plan.past and any(self._overlap.with_prompt(str(said["content"])) for said in prompt.messages):
            raise Rejected("prompt of a benchmark")
        return [dict(message) for message in prompt.messages]

    async def _prompt(self, choice: random.Random) -> str:
        opener = choice.choice(self._plan.openers)
        body = {
            "prompt": self._template.before + opener,
            "max_tokens": self._plan.prompt_tokens,
            "temperature": PROMPT_TEMPERATURE,
            "seed": choice.getrandbits(31),
            "stop": [self._template.end],
        }
        written = (await self._asker.post("/v1/completions", body))["choices"][0]
        text: str = opener + written["text"]
        text = (text if written["finish_reason"] == "stop" else whole_sentences(text)).strip()
        check_prompt(text, self._overlap)
        if _digest(text) in self._seen:
            raise Rejected("prompt written before")
        self.skip(text)
        return text

    async def _answer(self, name: str, messages: list[dict[str, Any]], temperature: float, seed: int) -> _Answer:
        plan = self._plan
        try:
            answer = await self._asker.post("/v1/chat/completions", plan.body(messages, temperature, seed))
        except Refused as reason:
            return _Answer(None, 0, reason)
        try:
            given, said = answer["sglext"], answer["choices"][0]["message"]
            (output_ids,), input_ids = given["output_ids"], given["input_ids"]
            text = f"{said.get('reasoning_content') or ''}\n{said['content'] or ''}"
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            raise GenerateError(
                f"{self._asker.endpoint.url} sent no token ids (sglext.input_ids, sglext.output_ids): it takes SGLang "
                "0.5.23."
            ) from None
        tokens = len(output_ids)
        length = answer_length(output_ids, plan.max_tokens, self._template.end_ids) if plan.past else tokens
        output_ids = output_ids[: length + plan.past]
        if plan.past == 0:  # a benchmark's own answers are asked for to be walked, never to be learned from
            try:
                output_ids = list(worth_learning(output_ids, text, self._overlap))
            except Rejected as reason:
                return _Answer(None, tokens, reason)
        elif length < 2:
            return _Answer(None, tokens, Rejected("answer of one token, in which nothing is drafted"))
        meta: dict[str, Any] = {"temperature": temperature}
        meta |= {"past": len(output_ids) - length} if plan.past else {}
        meta |= {"thinking": plan.thinking} if plan.thinking != "default" else {}
        return _Answer(Conversation(name, messages, input_ids, output_ids, meta), tokens, None)


@dataclass(frozen=True)
class _Answer:
    conversation: Conversation | None
    tokens: int
    why: Rejected | Refused | None


@dataclass(frozen=True)
class Written:
    """What came of a prompt: the answers to keep, the tokens of all, what was left out; `refusal`: what the endpoint
    said where it would not answer."""

    kept: Sequence[Conversation]
    tokens: int
    rejected: Counter[str]
    refusal: str | None


@dataclass(frozen=True)
class Outcome:
    """What a run has written. tokens, tokens_in_all: generated in this run and in all, rejected ones included.
    stopped_by: the cap that ended it, if one did."""

    written: int
    there_before: int
    rejected: Mapping[str, int]
    tokens: int
    tokens_in_all: int
    bytes: int
    retries: int
    seconds: float
    stopped_by: str | None


async def probe(endpoint: Endpoint, concurrency: int) -> float:
    """Tokens per second at this concurrency, by one short burst. Raises GenerateError."""
    async with Asker(replace(endpoint, give_up_s=min(endpoint.give_up_s, PROBE_S)), concurrency) as asker:
        body = {"prompt": "The", "max_tokens": PROBE_TOKENS, "temperature": 1.0, "ignore_eos": True}
        start = time.perf_counter()
        try:
            await asyncio.gather(*(asker.post("/v1/completions", body) for _ in range(concurrency)))
        except Refused as reason:
            raise GenerateError(f"{reason}: it takes an OpenAI endpoint of SGLang's, and the served name.") from None
        return concurrency * PROBE_TOKENS / (time.perf_counter() - start)


class Generator:
    """One run: takes prompts in turn until there are enough, and enters what comes of each in the ledger.

    on_progress is called after each prompt with the number of its answers that were kept.
    """

    def __init__(self, writer: Writer, ledger: Ledger, plan: Plan, on_progress: Callable[[int, Ledger], None]) -> None:
        self._writer, self._ledger, self._plan, self._on_progress = writer, ledger, plan, on_progress
        self._left = self._prompts_left()
        self._running = self._answered = self._fruitless = 0
        self.stopped_by: str | None = None

    async def run(self) -> None:
        """Write. Raises GenerateError; what was written stays."""
        await run_workers(self._work, self._plan.concurrency)

    async def _work(self) -> None:
        plan, ledger = self._plan, self._ledger
        while plan.prompts or ledger.kept < plan.count:
            if self._is_over_cap():
                return
            name, prompt = next(self._left, ("", None))
            if not name:
                return
            self._running += 1
            try:
                found = await self._writer.conversations(name, prompt)
            finally:
                self._running -= 1
            # As many as are wanted: of a prompt with more answers than that, the last ones are left out.
            kept = found.kept if plan.prompts else found.kept[: max(0, plan.count - ledger.kept)]
            if not plan.prompts and found.kept and not kept:
                return
            self._check_refusals(found)
            if plan.byte_cap is not None and ledger.size_with(kept) > plan.byte_cap:
                self.stopped_by = f"{plan.byte_cap / 1e9:g} GB"
                return
            ledger.write(name, kept, found.tokens, found.rejected)
            self._on_progress(len(kept), ledger)

    def _is_over_cap(self) -> bool:
        cap, plan = self._plan.token_cap, self._plan
        # Those that are being answered may all be as long as they can.
        if cap is not None and self._ledger.tokens + (self._running + 1) * plan.answer_tokens > cap:
            self.stopped_by = f"{cap:,} tokens"
        return self.stopped_by is not None

    def _check_refusals(self, found: Written) -> None:
        self._answered += len(found.kept)
        self._fruitless += found.refusal is not None
        if found.refusal is not None and self._fruitless >= FRUITLESS and not self._answered:
            raise GenerateError(f"{found.refusal} (and so {self._fruitless} times, while nothing was answered).")

    def _prompts_left(self) -> Iterator[tuple[str, Prompt | None]]:
        plan, ledger = self._plan, self._ledger
        answers = len(plan.temperatures)
        if plan.prompts:
            for prompt in plan.prompts:
                if not ledger.is_done(prompt.id, answers):
                    yield prompt.id, prompt
            return
        for number in range(ATTEMPTS_FOR_ONE * plan.count + len(ledger.done) + len(ledger.adopted)):
            name = f"self/{plan.seed}/{number}"
            if not ledger.is_done(name, answers):
                yield name, None


async def generate(
    endpoint: Endpoint,
    template: Template,
    plan: Plan,
    overlap: Overlap,
    out: Path,
    on_progress: Callable[[int, Ledger], None],
) -> Outcome:
    """Append conversations to `out` until it holds `plan.count` of them, or answers to each prompt, or a cap is met.

    Raises GenerateError or ConversationError; what was written stays.
    """
    started = time.perf_counter()
    with Ledger(out) as ledger:
        there, before, rejected = ledger.kept, ledger.tokens, Counter(ledger.rejected)
        async with Asker(endpoint, plan.concurrency) as asker:
            writer = Writer(asker, template, plan, overlap)
            if not plan.prompts and there:
                for conversation in read_conversations(out):
                    writer.skip(str(conversation.messages[-1]["content"]))
            generator = Generator(writer, ledger, plan, on_progress)
            await generator.run()
        return Outcome(
            written=ledger.kept - there,
            there_before=there,
            rejected=dict(ledger.rejected - rejected),
            tokens=ledger.tokens - before,
            tokens_in_all=ledger.tokens,
            bytes=ledger.bytes,
            retries=asker.retries,
            seconds=time.perf_counter() - started,
            stopped_by=generator.stopped_by,
        )


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _reason(error: Rejected | Refused) -> str:
    return str(error) if isinstance(error, Rejected) else "refused by the engine"


def _refusal(error: Rejected | Refused) -> str | None:
    return str(error) if isinstance(error, Refused) else None
