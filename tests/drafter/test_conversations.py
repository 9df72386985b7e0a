"""Conversation files: what is read, and what is refused with the line that is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from drafter.data.conversations import Conversation, ConversationError, read_conversations, read_with_ids

USER = {"role": "user", "content": "Hi"}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    told = [
        Conversation("a", [USER], [1, 2], [3, 4, 5], {"past": 2, "temperature": 0.0}),
        Conversation("b", [USER, {"role": "assistant", "content": "Ho — 日本"}]),
    ]
    file = tmp_path / "c.jsonl"
    file.write_text("\n\n".join(conversation.to_json() for conversation in told), "utf-8")
    assert list(read_conversations(file)) == [told[0], Conversation("b", told[1].messages, [], [], {})]
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert list(read_conversations(packed)) == list(read_conversations(file))
    assert list(told[0].answer_ids) == [3]


def test_ids_hash_tells_apart_what_differs() -> None:
    same = Conversation("a", [USER], [1, 2], [3, 4], {"past": 1})
    others = [
        Conversation("a", [USER], [1, 2], [3, 4]),
        Conversation("a", [USER], [1], [2, 3, 4], {"past": 1}),
        Conversation("a", [USER], [1, 2], [3, 5], {"past": 1}),
    ]
    assert Conversation("b", [], [1, 2], [3, 4], {"past": 1}).ids_sha256 == same.ids_sha256
    assert len({same.ids_sha256, *(other.ids_sha256 for other in others)}) == 4


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is no conversation"),
        ("1" * 5000, "is no conversation"),
        ("[]", "is no JSON object"),
        ('{"messages": ["hi"]}', "has no 'messages'"),
        (json.dumps({"messages": [USER], "input_ids": [1.5]}), "'input_ids' holds something that is no token id"),
        (json.dumps({"messages": [USER], "output_ids": [-1]}), "'output_ids' holds something that is no token id"),
        (json.dumps({"messages": [USER], "output_ids": [True]}), "'output_ids' holds something that is no token id"),
        (
            json.dumps({"messages": [USER], "output_ids": [1], "meta": {"past": 2}}),
            "meta.past is 2, expected how many of the 1",
        ),
        (json.dumps({"messages": [USER], "meta": []}), "meta.past is None"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text(json.dumps({"messages": [USER]}) + "\n" + line + "\n")
    with pytest.raises(ConversationError) as refused:
        list(read_conversations(file))
    assert f"{file}:2" in str(refused.value) and reason in str(refused.value)


@pytest.mark.parametrize("name", ["nowhere.jsonl", "not-gzip.jsonl.gz", "not-text.jsonl"])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    if name != "nowhere.jsonl":
        (tmp_path / name).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConversationError, match=name):
        list(read_conversations(tmp_path / name))


def test_conversations_without_ids_are_refused_with_the_fix(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text(json.dumps({"messages": [USER], "output_ids": [1, 2], "meta": {"past": 2}, "input_ids": [1]}))
    with pytest.raises(ConversationError, match="python -m drafter generate"):
        list(read_with_ids(file))
