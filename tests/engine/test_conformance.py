"""OpenAI's own client against the gateway and, by the same tests, against the bare engine: one suite, two addresses.

What the bare engine does otherwise stands in ENGINE_DIFFERS, and is held to that: a difference that goes away fails.
"""

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from server.arms import Arm
from server.auth import KeyRing, add_key
from server.config import GatewayTable, Limits
from server.engine import Engine
from tests.engine.conftest import EnginePool
from tests.server.conftest import Gateway
from tests.server.fake_engine import wait_until

pytestmark = pytest.mark.engine

USER: list[Any] = [{"role": "user", "content": "hi"}]
TOKENS = 12
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "fly",
        "description": "Fly somewhere.",
        "parameters": {
            "type": "object",
            "properties": {"to": {"type": "string", "enum": ["north", "south"]}},
            "required": ["to"],
            "additionalProperties": False,
        },
    },
}
ENGINE_DIFFERS = {
    "test_a_model_that_does_not_exist": "it answers to any model's name",
    "test_a_wrong_key": "it answers 401 without www-authenticate",
    "test_null_stands_for_the_default": "it refuses stream: null",
}


@dataclass(frozen=True)
class Endpoint:
    """Where a client asks. `arm` is the gateway's view of the engine."""

    name: str
    url: str
    key: str
    model: str
    engine: Engine
    gateway: Gateway

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": self.key, "max_retries": 0, **options})

    def asynchronous(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)

    def asked(self, **more: Any) -> dict[str, Any]:
        """A greedy request for a short answer."""
        return {"model": self.model, "messages": USER, "max_tokens": TOKENS, "temperature": 0, **more}

    def busy(self) -> float:
        """Requests in the engine, by its own count."""
        text = httpx.get(f"{self.engine.url}/metrics").text
        counts = re.findall(r"^sglang:num_(?:running|queue)_reqs\{.*\} (\S+)$", text, re.MULTILINE)
        assert counts
        return sum(map(float, counts))


@pytest.fixture(scope="module")
def both(
    engines: EnginePool, tiny: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Endpoint]]:
    engine = engines.get(tiny("llama"), "none", tool_call_parser="qwen25")
    arm = Arm("tiny", engine.url, engine.api_key, engine.admin_key, engine.served_name, engine.drafter.name, "ready")
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    _, key = add_key(keys, "conformance", Limits(requests_per_minute=100_000))
    gateway = Gateway(arm, GatewayTable(), keys=KeyRing(keys, Limits())).start()
    common = {"model": engine.served_name, "engine": engine, "gateway": gateway}
    yield {
        "gateway": Endpoint("gateway", gateway.url, key, **common),
        "engine": Endpoint("engine", engine.url, engine.api_key, **common),
    }
    gateway.stop()


@pytest.fixture(params=["gateway", "engine"])
def endpoint(request: pytest.FixtureRequest, both: dict[str, Endpoint]) -> Endpoint:
    reason = ENGINE_DIFFERS.get(request.node.originalname)
    if request.param == "engine" and reason:
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    return both[request.param]


@pytest.fixture
def gateway(both: dict[str, Endpoint]) -> Endpoint:
    return both["gateway"]


def text_of(chunks: Any) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


# --- answers


def test_models(endpoint: Endpoint) -> None:
    assert [model.id for model in endpoint.client().models.list()] == [endpoint.model]


def test_chat_plain_and_streamed_say_the_same(endpoint: Endpoint) -> None:
    client = endpoint.client()
    plain = client.chat.completions.create(**endpoint.asked())
    assert plain.choices[0].message.role == "assistant" and plain.choices[0].finish_reason == "length"
    assert plain.usage is not None and plain.usage.completion_tokens == TOKENS
    chunks = list(client.chat.completions.create(**endpoint.asked(stream=True)))
    assert text_of(chunks) == plain.choices[0].message.content != ""
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert chunks[0].choices[0].delta.role == "assistant"


def test_completions_plain_and_streamed_say_the_same(endpoint: Endpoint) -> None:
    client = endpoint.client()
    asked: dict[str, Any] = {"model": endpoint.model, "prompt": "the eagle", "max_tokens": TOKENS, "temperature": 0}
    plain = client.completions.create(**asked)
    pieces = client.completions.create(stream=True, **asked)
    assert "".join(piece.choices[0].text for piece in pieces) == plain.choices[0].text != ""


