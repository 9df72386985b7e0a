"""A fake of SGLang's OpenAI routes that writes prompts and answers on cue, for the tests of `generate` alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
END = 2
ANSWER = list(range(100, 140))


def prompt_of(body: Body) -> str:
    """A prompt of its own that differs with the seed, as sampling would."""
    return f" number {body.get('seed', 0)} of things that one might ask"


@dataclass
class Cues:
    """What it says. `status` holds one for each request that is to fail, first come first served."""

    prompt: Callable[[Body], str] = prompt_of
    prompt_ends: Callable[[Body], bool] = lambda body: True
    answer: Callable[[Body], list[int]] = lambda body: [*ANSWER, END]
    text: Callable[[Body], str] = lambda body: "An answer."
    status: list[int] = field(default_factory=list)
    ids: bool = True


class FakeEndpoint(ThreadingHTTPServer):
    """Serves in a thread of its own until `close`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cues = Cues()
        self.bodies: list[tuple[str, Body]] = []
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Silence."""

    def do_POST(self) -> None:
        assert isinstance(self.server, FakeEndpoint)
        body: Body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        cues = self.server.cues
        with self.server.lock:
            self.server.bodies.append((self.path, body))
            status = cues.status.pop(0) if cues.status else 200
        if status != 200:
            self.reply(status, {"message": "busy"})
        elif self.path == "/v1/completions":
            reason = "stop" if cues.prompt_ends(body) else "length"
            self.reply(200, {"choices": [{"text": cues.prompt(body), "finish_reason": reason}]})
        else:
            ids = {"input_ids": [1, 5, 6], "output_ids": [cues.answer(body)]} if cues.ids else None
            message = {"role": "assistant", "content": cues.text(body)}
            self.reply(200, {"choices": [{"message": message, "finish_reason": "stop"}], "sglext": ids})

    def reply(self, status: int, found: Body) -> None:
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
