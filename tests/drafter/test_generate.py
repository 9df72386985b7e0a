"""`python -m drafter generate` from the outside: what it writes, leaves out and refuses, and how it goes on."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drafter.__main__ import main
from drafter.data.conversations import read_with_ids
from drafter.data.generate import answer_length
from drafter.data.prompts import load_prompts
from drafter.data.template import Template
from drafter.data.worth import PLACEHOLDER, whole_sentences
from tests.drafter.fake_endpoint import ANSWER, END, FakeEndpoint, prompt_of

TEMPLATE = Template("<user>", "<end>", frozenset({END}))


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEndpoint]:
    monkeypatch.setattr(Template, "of_folder", classmethod(lambda cls, folder, own_prompts: TEMPLATE))
    fake = FakeEndpoint().start()
    yield fake
    fake.stop()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "conversations.jsonl"


def run(endpoint: FakeEndpoint, out: Path, *args: str) -> int:
    common = ["--url", endpoint.url, "--model", "m", "--target", "nowhere", "--out", str(out), "--concurrency", "4"]
    return main(["generate", *common, *args])


def prompts_file(tmp_path: Path, *prompts: str) -> str:
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, "id": prompt[:12]}) + "\n" for prompt in prompts))
    return str(file)


def test_the_target_writes_prompts_and_answers_them(endpoint: FakeEndpoint, out: Path, tmp_path: Path) -> None:
    openers = tmp_path / "openers.txt"
    openers.write_text("# a comment\nWrite a list\\nwith\n\n")
    assert run(endpoint, out, "--count", "9", "--openers", str(openers), "--seed", "3") == 0
    found = list(read_with_ids(out))
    assert len(found) == len({conversation.id for conversation in found}) == 9
    assert len({conversation.messages[0]["content"] for conversation in found}) == 5
    assert all(conversation.id.startswith("self/3/") for conversation in found)
    for conversation in found:
        assert conversation.messages[0]["content"].startswith("Write a list\nwith number")
        assert (conversation.input_ids, conversation.output_ids) == ([1, 5, 6], [*ANSWER, END])
    written = [body for path, body in endpoint.bodies if path == "/v1/completions" and "stop" in body]
    assert {(body["prompt"], *body["stop"]) for body in written} == {("<user>Write a list\nwith", "<end>")}


def test_each_prompt_is_answered_at_each_temperature_and_the_rest_follows_the_seed(
    endpoint: FakeEndpoint, out: Path
) -> None:
    assert run(endpoint, out, "--count", "30", "--temperatures", "0,0.6,1") == 0
    first = list(read_with_ids(out))
    by_prompt: dict[object, list[object]] = {}
    for conversation in first:
        by_prompt.setdefault(conversation.messages[0]["content"], []).append(conversation.meta["temperature"])
    assert len(by_prompt) == 10
    assert all(temperatures == [0.0, 0.6, 1.0] for temperatures in by_prompt.values())
    out.unlink()
    assert run(endpoint, out, "--count", "30", "--temperatures", "0,0.6,1") == 0
    again = {conversation.id: conversation.messages for conversation in read_with_ids(out)}
    both = [conversation for conversation in first if conversation.id in again]
    assert both and all(again[conversation.id] == conversation.messages for conversation in both)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("Why?", "prompt too short"),
        ("Dear [Recipient's Name], how are you doing today?", "prompt with a placeholder"),
        (load_prompts("mt_bench", 1)[0].messages[0]["content"], "prompt of a benchmark"),
        ("Always the very same prompt, over and over.", "prompt written before"),
    ],
)
def test_prompts_that_are_left_out(
    endpoint: FakeEndpoint, out: Path, prompt: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.cues.prompt = lambda body: prompt if body.get("seed", 0) % 2 else prompt_of(body)
    run(endpoint, out, "--count", "12")
    assert reason in capsys.readouterr().out
    kept = [conversation.messages[0]["content"] for conversation in read_with_ids(out)]
    assert kept.count(prompt) == (2 if "before" in reason else 0)  # its two answers


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Tell me. What is it that you", "Tell me."),
        ("Is 3.5 more? I am not", "Is 3.5 more?"),
        ("One line\nAnd half", "One line"),
        ("x: y! z", "x: y!"),
    ],
)
def test_a_prompt_that_was_cut_short_keeps_its_whole_sentences(text: str, kept: str) -> None:
    assert whole_sentences(text).strip() == kept


def test_a_prompt_without_a_whole_sentence_is_left_out(
    endpoint: FakeEndpoint, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.cues.prompt_ends = lambda body: False
    endpoint.cues.prompt = lambda body: f"{prompt_of(body)} and more of"
    assert run(endpoint, out, "--count", "2") == 1
    shown = capsys.readouterr()
    assert "40 × prompt without an end" in shown.out
    assert shown.err.splitlines()[-1].startswith("generate: 2 of 2 conversations are missing")


@pytest.mark.parametrize(
    ("ids", "text", "reason"),
    [
        ([5, 6, 7], "Yes.", "answer too short"),
        ([5, 6, 7, 8] * 20, "On and on.", "answer that loops"),
        ([5, 6, 7, 8] * 10, "On and on, shortly.", "answer that loops"),
        (ANSWER, load_prompts("humaneval", 1)[0].messages[0]["content"], "answer with a benchmark's text"),
    ],
)
def test_answers_that_are_left_out(
    endpoint: FakeEndpoint,
    out: Path,
    tmp_path: Path,
    ids: list[int],
    text: str,
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def is_bad(body: dict[str, Any]) -> bool:
        return "bad" in str(body["messages"])

    endpoint.cues.answer = lambda body: ids if is_bad(body) else ANSWER
    endpoint.cues.text = lambda body: text if is_bad(body) else "Fine."
    asked_for = prompts_file(tmp_path, "a good prompt", "one bad prompt")
    assert run(endpoint, out, "--prompts", asked_for, "--temperatures", "0") == 0
    assert [conversation.id for conversation in read_with_ids(out)] == ["a good promp"]
    assert f"Left out: 1 × {reason}." in capsys.readouterr().out


def test_an_answer_is_kept_up_to_where_it_loops(endpoint: FakeEndpoint, out: Path, tmp_path: Path) -> None:
    endpoint.cues.answer = lambda body: [*ANSWER, *([5, 6, 7, 8] * 40)]
    assert run(endpoint, out, "--prompts", prompts_file(tmp_path, "just one prompt"), "--temperatures", "0") == 0
    (found,) = read_with_ids(out)
    assert found.answer_ids == [*ANSWER, 5, 6, 7, 8]


def test_benchmarks_are_never_answered_for_training(
    endpoint: FakeEndpoint, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(endpoint, out, "--prompts", "mt_bench,humaneval", "--count", "6") == 0
    assert out.read_text() == ""
    assert "6 × prompt of a benchmark" in capsys.readouterr().out


def test_for_a_walk_the_answer_goes_on_past_its_end(endpoint: FakeEndpoint, out: Path) -> None:
    endpoint.cues.answer = lambda body: [*ANSWER[:20], END, *ANSWER][: body["max_tokens"]]
    assert run(endpoint, out, "--prompts", "mt_bench", "--count", "5", "--max-tokens", "32", "--past", "6") == 0
    found = list(read_with_ids(out))
    assert len(found) == 5
    for conversation in found:
        assert conversation.answer_ids == [*ANSWER[:20], END]
        assert conversation.output_ids == [*ANSWER[:20], END, *ANSWER[:6]]
    bodies = [body for path, body in endpoint.bodies if path.endswith("/chat/completions")]
    assert all(body["ignore_eos"] and body["temperature"] == 0 and body["max_tokens"] == 38 for body in bodies)


def test_an_answer_in_which_nothing_is_drafted_cannot_be_walked(
    endpoint: FakeEndpoint, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.cues.answer = lambda body: [END] * 40 if "silent" in str(body["messages"]) else [100, END, *ANSWER]
    named = prompts_file(tmp_path, "one that is silent", "one that speaks")
    assert run(endpoint, out, "--prompts", named, "--past", "6") == 0
    assert [list(found.answer_ids) for found in read_with_ids(out)] == [[100, END]]
    assert "1 × answer of one token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ids", "expected"),
    [([9, 9, END, 9, 9, 9], 3), ([9, 9, 9, 9, 9, 9], 4), ([9, 9, 9, END, 9], 4), ([9, 9, 9, 9, END], 4)],
)
def test_an_answer_ends_at_its_end_token_or_its_limit(ids: list[int], expected: int) -> None:
    assert answer_length(ids, 4, frozenset({END})) == expected


def test_an_interrupted_run_goes_on(endpoint: FakeEndpoint, out: Path) -> None:
    assert run(endpoint, out, "--count", "5") == 0
    whole = out.read_text()
    out.write_text(whole + '{"messages": [{"role": "user", "con')
    assert run(endpoint, out, "--count", "12") == 0
    found = list(read_with_ids(out))
    assert out.read_text().startswith(whole)
    assert len(found) == len({conversation.id for conversation in found}) == 12
    before = len(endpoint.bodies)
    assert run(endpoint, out, "--count", "12") == 0
    assert len(endpoint.bodies) == before


def test_only_prompts_without_an_answer_are_asked_again(endpoint: FakeEndpoint, out: Path, tmp_path: Path) -> None:
    asked_for = prompts_file(tmp_path, "first of three", "second of three", "third of three")
    assert run(endpoint, out, "--prompts", asked_for, "--count", "2") == 0
    endpoint.bodies.clear()
    assert run(endpoint, out, "--prompts", asked_for) == 0
    bodies = [body for path, body in endpoint.bodies if path.endswith("/chat/completions")]
    assert [body["messages"][0]["content"] for body in bodies] == ["third of three"] * 2
    assert len(list(read_with_ids(out))) == 6


def test_a_busy_engine_is_asked_again(endpoint: FakeEndpoint, out: Path, tmp_path: Path) -> None:
    endpoint.cues.status = [503, 429]
    assert run(endpoint, out, "--prompts", prompts_file(tmp_path, "first of one")) == 0
    assert len(list(read_with_ids(out))) == 2


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--count", "2", "--past", "4"], "--past is for the prompts of a set"),
        ([], "how many conversations? Give --count"),
        (["--count", "2", "--openers", "nowhere.txt"], "--openers: nowhere.txt cannot be read"),
        (["--count", "2", "--key-file", "nowhere.yaml"], "--key-file: nowhere.yaml cannot be read"),
        (["--prompts", "nowhere.jsonl"], "is neither bundled nor a file"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(
    endpoint: FakeEndpoint, out: Path, args: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(endpoint, out, *args) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("generate: ") and reason in shown.err and shown.err.count("\n") == 1
    assert not out.exists() and endpoint.bodies == []


@pytest.mark.parametrize(
    "argument",
    [
        *(f"--temperatures={value}" for value in ("-0.1", "nan", "inf", "-inf", "warm", "", "0,", "0;1")),
        *(f"--past={value}" for value in ("-1", "1.5", "x", "")),
    ],
)
def test_numbers_that_cannot_be_meant_are_usage_errors(
    endpoint: FakeEndpoint, out: Path, argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(endpoint, out, "--prompts", "mt_bench", "--count", "1", argument)
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {argument.partition('=')[0]}" in last and "is not a" in last
    assert not out.exists() and endpoint.bodies == []


@pytest.mark.parametrize(("out", "reason"), [("", "is a folder: name a file"), ("no/c.jsonl", "make it first")])
def test_a_place_that_cannot_be_written(
    endpoint: FakeEndpoint, tmp_path: Path, out: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(endpoint, tmp_path / out, "--count", "2") == 1
    shown = capsys.readouterr().err
    assert reason in shown and str(tmp_path / out) in shown and shown.count("\n") == 1
    assert endpoint.bodies == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(errno.EACCES, "Permission denied", "somewhere.json"), "somewhere.json: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), "conversations.jsonl"),
    ],
)
def test_an_error_of_the_system_names_the_file(
    endpoint: FakeEndpoint,
    out: Path,
    error: OSError,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def fails(*args: object) -> None:
        raise error

    monkeypatch.setattr("drafter.data.generate_cli.generate", fails)
    assert run(endpoint, out, "--count", "1") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("generate: ") and named in last and error.strerror in last and "Errno" not in last


def test_an_endpoint_without_ids_is_refused(
    endpoint: FakeEndpoint, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.cues.ids = False
    assert run(endpoint, out, "--prompts", prompts_file(tmp_path, "first of one")) == 1
    assert "sent no token ids" in capsys.readouterr().err


def test_an_endpoint_that_is_not_there(endpoint: FakeEndpoint, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "--give-up-after",
        "0",
        "--url",
        "http://127.0.0.1:9",
        "--model",
        "m",
        "--target",
        "x",
        "--out",
        str(out),
        "--count",
        "1",
    ]
    assert main(["generate", *args]) == 1
    assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["Dear [Your Name],", "Fill in ____ please", "<Company Name> wants", "{{name}} says"])
def test_placeholders(text: str) -> None:
    assert PLACEHOLDER.search(text)


@pytest.mark.parametrize("text", ["x = a[0]", "see [the docs](https://x)", "List<String> items", "__init__", "a < b"])
def test_what_only_looks_like_a_placeholder(text: str) -> None:
    assert not PLACEHOLDER.search(text)