def test_the_asynchronous_client_many_at_once(endpoint: Endpoint) -> None:
    async def ask(client: openai.AsyncOpenAI, stream: bool) -> str:
        if not stream:
            return (await client.chat.completions.create(**endpoint.asked())).choices[0].message.content or ""
        return text_of([chunk async for chunk in await client.chat.completions.create(**endpoint.asked(stream=True))])

    async def many() -> list[str]:
        async with endpoint.asynchronous() as client:
            return await asyncio.gather(*(ask(client, at % 2 == 0) for at in range(12)))

    texts = asyncio.run(many())
    assert len(set(texts)) == 1 and texts[0]


def test_several_answers_and_lists_of_prompts(endpoint: Endpoint) -> None:
    client = endpoint.client()
    plain = client.chat.completions.create(**endpoint.asked(n=3))
    assert [choice.index for choice in plain.choices] == [0, 1, 2]
    chunks = list(client.chat.completions.create(**endpoint.asked(n=3, stream=True)))
    texts = dict.fromkeys(range(3), "")
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
    assert list(texts.values()) == [choice.message.content for choice in plain.choices]
    listed = client.completions.create(model=endpoint.model, prompt=["a", "b"], max_tokens=3)
    assert [choice.index for choice in listed.choices] == [0, 1]


def test_usage_in_a_stream_only_where_it_was_asked_for(endpoint: Endpoint) -> None:
    client = endpoint.client()
    assert all(not chunk.usage for chunk in client.chat.completions.create(**endpoint.asked(stream=True)))
    asked = endpoint.asked(stream=True, stream_options={"include_usage": True})
    *chunks, last = client.chat.completions.create(**asked)
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == TOKENS
    assert all(chunk.choices and not chunk.usage for chunk in chunks)


def test_logprobs(endpoint: Endpoint) -> None:
    client = endpoint.client()
    plain = client.chat.completions.create(**endpoint.asked(logprobs=True, top_logprobs=2))
    logprobs = plain.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == TOKENS
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in logprobs.content)
    chunks = client.chat.completions.create(**endpoint.asked(logprobs=True, top_logprobs=2, stream=True))
    held = [choice.logprobs for chunk in chunks for choice in chunk.choices]
    assert sum(len(each.content) for each in held if each is not None and each.content) == TOKENS
    words = client.completions.create(model=endpoint.model, prompt="a", max_tokens=3, logprobs=2)
    assert words.choices[0].logprobs is not None and len(words.choices[0].logprobs.token_logprobs or []) == 3


def test_stop_words_seeds_and_fields_that_the_client_does_not_know(endpoint: Endpoint) -> None:
    client = endpoint.client()
    whole = client.chat.completions.create(**endpoint.asked()).choices[0].message.content
    assert whole is not None
    stopped = client.chat.completions.create(**endpoint.asked(stop=[whole[3:6]])).choices[0]
    assert stopped.finish_reason == "stop" and (stopped.message.content or "") == whole[: whole.index(whole[3:6])]
    asked = endpoint.asked(temperature=1.0, seed=7, extra_body={"return_output_ids_in_sglext": True, "min_p": 0.01})
    answer = client.chat.completions.create(**asked)
    assert answer.model_extra is not None and len(answer.model_extra["sglext"]["output_ids"][0]) >= 1


# --- tools and structure


def called(endpoint: Endpoint, choice: Any, stream: bool) -> tuple[str, str, str, list[str]]:
    """What a client makes of a forced call: text, the tools' names, their arguments and the ends, each in one piece."""
    asked = endpoint.asked(tools=[TOOL], tool_choice=choice, max_tokens=200)
    text, names, arguments, ends = "", "", "", []
    answers = endpoint.client().chat.completions.create(**asked, stream=stream)
    for answer in answers if stream else [answers]:
        for piece in answer.choices:
            said: Any = piece.delta if stream else piece.message
            ends += [piece.finish_reason] if piece.finish_reason else []
            text += said.content or ""
            for call in said.tool_calls or []:
                names += (call.function and call.function.name) or ""
                arguments += (call.function and call.function.arguments) or ""
    return text, names, arguments, ends


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "fly"}}], ids=str)
def test_a_tool_call_is_the_engines(both: dict[str, Endpoint], choice: Any, stream: bool) -> None:
    """The toy target calls in a way of its own, which the gateway hands on."""
    text, names, arguments, ends = called(both["engine"], choice, stream)
    assert text or names or arguments
    assert called(both["gateway"], choice, stream) == (text, names, arguments, ends)


