"""A fake of SGLang's OpenAI routes that writes prompts and answers on cue, for the tests of `generate` alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.app_thread import AppThread

Body = dict[str, Any]
END = 2
ANSWER = list(range(100, 140))


def prompt_of(body: Body) -> str:
    """A prompt of its own that differs with the seed, as sampling would."""
    return f" number {body.get('seed', 0)} of things that one might ask"


@dataclass
class Cues:
    """What it says. `status` holds one for each request, first come first served: 200 is answered, as all are after
    them. `takes_s`: how long an answer takes."""

    prompt: Callable[[Body], str] = prompt_of
    prompt_ends: Callable[[Body], bool] = lambda body: True
    answer: Callable[[Body], list[int]] = lambda body: [*ANSWER, END]
    text: Callable[[Body], str] = lambda body: "An answer."
    status: list[int] = field(default_factory=list)
    ids: bool = True
    takes_s: float = 0.0


class FakeEndpoint(AppThread):
    """`bodies` holds the path and the body of every request; `most` of them were answered at a time."""

    def __init__(self) -> None:
        self.cues = Cues()
        self.bodies: list[tuple[str, Body]] = []
        self.running = self.most = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        body: Body = await request.json()
        cues = self.cues
        self.bodies.append((request.path, body))
        if cues.status and (status := cues.status.pop(0)) != 200:
            return web.json_response({"message": "busy"}, status=status)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(cues.takes_s)
        self.running -= 1
        if request.path == "/v1/completions":
            reason = "stop" if cues.prompt_ends(body) else "length"
            return web.json_response({"choices": [{"text": cues.prompt(body), "finish_reason": reason}]})
        ids = {"input_ids": [1, 5, 6], "output_ids": [cues.answer(body)]} if cues.ids else None
        message = {"role": "assistant", "content": cues.text(body)}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}], "sglext": ids})
