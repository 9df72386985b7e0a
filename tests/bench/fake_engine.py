"""FakeEngine: stands where server.engine.Engine does and streams what SGLang 0.5.23 streams, faults included.

Its answers depend on the prompt alone, so that two drafters agree; what a drafter accepts, and how its engine
misbehaves, is written in a Script.
"""

import asyncio
import hashlib
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from aiohttp import web

from server.drafters import ActiveDrafter, LaunchError
from server.engine import EngineError
from tests.app_thread import AppThread


@dataclass
class Script:
    """What one drafter's engine does. `fault` is one of the branches in FakeEngine._chat and start."""

    steps: tuple[int, ...] = ()  # accepted draft tokens of each verify step of every answer
    algorithm: str = "EAGLE3"
    fault: str = ""
    fault_at: int = 0  # the measured request, from 0, that meets the fault
    changed: tuple[str, ...] = ()  # prompts that are answered differently
    looping: tuple[str, ...] = ()  # prompts whose answer repeats itself
    delay_s: float = 0.0
    name: str = ""
    simulated: bool = False
    start_s: float = 0.0  # how long a start takes
    together: bool = False  # two steps come in one piece, as when the engine's queue backs up
    gap: float | None = 0.4  # nats by which the plain engine prefers its own token; None gives no figure
    samples: tuple[int, ...] = (1, 2, 3)  # tokens drawn by turns where continuations are sampled
    versions: tuple[str, ...] = ("9.9.9",)  # of the first start, of the next, ...


@dataclass
class Seen:
    """What the engines were asked, in order."""

    starts: list[str] = field(default_factory=list)
    flushes: list[str] = field(default_factory=list)
    questions: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0