def test_the_answer_of_a_tool_goes_back(endpoint: Endpoint) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "fly", "arguments": '{"to": "north"}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    answer = endpoint.client().chat.completions.create(**endpoint.asked(messages=messages, tools=[TOOL]))
    assert answer.choices[0].message.content


class Flight(pydantic.BaseModel):
    to: Literal["north", "south"]
    high: bool


@pytest.mark.parametrize("stream", [False, True])
def test_structured_output(endpoint: Endpoint, stream: bool) -> None:
    client = endpoint.client()
    asked = endpoint.asked(max_tokens=200)
    if stream:
        with client.chat.completions.stream(**asked, response_format=Flight) as events:
            parsed = events.get_final_completion().choices[0].message.parsed
    else:
        parsed = client.chat.completions.parse(**asked, response_format=Flight).choices[0].message.parsed
    assert isinstance(parsed, Flight)


# --- errors, patience, leaving


def test_a_model_that_does_not_exist(endpoint: Endpoint) -> None:
    with pytest.raises(openai.NotFoundError) as found:
        endpoint.client().chat.completions.create(**endpoint.asked(model="gpt-5"))
    assert found.value.code == "model_not_found" and found.value.param == "model"


def test_a_wrong_key(endpoint: Endpoint) -> None:
    with pytest.raises(openai.AuthenticationError) as found:
        endpoint.client(api_key="wrong").chat.completions.create(**endpoint.asked())
    assert found.value.response.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("bad", [{"temperature": "warm"}, {"max_tokens": 100_000}, {"messages": 3}], ids=str)
def test_a_refusal_says_why(endpoint: Endpoint, bad: dict[str, Any], stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        list(endpoint.client().chat.completions.create(**endpoint.asked(stream=stream, **bad)))
    assert isinstance(found.value.body, dict) and found.value.body["message"]


def test_null_stands_for_the_default(endpoint: Endpoint) -> None:
    asked = endpoint.asked(extra_body={"stream": None, "n": None, "stop": None, "tools": None})
    assert endpoint.client().chat.completions.create(**asked).choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_whose_patience_ends_leaves_nothing_behind(endpoint: Endpoint, stream: bool) -> None:
    client = endpoint.client(timeout=0.7)
    asked = endpoint.asked(max_tokens=900, n=2, extra_body={"ignore_eos": True})
    if stream:
        begun = client.chat.completions.create(**asked, stream=True)
        next(iter(begun))
        wait_until(lambda: endpoint.busy() > 0, timeout=20)  # the engine's gauge follows now and then
        begun.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(**asked)
    wait_until(lambda: endpoint.busy() == 0, timeout=20)
    assert endpoint.client().chat.completions.create(**endpoint.asked()).choices


def test_a_client_that_tries_again_finds_the_model_loaded(gateway: Endpoint) -> None:
    """By the gateway alone: it says when to come back, and the bare engine is not there while it loads."""
    arm = gateway.gateway.arm
    arm.state = "starting"
    timer = threading.Timer(1.0, setattr, (arm, "state", "ready"))
    timer.start()
    begun = time.monotonic()
    answer = gateway.client(max_retries=2).chat.completions.create(**gateway.asked())
    timer.join()
    assert answer.choices and time.monotonic() - begun >= 1.0
    arm.state = "starting"
    with pytest.raises(openai.InternalServerError) as found:
        gateway.client().chat.completions.create(**gateway.asked())
    arm.state = "ready"
    assert (found.value.status_code, found.value.code) == (503, "model_loading")
    assert int(found.value.response.headers["retry-after"]) > 0
