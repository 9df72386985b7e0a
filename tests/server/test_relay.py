"""Requests and answers through the gateway, from the outside: bytes, fields and headers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import Gateway
from tests.server.fake_engine import MODEL, TEXT, FakeEngine

ROUTES = ["/v1/chat/completions", "/v1/completions"]
USER = [{"role": "user", "content": "hi"}]


def frames_of(stream: bytes) -> list[bytes]:
    assert stream.endswith(b"\n\n")
    return [frame + b"\n\n" for frame in stream.split(b"\n\n")[:-1]]


def text_of(stream: bytes) -> str:
    """The answer's text, put together from a stream's pieces."""
    text = ""
    for frame in frames_of(stream):
        if frame.startswith(b"data: {"):
            for choice in json.loads(frame[6:])["choices"]:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text


def error_of(answer: httpx.Response) -> dict[str, Any]:
    document = answer.json()
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    assert isinstance(document["error"]["message"], str)
    return document["error"]  # type: ignore[no-any-return]


# --- what the engine gets


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_gets_the_request_with_our_additions(
    gate: Gateway, fake: FakeEngine, path: str, stream: bool
) -> None:
    asked = {"temperature": 0.5, "seed": 2**80, "stop": ["Ż", "\u2028"], "stream": stream}
    assert gate.ask(path, **asked).status_code == 200
    seen = fake.requests[0]
    assert seen.path == path
    rid = seen.body.pop("rid")
    assert len(rid) == 32 and set(rid) <= set("0123456789abcdef")
    assert seen.body.pop("return_spec_tokens_details") is True
    assert seen.body.pop("stream_options", None) == ({"include_usage": True} if stream else None)
    assert seen.body == {"model": MODEL, "messages": USER, "prompt": "hi", **asked}


def test_the_clients_own_bytes_are_not_written_anew(gate: Gateway, fake: FakeEngine) -> None:
    body = b'  {"model" : "tiny","messages":[], "temperature":1.0e-0, "seed":123456789012345678901234567890 }\n'
    gate.client.post("/v1/chat/completions", content=body)
    assert fake.requests[0].raw.startswith(body.rstrip()[:-1])


def test_the_clients_ids_never_reach_the_engine(gate: Gateway, fake: FakeEngine) -> None:
    body = b'{"model":"tiny","messages":[],"rid":"a","rid":"","return_spec_tokens_details":false,"rid":["b"]}'
    headers = {"x-override-rid": "a", "x-override-priority": "9", "x-request-id": "mine", "authorization": "Bearer c"}
    assert gate.client.post("/v1/chat/completions", content=body, headers=headers).status_code == 200
    seen = fake.requests[0]
    assert seen.raw.count(b'"rid"') == 1
    assert seen.raw.count(b"return_spec_tokens_details") == 1
    assert len(seen.body["rid"]) == 32
    assert not [name for name in seen.headers if name.lower().startswith("x-")]
    assert seen.headers["Authorization"] == "Bearer engine-api-key"


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("theirs", "passed"),
    [
        ({"traceparent": PARENT, "tracestate": "a=1,b=2"}, {"traceparent": PARENT, "tracestate": "a=1,b=2"}),
        ({"traceparent": PARENT}, {"traceparent": PARENT}),
        ({"traceparent": PARENT.upper()}, {}),
        ({"traceparent": "00-1-2-01", "tracestate": "a=1"}, {}),
        ({"tracestate": "a=1"}, {}),
        ({"traceparent": PARENT, "tracestate": "x" * 513}, {"traceparent": PARENT}),
    ],
)
def test_a_sane_trace_context_goes_on_to_the_engine(
    shared_gate: Gateway, shared_fake: FakeEngine, theirs: dict[str, str], passed: dict[str, str]
) -> None:
    assert shared_gate.ask(headers=theirs).status_code == 200
    headers = {name.lower(): value for name, value in shared_fake.requests[-1].headers.items()}
    assert {name: value for name, value in headers.items() if name.startswith("trace")} == passed


def test_stream_options_keep_the_clients_other_wishes(gate: Gateway, fake: FakeEngine) -> None:
    gate.ask(stream=True, stream_options={"continuous_usage_stats": True, "include_usage": False})
    assert fake.requests[0].body["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}
    assert fake.requests[0].raw.count(b"stream_options") == 1


def test_every_request_has_an_id_of_its_own(gate: Gateway, fake: FakeEngine) -> None:
    for _ in range(20):
        gate.ask(headers={"x-request-id": "same"})
    assert len({seen.body["rid"] for seen in fake.requests}) == 20


# --- what the client gets


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("how", ["", "at_once", "byte_by_byte"])
def test_a_stream_is_the_engines_bytes_less_what_was_not_asked_for(
    gate: Gateway, fake: FakeEngine, path: str, how: str
) -> None:
    answer = gate.ask(path, stream=True, user=how)
    theirs = frames_of(fake.requests[0].sent)
    assert b"sglext" in theirs[-3] and b"usage" in theirs[-2]
    assert frames_of(answer.content) == [*theirs[:-3], theirs[-1]]
    assert text_of(answer.content) == TEXT


@pytest.mark.parametrize("path", ROUTES)
def test_a_stream_is_all_the_engines_bytes_where_all_was_asked_for(gate: Gateway, fake: FakeEngine, path: str) -> None:
    wishes = {"return_spec_tokens_details": True, "stream_options": {"include_usage": True}}
    answer = gate.ask(path, stream=True, **wishes)
    assert answer.content == fake.requests[0].sent


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wants", [False, True])
def test_other_extensions_stay(gate: Gateway, fake: FakeEngine, stream: bool, wants: bool) -> None:
    answer = gate.ask(stream=stream, return_output_ids_in_sglext=True, return_spec_tokens_details=wants)
    if stream:
        found = json.loads(next(frame for frame in frames_of(answer.content) if b"sglext" in frame)[6:])
    else:
        found = answer.json()
    own = {"spec_tokens_details": fake.requests[0].details} if wants else {}
    assert found["sglext"] == {**own, "output_ids": [[5, 6, 7]]}


@pytest.mark.parametrize("path", ROUTES)
def test_a_plain_answer_is_the_engines_less_the_statistics(gate: Gateway, fake: FakeEngine, path: str) -> None:
    theirs = json.loads(gate.ask(path, return_spec_tokens_details=True).content)
    assert gate.ask(path, return_spec_tokens_details=True).content == fake.requests[1].sent
    ours = gate.ask(path).json()
    assert theirs.pop("sglext") == {"spec_tokens_details": fake.requests[0].details}
    assert theirs.pop("id") == fake.requests[0].body["rid"]
    assert ours.pop("id") == fake.requests[2].body["rid"]
    assert ours == theirs
    assert gate.ask(path, user="no_statistics").content == fake.requests[3].sent


def test_headers_of_answers(gate: Gateway) -> None:
    for stream in (False, True):
        headers = gate.ask(stream=stream).headers
        assert headers["x-eyas-arm"] == "main"
        assert headers["x-eyas-drafter"] == "little-eagle"
        assert len(headers["x-request-id"]) == 32
        assert headers.get("cache-control") == ("no-cache" if stream else None)
        assert headers.get("x-accel-buffering") == ("no" if stream else None)
        assert headers["content-type"].split(";")[0] == ("text/event-stream" if stream else "application/json")
        assert ("transfer-encoding" in headers) == stream
        assert not {"keep-alive", "upgrade", "content-encoding"} & set(headers)


@pytest.mark.parametrize(
    ("theirs", "kept"),
    [("req-1.a:b_C", True), ("a" * 128, True), ("a" * 129, False), ("", False), ("a b", False), ("<x>", False)],
)
def test_a_sane_request_id_is_echoed_and_no_other(shared_gate: Gateway, theirs: str, kept: bool) -> None:
    for body in ({}, {"model": "unknown"}, {"user": "flat_error"}):
        found = shared_gate.ask(headers={"x-request-id": theirs}, **body).headers["x-request-id"]
        assert found == theirs if kept else len(found) == 32


def test_the_first_frame_does_not_wait_for_the_second(gate: Gateway, fake: FakeEngine) -> None:
    body = {"model": MODEL, "prompt": "x", "user": "hangs", "stream": True}
    with gate.client.stream("POST", "/v1/completions", json=body, timeout=5) as answer:
        first = next(answer.iter_raw())
    assert first.startswith(frames_of(fake.requests[0].sent)[0])


def test_a_connection_serves_one_request_after_another(gate: Gateway, fake: FakeEngine) -> None:
    for at in range(6):
        assert gate.ask(stream=at % 2 == 0).status_code == 200
    assert len({id(connection) for connection in gate.client._transport._pool.connections}) == 1  # type: ignore[attr-defined]


# --- through OpenAI's own client


def test_openai_client_plain_and_stream(gate: Gateway) -> None:
    client = openai.OpenAI(base_url=f"{gate.url}/v1", api_key="x", max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    chat = client.chat.completions.create(model=MODEL, messages=USER, n=2)  # type: ignore[call-overload]
    assert [choice.message.content for choice in chat.choices] == [TEXT, TEXT]
    assert "sglext" not in chat.to_dict()
    assert client.completions.create(model=MODEL, prompt="x").choices[0].text == TEXT
    chunks = list(client.chat.completions.create(model=MODEL, messages=USER, stream=True))  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=USER, stream=True, stream_options=options)  # type: ignore[call-overload]
    )
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 16
    pieces = client.completions.create(model=MODEL, prompt="x", stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == TEXT


def test_openai_client_async_many_at_once(gate: Gateway) -> None:
    async def one(client: openai.AsyncOpenAI, at: int) -> str:
        how = {"user": "byte_by_byte" if at % 10 == 0 else ""}
        stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True, extra_body=how)  # type: ignore[call-overload]
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(one(client, at) for at in range(150)))

    assert asyncio.run(many()) == [TEXT] * 150


def test_openai_client_sees_errors_as_its_own(gate: Gateway) -> None:
    client = openai.OpenAI(base_url=f"{gate.url}/v1", api_key="x", max_retries=0)

    def ask(model: str = MODEL, **more: Any) -> Any:
        return list(client.chat.completions.create(model=model, messages=USER, **more))  # type: ignore[call-overload]

    with pytest.raises(openai.NotFoundError) as missing:
        ask("gpt-5")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="too long"):
        ask(extra_body={"user": "flat_error"}, stream=True)
    with pytest.raises(openai.InternalServerError, match="queue is full"):
        ask(extra_body={"user": "queue_full"})
    for how in ("error_frame", "dies", "truncated", "dies_inside_a_frame"):
        with pytest.raises(openai.APIError) as broken:
            ask(extra_body={"user": how}, stream=True)
        assert type(broken.value) is openai.APIError, how
