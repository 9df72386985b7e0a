"""Faults that other gateways and the engine are publicly known for, and that no other file here holds us to."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson
import pytest

from server.call import read_call
from server.serve import listener
from tests.server.conftest import Gateway
from tests.server.fake_engine import MODEL, TOOL_PIECES, FakeEngine
from tests.server.test_relay import frames_of

PATH = "/v1/chat/completions"


def call_of(**asked: Any) -> Any:
    return read_call(PATH, orjson.dumps({"model": MODEL, **asked}), "a" * 32, MODEL, None)


def test_pieces_of_tool_calls_and_of_thoughts_pass_untouched(gate: Gateway, fake: FakeEngine) -> None:
    """Streams of tool calls that lose a delta, or hang: ours are the engine's bytes."""
    tool = {"type": "function", "function": {"name": "fly", "parameters": {"type": "object"}}}
    frames = frames_of(gate.ask(stream=True, user="tool_call", tools=[tool]).content)
    assert [json.loads(frame[6:])["choices"][0] for frame in frames[: len(TOOL_PIECES)]] == TOOL_PIECES
    assert b"".join(frames[: len(TOOL_PIECES)]) == fake.requests[0].sent[: len(b"".join(frames[: len(TOOL_PIECES)]))]
    assert fake.requests[0].body["tools"] == [tool]


def test_pictures_go_to_the_engine_as_they_are(gate: Gateway, fake: FakeEngine) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBOR/+=" * 1000, "detail": "low"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, picture]}]
    assert gate.ask(messages=messages).status_code == 200
    assert fake.requests[0].body["messages"] == messages


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("how", "empty", "leaked"), [("", 0, 0), ("says_nothing", 1, 0), ("leaks", 0, 1), ("tool_call", 0, 0)]
)
def test_an_empty_answer_and_a_leaked_tool_token_are_counted_and_passed(
    gate: Gateway, stream: bool, how: str, empty: int, leaked: int
) -> None:
    for n in (1, 2):
        assert gate.ask(user=how, stream=stream, n=n).status_code == 200
    assert gate.metric("eyas_empty_answers_total", arm="main") == 2 * empty
    assert gate.metric("eyas_leaked_tool_tokens_total", arm="main") == 2 * leaked


def test_another_attempt_has_another_id(gate: Gateway) -> None:
    """An engine that meets an id twice may crash, hang, or mix the answers up."""
    call = call_of(messages=[], stream=True)
    before = json.loads(call.body)
    call.renew()
    after = json.loads(call.body)
    assert re.fullmatch("[0-9a-f]{32}", after["rid"])
    assert before.pop("rid") != after.pop("rid") == call.rid
    assert before == after
    assert call.abort_ids == [call.rid]


def test_a_body_is_let_go_of_once_its_answer_has_begun() -> None:
    """Buffers that grow with a stream's length or keep its prompt: a relay of long prompts dies of them."""
    call = call_of(messages=[{"role": "user", "content": "x" * 1_000_000}])
    call.forget()
    assert (call.raw, call.asked) == (b"", {})
    assert call.abort_ids == [call.rid]


@pytest.mark.parametrize(
    ("asked", "structured"),
    [
        ({}, False),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, True),
        ({"response_format": {"type": "structural_tag"}}, True),
        ({"response_format": None, "regex": None}, False),
        ({"regex": "a+"}, True),
        ({"ebnf": "root ::= 'a'"}, True),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, False),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, True),
        ({"tools": [{"function": {"name": "f"}}], "tool_choice": "auto"}, False),
        ({"tools": [{"function": {"name": "f"}}], "tool_choice": "required"}, True),
        ({"tools": [{"function": {"name": "f"}}], "tool_choice": {"function": {"name": "f"}}}, True),
        ({"tools": 5, "tool_choice": "required"}, False),
        ({"tools": [5]}, False),
    ],
)
def test_what_an_engine_holds_to_a_grammar_is_known(asked: dict[str, Any], structured: bool) -> None:
    """Grammar and speculation together have hung engines: such a call can be sent to an arm without speculation."""
    assert call_of(**asked).structured is structured


def test_one_process_counts_everything(gate: Gateway) -> None:
    """Metrics of several workers are wrong in ways that nobody sees."""
    config = listener(gate.app, "127.0.0.1", 0).config
    assert config.workers == 1
