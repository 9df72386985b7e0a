"""The gateway before the real SGLang: answers, extensions and errors as clients see them, and clients that leave."""

import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from server.arms import Arm
from server.call import new_rid, read_call
from server.config import GatewayTable
from server.engine import Engine
from tests.engine.served import Served, on
from tests.server.conftest import Gateway
from tests.server.fake_engine import wait_until

pytestmark = [pytest.mark.engine, on("llama-chain")]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKENS = 12
LONG = 900  # tokens that take seconds: nobody waits for them here


@dataclass(frozen=True)
class Through:
    """An engine, and a gateway before it."""

    engine: Engine
    gateway: Gateway

    def ask(self, path: str, **body: Any) -> httpx.Response:
        """A greedy answer of TOKENS tokens, through the gateway."""
        fixed = {"model": self.engine.served_name, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer: httpx.Response = self.gateway.ask(path, **{**fixed, **body})
        return answer

    def direct(self, path: str, **body: Any) -> dict[str, Any]:
        """The same plain answer from the engine itself."""
        fixed = {"model": self.engine.served_name, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        asked = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", **fixed, **body}
        answer = httpx.post(self.engine.url + path, json=asked, headers=self.engine.headers, timeout=60)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    def count(self, name: str) -> float:
        """A metric of the engine's own, 0 where it has none yet."""
        text = httpx.get(f"{self.engine.url}/metrics").text
        return sum(float(value) for value in re.findall(rf"^sglang:{name}\{{.*\}} (\S+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def through(served: Served) -> Iterator[Through]:
    engine = served.engine
    arm = Arm("tiny", engine.url, engine.api_key, engine.admin_key, engine.served_name, engine.drafter.name, "ready")
    gateway = Gateway(arm, GatewayTable()).start()
    yield Through(engine, gateway)
    gateway.stop()


def text_of(choice: dict[str, Any]) -> str:
    held = choice.get("message") or choice.get("delta") or choice
    return held.get("content") or held.get("text") or ""


def messages_of(stream: bytes) -> list[dict[str, Any]]:
    *frames, done, rest = stream.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"prompt": ["the eagle", "a fish"]}, {"prompt": [5, 6, 7]}])
def test_answers_are_the_engines(through: Through, path: str, more: dict[str, Any]) -> None:
    wanted = [(text_of(choice), choice["finish_reason"]) for choice in through.direct(path, **more)["choices"]]
    plain = through.ask(path, **more).json()
    assert [(text_of(choice), choice["finish_reason"]) for choice in plain["choices"]] == wanted
    assert plain["usage"]["completion_tokens"] == TOKENS * len(wanted)
    assert "sglext" not in plain

    messages = messages_of(through.ask(path, stream=True, **more).content)
    assert all(message["choices"] for message in messages)
    assert not any("sglext" in message or message.get("usage") for message in messages)
    texts, ends = [""] * len(wanted), [""] * len(wanted)
    for choice in (choice for message in messages for choice in message["choices"]):
        texts[choice["index"]] += text_of(choice)
        ends[choice["index"]] = choice["finish_reason"] or ""
    assert list(zip(texts, ends, strict=True)) == wanted


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("n", [1, 2])
def test_what_was_asked_for_is_there(through: Through, path: str, n: int) -> None:
    wishes = {"n": n, "return_spec_tokens_details": True, "stream": True, "stream_options": {"include_usage": True}}
    *_, extension, usage = messages_of(through.ask(path, **wishes).content)
    assert extension["choices"] == usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == TOKENS * n
    details = extension["sglext"]["spec_tokens_details"]
    assert isinstance(details, list) == (n > 1)
    plain = through.ask(path, n=n, return_spec_tokens_details=True).json()["sglext"]["spec_tokens_details"]
    assert isinstance(plain, list) == (n > 1)


def test_token_ids_stay_when_the_statistics_go(through: Through) -> None:
    wish = {"return_output_ids_in_sglext": True}
    plain = through.ask(CHAT, **wish).json()["sglext"]
    assert list(plain) == ["output_ids"]
    streamed = messages_of(through.ask(CHAT, stream=True, **wish).content)[-1]["sglext"]
    assert streamed == plain
    assert len(plain["output_ids"][0]) == TOKENS


def test_openai_client(through: Through) -> None:
    client = openai.OpenAI(base_url=f"{through.gateway.url}/v1", api_key="x", max_retries=0)
    asked: dict[str, Any] = {"model": through.engine.served_name, "max_tokens": TOKENS, "temperature": 0}
    asked["messages"] = [{"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = client.chat.completions.create(stream=True, **asked)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole != ""


REFUSED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": "warm"},
    "messages": {"messages": "no"},
    "max_tokens": {"max_tokens": 5000},
    "too_long": {"messages": [{"role": "user", "content": "x " * 3000}]},
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("bad", REFUSED.values(), ids=REFUSED)
def test_the_engines_refusals_have_openais_shape(through: Through, bad: dict[str, Any], stream: bool) -> None:
    answer = through.ask(CHAT, stream=stream, **bad)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and ".py" not in error["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(
    ("path", "more", "answers"),
    [
        (CHAT, {}, 1),
        (CHAT, {"n": 2}, 2),
        (COMPLETIONS, {}, 1),
        (COMPLETIONS, {"prompt": ["the eagle", "a fish"]}, 2),
    ],
    ids=["chat", "chat-n2", "completions", "completions-list"],
)
def test_a_client_that_leaves_frees_the_engine(
    through: Through, path: str, more: dict[str, Any], answers: int, stream: bool
) -> None:
    aborted = through.count("num_aborted_requests_total")
    made = through.count("generation_tokens_total")
    client = send(through, path, max_tokens=LONG, ignore_eos=True, stream=stream, **more)
    wait_until(lambda: through.count("num_running_reqs") > 0, timeout=30)
    client.close()
    wait_until(lambda: through.count("num_running_reqs") == through.count("num_queue_reqs") == 0, timeout=30)
    assert through.count("num_aborted_requests_total") > aborted
    wait_until(lambda: through.gateway.metric("eyas_inflight_requests") == 0)
    assert through.count("generation_tokens_total") - made < LONG * answers
    assert through.ask(path).status_code == 200


@pytest.mark.parametrize(
    ("more", "stops"),
    [({}, True), ({"prompt": ["the eagle", "a fish"]}, True), ({"n": 2}, False)],
    ids=["single", "list", "n2"],
)
def test_the_abort_alone_stops_what_has_an_id_of_ours(through: Through, more: dict[str, Any], stops: bool) -> None:
    """The second measure without the first: the connection stays open. For n > 1 only the first one works."""
    asked = {"model": through.engine.served_name, "prompt": "hi", "max_tokens": LONG, "ignore_eos": True, **more}
    call = read_call(COMPLETIONS, json.dumps(asked).encode(), new_rid(), through.engine.served_name, None)
    with httpx.Client(base_url=through.engine.url, timeout=60) as client, ThreadPoolExecutor(1) as pool:
        headers = {**through.engine.headers, "content-type": "application/json"}
        answer = pool.submit(client.post, COMPLETIONS, content=call.body, headers=headers)
        wait_until(lambda: through.count("num_running_reqs") == call.answers, timeout=30)
        assert bool(call.abort_ids) == stops
        for rid in call.abort_ids:
            stopped = httpx.post(
                f"{through.engine.url}/abort_request", json={"rid": rid}, headers=through.engine.admin_headers
            )
            assert stopped.status_code == 200
        if stops:
            tokens = answer.result().json().get("usage", {}).get("completion_tokens", 0)
            assert tokens < LONG * call.answers
        else:
            client.close()
            answer.exception()
    wait_until(lambda: through.count("num_running_reqs") == through.count("num_queue_reqs") == 0, timeout=30)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_logprobs_come_with_speculation(through: Through, stream: bool) -> None:
    """Engines have crashed of the two together; this one answers, and says as many as it made tokens."""
    asked = {"logprobs": True, "top_logprobs": 2, "stream": stream}
    answer = through.ask(CHAT, **asked)
    messages = messages_of(answer.content) if stream else [answer.json()]
    held = [choice["logprobs"] for message in messages for choice in message["choices"]]
    assert sum(len(each["content"]) for each in held if each and each["content"]) == TOKENS


def test_many_that_leave_at_all_moments_leave_nothing_behind(through: Through) -> None:
    gone = through.gateway.metric("eyas_client_disconnects_total")
    clients = []
    for at in range(24):
        more = ({}, {"n": 2}, {"prompt": ["a", "b"]})[at % 3]
        path = (CHAT, COMPLETIONS)[at % 2]
        clients.append(send(through, path, max_tokens=LONG, ignore_eos=True, stream=at % 4 < 2, **more))
        if at > 8:
            clients.pop(0).close()
        time.sleep(0.03)
    for client in clients:
        client.close()
    wait_until(lambda: through.gateway.metric("eyas_client_disconnects_total") == gone + 24, timeout=30)
    wait_until(lambda: through.count("num_running_reqs") == through.count("num_queue_reqs") == 0, timeout=60)
    assert through.gateway.metric("eyas_inflight_requests") == 0
    wanted = text_of(through.direct(CHAT)["choices"][0])
    assert text_of(through.ask(CHAT).json()["choices"][0]) == wanted


def send(through: Through, path: str, **body: Any) -> socket.socket:
    """A client's socket with a whole request sent and nothing read."""
    asked = {
        "model": through.engine.served_name,
        "messages": [{"role": "user", "content": "hi"}],
        "prompt": "hi",
        **body,
    }
    raw = json.dumps(asked).encode()
    connection = socket.create_connection(("127.0.0.1", through.gateway.port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection
