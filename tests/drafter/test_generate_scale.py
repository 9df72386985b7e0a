"""`generate` for hundreds of thousands of prompts: killed anywhere, capped, turned away, and never holding much."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.__main__ import main
from drafter.data.asking import LONGEST_PAUSE_S, pause_s
from drafter.data.conversations import Conversation, ConversationError, read_with_ids
from drafter.data.generate import Template
from drafter.data.ledger import Ledger
from drafter.data.prompts import StreamedPrompts, load_prompts
from tests.drafter.fake_endpoint import ANSWER, END, FakeEndpoint

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


def prompts(tmp_path: Path, count: int, words: str = "") -> str:
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"ask {n} {words}", "id": f"p/{n}"}) + "\n" for n in range(count)))
    return str(file)


def run(endpoint: FakeEndpoint, out: Path, *args: str) -> int:
    common = ["--url", endpoint.url, "--model", "m", "--target", "nowhere", "--out", str(out), "--concurrency", "4"]
    return main(["generate", *common, *args])


def asked(endpoint: FakeEndpoint) -> list[dict[str, Any]]:
    return [body for path, body in endpoint.bodies if path.endswith("/chat/completions")]


def test_killed_at_random_moments_nothing_is_lost_or_double(endpoint: FakeEndpoint, out: Path, tmp_path: Path) -> None:
    """Ten times kill -9 while it writes; the file that results is the one of a run that nobody killed."""
    count, rng = 240, random.Random(5)
    named = prompts(tmp_path, count)
    # every seventh prompt's answer loops, so that a prompt that is done may have left nothing in the file
    endpoint.cues.answer = lambda body: (
        [5, 6, 7, 8] * 20 if int(body["messages"][0]["content"].split()[1]) % 7 == 0 else [*ANSWER, END]
    )
    kills = 0
    while kills < 10:
        before = out.stat().st_size if out.exists() else 0
        process = multiprocessing.get_context("fork").Process(target=run, args=(endpoint, out, "--prompts", named))
        process.start()
        deadline = time.monotonic() + 30
        limit = before + rng.randint(1, 12_000)
        while process.is_alive() and (not out.exists() or out.stat().st_size < limit) and time.monotonic() < deadline:
            time.sleep(0.001)
        kills += process.is_alive()
        process.kill()
        process.join()
        assert process.exitcode == -9, "the run ended before it was killed: ask for more prompts"
    assert run(endpoint, out, "--prompts", named) == 0
    killed = {conversation.id: conversation for conversation in read_with_ids(out)}
    assert len(killed) == len(list(read_with_ids(out))) == 2 * sum(n % 7 > 0 for n in range(count))
    whole = tmp_path / "whole.jsonl"
    assert run(endpoint, whole, "--prompts", named) == 0
    assert killed == {conversation.id: conversation for conversation in read_with_ids(whole)}
    endpoint.bodies.clear()
    assert run(endpoint, out, "--prompts", named) == 0
    assert not endpoint.bodies, "what is done was asked again"


@settings(max_examples=60, deadline=None)
@given(data=st.data(), groups=st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_a_kill_between_any_two_bytes(tmp_path_factory: pytest.TempPathFactory, data: Any, groups: list[int]) -> None:
    """The answers go first, then their entry: wherever that stops, exactly the prompts with an entry are done."""
    out = tmp_path_factory.mktemp("kill") / "out.jsonl"
    marks = [(0, 0)]
    with Ledger(out) as ledger:
        for number, size in enumerate(groups):
            kept = [Conversation(f"p/{number}/{at}", [], [1], [2, 3]) for at in range(size)]
            ledger.write(f"p/{number}", kept, 7, Counter(short=1))
            marks.append((out.stat().st_size, ledger.path.stat().st_size))
    path = ledger.path
    last = data.draw(st.integers(0, len(groups) - 1))  # the group that the kill falls into
    (answers, entries), (next_answers, next_entries) = marks[last], marks[last + 1]
    cut = data.draw(st.integers(0, next_answers - answers + next_entries - entries))
    out.write_bytes(out.read_bytes()[: min(answers + cut, next_answers)])
    path.write_bytes(path.read_bytes()[: entries + max(0, cut - (next_answers - answers))])
    done = last + (entries + cut - (next_answers - answers) == next_entries)
    with Ledger(out) as again:
        assert again.done == {f"p/{number}" for number in range(done)}
        assert (again.kept, again.tokens, again.rejected["short"]) == (sum(groups[:done]), 7 * done, done)
    assert [c.id for c in read_with_ids(out)] == [f"p/{n}/{at}" for n in range(done) for at in range(groups[n])]


def test_a_file_that_was_changed_by_hand_is_not_cut(endpoint: FakeEndpoint, out: Path, tmp_path: Path) -> None:
    assert run(endpoint, out, "--prompts", prompts(tmp_path, 40)) == 0
    whole = out.read_text()
    for changed, reason in ((whole + whole, "something else was appended"), (whole[:200], "changed by hand")):
        out.write_text(changed)
        with pytest.raises(ConversationError, match=reason):
            Ledger(out)
        assert out.read_text() == changed
    out.with_name(out.name + ".ledger").unlink()
    out.write_text(whole)
    endpoint.bodies.clear()
    assert run(endpoint, out, "--prompts", prompts(tmp_path, 41)) == 0
    assert {body["messages"][0]["content"] for body in asked(endpoint)} == {"ask 40 "}


def test_tokens_are_capped(
    endpoint: FakeEndpoint, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named, tokens = prompts(tmp_path, 50), len(ANSWER) + 1
    args = ("--prompts", named, "--max-tokens", "64", "--temperatures", "0", "--max-total-tokens")
    assert run(endpoint, out, *args, "1000") == 0
    shown = capsys.readouterr()
    assert "stopped before it would pass 1,000 tokens, as asked; raise the cap" in shown.err
    written = len(list(read_with_ids(out)))
    assert 1000 - 5 * 64 <= written * tokens <= 1000  # those being answered may be as long as they can
    assert run(endpoint, out, *args, "1000") == 0
    assert len(list(read_with_ids(out))) * tokens <= 1000
    assert run(endpoint, out, *args, "100000") == 0
    assert len(list(read_with_ids(out))) == 50
    assert f"{50 * tokens:,} tokens" in capsys.readouterr().out


def test_disk_is_capped(endpoint: FakeEndpoint, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(endpoint, out, "--prompts", prompts(tmp_path, 50), "--max-gb", "0.000005") == 0
    assert 4000 < out.stat().st_size <= 5000
    assert "raise the cap" in capsys.readouterr().err


@pytest.mark.parametrize(("wanted", "sent"), [("on", True), ("off", False), ("default", None)])
def test_thinking(endpoint: FakeEndpoint, out: Path, tmp_path: Path, wanted: str, sent: bool | None) -> None:
    assert run(endpoint, out, "--prompts", prompts(tmp_path, 2), "--thinking", wanted) == 0
    for body in asked(endpoint):
        expected = None if sent is None else {"thinking": sent, "enable_thinking": sent}
        assert body.get("chat_template_kwargs") == expected
    metas = [conversation.meta.get("thinking") for conversation in read_with_ids(out)]
    assert metas == [None if sent is None else wanted] * 4


def test_requests_at_a_time_are_bounded(endpoint: FakeEndpoint, out: Path, tmp_path: Path) -> None:
    endpoint.cues.takes_s = 0.02
    assert run(endpoint, out, "--prompts", prompts(tmp_path, 12), "--temperatures", "0,0.5,1") == 0
    assert 2 <= endpoint.most <= 4


def test_a_restarting_engine_is_waited_for(endpoint: FakeEndpoint, out: Path, tmp_path: Path) -> None:
    endpoint.cues.status = [200] * 4 + [502, 500, 503, 429, 504] * 2
    assert run(endpoint, out, "--prompts", prompts(tmp_path, 8)) == 0
    assert len(list(read_with_ids(out))) == 16


def test_pauses_double_and_differ() -> None:
    for attempt in range(30):
        found = [pause_s(attempt) for _ in range(200)]
        longest = min(LONGEST_PAUSE_S, 0.5 * 2**attempt)
        assert longest / 2 <= min(found) <= max(found) <= longest
        assert max(found) - min(found) > longest / 4


def test_a_prompt_that_is_refused_is_left_out(
    endpoint: FakeEndpoint, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.cues.status = [200] * 4 + [400, 400]
    assert run(endpoint, out, "--prompts", prompts(tmp_path, 30)) == 0
    assert len(list(read_with_ids(out))) == 58
    assert "2 × refused by the engine" in capsys.readouterr().out


def test_a_run_that_is_refused_altogether_ends(
    endpoint: FakeEndpoint, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.cues.status = [200] * 4 + [400] * 200
    assert run(endpoint, out, "--prompts", prompts(tmp_path, 100)) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "answered 400" in said and "while nothing was answered" in said
    assert len(asked(endpoint)) < 60


def peak_of_a_run(endpoint: FakeEndpoint, folder: Path, count: int) -> int:
    """Bytes held at most while the last 5 of so many prompts are answered, the others being done."""
    folder.mkdir()
    out, named = folder / "out.jsonl", prompts(folder, count, "word " * 400)
    with Ledger(out) as ledger:
        for number in range(count - 5):
            ledger.write(f"p/{number}", [Conversation(f"p/{number}", [], [1], [2] * 400)], 400, Counter())
    tracemalloc.start()
    try:
        assert run(endpoint, out, "--prompts", named) == 0
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_prompts(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    """A thousand prompts more, of 3 kB with their answers, are held as their ids: 0.2 kB each at most."""
    few, many = (peak_of_a_run(endpoint, tmp_path / str(count), count) for count in (200, 1200))
    assert many - few < 1000 * 300


@pytest.mark.parametrize(("limit", "count"), [(None, 244), (7, 7), (100, 100)])
def test_a_stream_is_the_same_prompts(limit: int | None, count: int) -> None:
    stream = StreamedPrompts("mt_bench,humaneval", limit)
    assert list(stream) == list(stream) == load_prompts("mt_bench,humaneval")[:limit]
    assert len(stream) == count