class FakeEngine(AppThread):
    scripts: ClassVar[dict[str, Script]] = {}
    seen: ClassVar[Seen] = Seen()
    api_key = "fake-api-key"
    admin_key = "fake-admin-key"

    def __init__(self, profile: Any, drafter: str = "none", *, num_steps: int | None = None) -> None:
        if drafter not in self.scripts:
            raise LaunchError(f"drafter {drafter!r} is neither a name of the profile nor a folder: check the spelling.")
        self.given = drafter
        self.script = self.scripts[drafter]
        steps = num_steps or 3
        self.drafter = (
            ActiveDrafter(drafter, "NONE")
            if self.script.algorithm == "NONE"
            else ActiveDrafter(
                self.script.name or drafter,
                self.script.algorithm,  # type: ignore[arg-type]
                sha256="5" * 64 if self.script.algorithm == "EAGLE3" else None,
                num_steps=steps if self.script.algorithm == "EAGLE3" else 0,
                topk=1,
                draft_tokens=steps + 1,
            )
        )
        self.profile = profile
        self.state = "new"
        self.version = ""
        self.argv: list[str] = []
        self.resolved: dict[str, Any] = {}
        self.served_name = "fake"
        self.simulated = self.script.simulated
        self.headers = {"authorization": f"Bearer {self.api_key}"}
        self.admin_headers = {"authorization": f"Bearer {self.admin_key}"}
        self._measured = 0
        self._random = random.Random(drafter)
        self._lines: list[str] = []

    def start(self, progress: Callable[[str], None]) -> None:  # type: ignore[override]
        self.seen.starts.append(self.given)
        progress("starting the process")
        time.sleep(self.script.start_s)
        if self.script.fault == "does not start":
            self.state = "dead"
            raise EngineError("the engine died (exit code 3) while loading. Its last log lines (x):\n  out of memory")
        if self.script.fault == "start hangs":
            time.sleep(600)
        super().start()
        self.state = "ready"
        self.version = self.script.versions[min(self.seen.starts.count(self.given), len(self.script.versions)) - 1]
        self.resolved = {"dtype": "float32"}
        self.argv = ["python", "-m", "fake", "--port", self.url.rpartition(":")[2], "--model", "m", "--for", self.given]

    def stop(self) -> None:
        self.seen.stops.append(self.given)
        marker = os.environ.get("FAKE_ENGINE_STOPS")
        if marker:
            with Path(marker).open("a") as file:
                file.write(f"{self.given}\n")
        if self.state in ("ready", "dead") and self.url:
            super().stop()
        self.state = "stopped" if self.state != "dead" else "dead"

    def log_tail(self, lines: int = 20) -> list[str]:
        return self._lines[-lines:]

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/server_info", self._server_info)
        return app

    async def _flush(self, request: web.Request) -> web.Response:
        if request.headers.get("authorization") != f"Bearer {self.admin_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self.script.fault == "does not flush":
            return web.Response(status=400, text="Flush cache failed.\n")
        self.seen.flushes.append(self.given)
        return web.Response(text="Cache flushed.\n")

    async def _server_info(self, request: web.Request) -> web.Response:
        if request.headers.get("authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        speculates = self.script.algorithm != "NONE"
        return web.json_response(
            {
                "version": "9.9.9",
                "served_model_name": "fake",
                "model_path": "/elsewhere",
                "dtype": "float32",
                "api_key": self.api_key,
                "speculative_algorithm": self.script.algorithm if speculates else None,
                "speculative_num_steps": 3 if speculates else None,
                "speculative_eagle_topk": 1 if speculates else None,
                "speculative_num_draft_tokens": 4 if speculates else None,
            }
        )

    async def _generate(self, request: web.Request) -> web.Response:
        """Two uses: how likely two tokens are, and continuations drawn at a temperature."""
        body = await request.json()
        if "token_ids_logprob" in body:
            self.seen.questions.append((self.given, body))
            theirs, mine = body["token_ids_logprob"]
            rows = [] if self.script.gap is None else [[[-1.0, theirs, None], [-1.0 - self.script.gap, mine, None]]]
            return web.json_response({"meta_info": {"output_token_ids_logprobs": rows}})
        return web.json_response(
            [
                {
                    "output_ids": [self._random.choice(self.script.samples) for _ in range(asked["max_new_tokens"])],
                    "meta_info": {"finish_reason": None},
                }
                for asked in body["sampling_params"]
            ]
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = await request.json()
        self.seen.running += 1
        self.seen.most_running = max(self.seen.most_running, self.seen.running)
        try:
            return await self._answer(request, body)
        except ConnectionResetError:  # the bench has gone: aiohttp would log it
            return web.Response()
        finally:
            self.seen.running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        prompt = body["messages"][-1]["content"]
        if body.get("return_input_ids_in_sglext"):
            return web.json_response({"choices": [], "sglext": {"input_ids": list(prompt.encode())}})
        fault = ""
        if "owls" not in prompt:
            self.seen.bodies.append((self.given, body))
            if self._measured == self.script.fault_at:
                fault = self.script.fault
            self._measured += 1
        elif self.script.fault == "fails to warm up":
            fault = "400"
        if fault == "400":
            error = {"object": "error", "message": "The input is longer than the context length.", "code": 400}
            return web.json_response(error, status=400)
        answer = self.answer_to(prompt, body["max_tokens"])
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)

        async def send(data: dict[str, Any] | str) -> None:
            text = data if isinstance(data, str) else json.dumps(data)
            # In two writes: a reader must not take a read for an event.
            raw = f"data: {text}\n\n".encode()
            await response.write(raw[:9])
            await response.write(raw[9:])

        def chunk(**fields: Any) -> dict[str, Any]:
            return {"id": "x", "object": "chat.completion.chunk", "model": "fake", "choices": []} | fields

        def piece(choice: int, finish: str | None = None, **delta: Any) -> dict[str, Any]:
            return {"choices": [{"index": choice, "delta": delta, "finish_reason": finish}]}

        number = body.get("n", 1)
        made = [0] * number
        for choice in range(number):
            await send(piece(choice, role="assistant", content=""))
        for place, (size, choice) in enumerate((size, choice) for size in answer.pieces for choice in range(number)):
            made[choice] += size
            if self.script.delay_s:
                await asyncio.sleep(self.script.delay_s)
            if self.script.together and place % 2 and made[choice] < len(answer.ids):
                continue  # its text comes with the next
            usage = {"prompt_tokens": 5, "completion_tokens": made[choice]}
            await send(chunk(usage=usage, **piece(choice, content=f"{place} " * size)))
            if fault == "dies" and place == 1:
                self._lines += [f"line {count}" for count in range(30)] + ["Segmentation fault"]
                self.state = "dead"
                self.die(request)
                await asyncio.sleep(30)
            if fault == "cut off" and place == 1:
                return response
            if fault == "goes silent" and place == 1:
                await asyncio.sleep(30)
        if fault == "breaks off":
            await send({"error": {"message": "Out of KV cache.", "type": "InternalServerError", "code": 500}})
            await send("[DONE]")
            return response
        if fault == "not json":
            await send("{half")
        for choice in range(number):
            await send(chunk(**piece(choice, finish="abort" if fault == "aborts" else "length")))
        extension: dict[str, Any] = {"output_ids": [answer.ids] * number}
        if self.script.algorithm != "NONE" and answer.histogram:
            extension["spec_tokens_details"] = [answer.details] * number if number > 1 else answer.details
        if fault == "no details":
            extension.pop("spec_tokens_details")
        if fault == "speculates all the same":
            extension["spec_tokens_details"] = answer.details
        if fault == "miscounts":
            extension["spec_tokens_details"] = {**answer.details, "spec_verify_ct": 1000}
        if fault == "counts what never came":
            more = SimpleNamespace(histogram=[*answer.histogram[:-1], answer.histogram[-1] + 7])
            extension["spec_tokens_details"] = details_of(more.histogram)
        if fault == "no ids":
            extension.pop("output_ids")
        if fault == "fewer ids":
            extension["output_ids"] = [answer.ids[:-1]] * number
        await send(chunk(sglext=extension))
        if fault != "no usage":
            count = len(answer.ids) * number
            await send(chunk(usage={"prompt_tokens": 5, "completion_tokens": count, "total_tokens": count + 5}))
        if fault != "no done":
            await send("[DONE]")
        return response

    def answer_to(self, prompt: str, max_tokens: int) -> SimpleNamespace:
        """ids, the number of tokens in each piece, histogram and details of the answer that is streamed."""
        steps, length, histogram, pieces = list(self.script.steps), 1, [0] * 8, [1]
        while length < max_tokens and self.script.algorithm != "NONE" and steps:
            accepted = steps[sum(histogram) % len(steps)]
            histogram[accepted] += 1
            pieces.append(min(accepted + 1, max_tokens - length))
            length += pieces[-1]
        if self.script.algorithm == "NONE":
            pieces, length = [1] * max_tokens, max_tokens
        while histogram and not histogram[-1]:
            histogram.pop()  # the engine's list ends at the most that was ever accepted
        key = prompt + ("!" if prompt in self.script.changed else "")
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big")
        ids = (
            [7] * length
            if prompt in self.script.looping
            else [(seed + place * 7919) % 50_000 for place in range(length)]
        )
        return SimpleNamespace(ids=ids, pieces=pieces, histogram=histogram, details=details_of(histogram))


def details_of(histogram: list[int]) -> dict[str, Any]:
    accepted = sum(count * steps for count, steps in enumerate(histogram))
    return {
        "spec_accept_rate": 0.5,
        "spec_accept_length": 1.5,
        "spec_num_correct_drafts": accepted,
        "spec_num_proposed_drafts": 3 * sum(histogram),
        "spec_verify_ct": sum(histogram),
        "spec_correct_drafts_histogram": histogram,
        "spec_cap_lens_histogram": [],
    }
