"""`python -m drafter tokenize`: a team's chats by a target's own template, and every chat that cannot be rendered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from drafter.__main__ import main
from drafter.data.conversations import read_with_ids

# Ends each turn, begins the answer with a thought, and drops the thoughts of the past, as reasoning models' do.
THINKER = """\
{%- for tool in tools or [] -%}<tool>{{ tool.name }}<end>{%- endfor -%}
{%- for m in messages -%}
<{{ m.role }}>
{%- if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning_content or '' }}</think>{% endif -%}
{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function.name }}
{%- for k in c.function.arguments %} {{ k }}{% endfor %}{% endfor -%}
<end>
{%- endfor -%}
{%- if add_generation_prompt %}<assistant><think>
{%- if thinking is defined and not thinking %}</think>{% endif %}{% endif -%}
"""
# Begins an answer otherwise than it writes a past one.
FICKLE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<end> {% endfor %}"
    "{% if add_generation_prompt %}now {% endif %}"
)
MARKS = ("<end>", "<think>", "</think>", "<user>", "<assistant>", "<system>", "<tool>", "<call>")


def target(folder: Path, template: str) -> Path:
    """A tokenizer of single letters, and of the template's marks as tokens of their own."""
    letters = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz0123456789 :.?")}
    letters["[UNK]"] = len(letters)
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", additional_special_tokens=list(MARKS[1:])
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": fast.convert_tokens_to_ids("<end>")}))
    return folder


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def tokenize(
    tmp_path: Path, template: str, rows: list[dict[str, Any]], *args: str
) -> tuple[int, list[tuple[str, str]]]:
    """Exit code, and (prompt, answer) of each conversation, decoded."""
    folder, chats, out = target(tmp_path / "target", template), tmp_path / "chats.jsonl", tmp_path / "out.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = main(["tokenize", str(chats), "--target", str(folder), "--out", str(out), *args])
    if code:
        assert not out.exists()
        return code, []
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def text(ids: Any) -> str:
        return "".join(tokenizer.convert_ids_to_tokens(list(ids)))

    return code, [(text(found.input_ids), text(found.output_ids)) for found in read_with_ids(out)]


def test_each_answer_is_learned_after_what_an_engine_would_have_seen(tmp_path: Path) -> None:
    messages = [user("hi"), answer("ho", reasoning_content="hm"), user("so"), answer("yes", reasoning_content="well")]
    code, found = tokenize(tmp_path, THINKER, [{"messages": messages}])
    assert code == 0 and found == [
        ("<user>hi<end><assistant><think>", "hm</think>ho<end>"),
        ("<user>hi<end><assistant>ho<end><user>so<end><assistant><think>", "well</think>yes<end>"),
    ]


def test_the_last_answer_alone(tmp_path: Path) -> None:
    messages = [user("hi"), answer("ho"), user("so"), answer("yes")]
    _, found = tokenize(tmp_path, THINKER, [{"messages": messages, "id": "x"}], "--last")
    assert [text for _, text in found] == ["</think>yes<end>"]


def test_thinking_off_ends_the_thought_in_the_prompt(tmp_path: Path) -> None:
    _, found = tokenize(tmp_path, THINKER, [{"messages": [user("hi"), answer("ho")]}], "--thinking", "off")
    assert found == [("<user>hi<end><assistant><think></think>", "ho<end>")]


def test_tools_calls_and_parts(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": 1, "for": 2}'}}
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]
    row = {"messages": [user(parts), answer("", tool_calls=[call])], "tools": [{"name": "look"}]}
    _, found = tokenize(tmp_path, THINKER, [row])
    assert found == [("<tool>look<end><user>hi you<end><assistant><think>", "</think><call>look at for<end>")]


def test_a_template_that_begins_otherwise_leaves_the_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = tokenize(tmp_path, FICKLE, [{"messages": [user("hi"), answer("ho ho")]}])
    assert code == 0 and found == [("user: hi<end> now ", "ho ho<end>")]
    assert "1 of them by their content alone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (THINKER, [user("hi")], "no answer of the assistant's"),
        (THINKER, [answer("hi")], "no answer of the assistant's"),
        (THINKER, [{"role": "robot", "content": "x"}, answer("hi")], "messages[0] has the role 'robot'"),
        (THINKER, [user([{"type": "image_url"}]), answer("hi")], "not text (an image?)"),
        (THINKER, [user([{"type": "text"}]), answer("hi")], 'a part of type "text" without a text'),
        (THINKER, [user([{"type": "text", "text": 3}]), answer("hi")], 'a part of type "text" without a text'),
        (THINKER, [user("\ud800"), answer("hi")], "chats.jsonl:1 holds half of a character"),
        (THINKER, [user("hi"), answer("a", note="\udfff")], "chats.jsonl:1 holds half of a character"),
        (THINKER, [user(5), answer("hi")], "has int as a content"),
        (THINKER, [user("x"), answer("", tool_calls=[{"function": {}}])], "tool call that is not in OpenAI's form"),
        (FICKLE, [user("x"), answer("y", reasoning_content="z")], "let an engine answer"),
        ("{{ raise_exception('no') }}", [user("x"), answer("y")], "cannot be rendered by the target's template: no"),
        ("", [user("x"), answer("y")], "has no chat template"),
    ],
)
def test_what_cannot_be_rendered(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tokenize(tmp_path, template, [{"messages": messages}])[0] == 1
    shown = capsys.readouterr().err
    assert reason in shown and shown.startswith("tokenize: ") and shown.count("\n") == 1


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "no chat, expected one on each line"),
        (b"\n \n", "no chat"),
        (b'{"messages": ' + b"[" * 100_000, "chats.jsonl:1 is no conversation"),
        (b'{"messages": [], "id": 1' + b"0" * 5000 + b"}", "chats.jsonl:1 is no conversation"),
        (b"\xff\xfe{\x00", "cannot be read"),
        (
            b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "tools": [1]}',
            ":1",
        ),
    ],
)
def test_any_bytes_in_place_of_chats(
    tmp_path: Path, raw: bytes, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chats.jsonl").write_bytes(raw)
    out, folder = tmp_path / "out.jsonl", target(tmp_path / "target", THINKER)
    assert main(["tokenize", str(tmp_path / "chats.jsonl"), "--target", str(folder), "--out", str(out)]) == 1
    shown = capsys.readouterr().err
    assert reason in shown and shown.count("\n") == 1 and not out.exists()


def test_a_mark_of_byte_order_is_no_part_of_the_first_chat(tmp_path: Path) -> None:
    row = json.dumps({"messages": [user("hi"), answer("ho")]})
    (tmp_path / "chats.jsonl").write_bytes(b"\xef\xbb\xbf" + row.encode())
    out, folder = tmp_path / "out.jsonl", target(tmp_path / "target", THINKER)
    assert main(["tokenize", str(tmp_path / "chats.jsonl"), "--target", str(folder), "--out", str(out)]) == 0


def test_ids_are_unique_and_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"messages": [user("hi"), answer("ho")], "id": "same"}
    assert tokenize(tmp_path, THINKER, [row, row])[0] == 1
    assert "chats.jsonl:2 has the id 'same' of" in capsys.readouterr().err
    (tmp_path / "out.jsonl").write_text("mine")
    chats, folder = str(tmp_path / "chats.jsonl"), str(tmp_path / "target")
    assert main(["tokenize", chats, "--target", folder, "--out", str(tmp_path / "out.jsonl")]) == 1
    assert (tmp_path / "out.jsonl").read_text() == "mine"
