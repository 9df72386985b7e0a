"""A team's own chats -> the engine's token ids, by the target's own chat template.

Each answer in a chat becomes a conversation of its own: what an engine would have been sent before it, as ids, and the
answer's ids. The first are rendered as an engine renders a request; the second are tokenised by themselves, as they are
generated, and end with the template's end of a turn. So the loss mask is the answer, and nothing that a prompt injects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from drafter.data.conversations import Conversation, ConversationError, parse_line, text_lines

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Chat:
    """A chat as its team has it: OpenAI's messages, tools where there were any."""

    id: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None
    where: str


class Transcriber:
    """Renders with one target's template and tokenizer."""

    def __init__(self, target: Path, thinking: str = "default") -> None:
        """thinking: on or off, by the template, or as it is. Raises ConversationError."""
        import transformers

        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(target)
            found = json.loads((target / "config.json").read_text("utf-8")).get("eos_token_id")
        except (OSError, ValueError) as error:
            raise ConversationError(f"{target} has no usable tokenizer ({error}): name the target's folder.") from None
        if not self._tokenizer.chat_template:
            raise ConversationError(f"{target} has no chat template: chats cannot be rendered as its engine would.")
        ends = {*(found if isinstance(found, list) else [found]), self._tokenizer.eos_token_id} - {None}
        self._ends = frozenset(int(end) for end in ends)
        self._words: dict[str, bool] = {}
        if thinking != "default":
            self._words = {"thinking": thinking == "on", "enable_thinking": thinking == "on"}

    def conversations(self, chat: Chat, last: bool = False) -> Iterator[Conversation]:
        """One for each answer, or for the last alone. Raises ConversationError where a chat cannot be rendered."""
        turns = [at for at, message in enumerate(chat.messages) if message["role"] == "assistant" and at > 0]
        if not turns:
            raise ConversationError(f"{chat.where} has no answer of the assistant's after a message: nothing to learn.")
        messages = [_as_sent(message, chat.where) for message in chat.messages]
        for number, at in enumerate(turns):
            if last and at != turns[-1]:
                continue
            prompt = self._render(messages[:at], chat, add_generation_prompt=True)
            whole = self._render(messages[: at + 1], chat, add_generation_prompt=False)
            output_ids, how = self._answer(prompt, whole, messages[at], chat)
            meta = {"tokens_by": how} | ({"turn": number} if len(turns) > 1 else {})
            name = chat.id if number == 0 else f"{chat.id}/{number}"
            yield Conversation(name, list(chat.messages[: at + 1]), self._ids(prompt), output_ids, meta)

    def _answer(self, prompt: str, whole: str, message: Mapping[str, Any], chat: Chat) -> tuple[list[int], str]:
        """The answer's ids, and whether they are what the template writes after the prompt, or the bare content.

        The second where the template writes a past turn otherwise than it begins one: then all that is known is the
        content, and the end of a turn if that is what follows it.
        """
        content = message.get("content") or ""
        if whole.startswith(prompt):
            ids = self._ids(whole[len(prompt) :])
            stop = next((at + 1 for at, token in enumerate(ids) if token in self._ends), len(ids))
            how = "template"
            ids = ids[:stop]
        else:
            start = whole.rfind(content) if content and not message.get("tool_calls") else -1
            if start < 0 or message.get("reasoning_content"):
                raise ConversationError(
                    f"{chat.where}: the target's template writes an answer of the past otherwise than one that is "
                    "being written, so that its ids are not known: let an engine answer, with `python -m drafter "
                    "generate`."
                )
            following = self._ids(whole[start + len(content) :])
            ids = self._ids(content) + [token for token in following[:1] if token in self._ends]
            how = "content"
        if not ids:
            raise ConversationError(f"{chat.where} has an answer without a token: take the line out.")
        return ids, how

    def _render(self, messages: Sequence[Mapping[str, Any]], chat: Chat, add_generation_prompt: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=chat.tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._words,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise ConversationError(f"{chat.where} cannot be rendered by the target's template: {error}") from None
        return text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def read_chats(path: Path) -> Iterator[Chat]:
    """The chats of a file of JSON lines, which may be gzipped. Raises ConversationError at the first bad line."""
    for number, line in text_lines(path):
        where = f"{path}:{number}"
        parsed = parse_line(line, where, f"{path.stem}/{number}")
        if parsed.output_ids:
            raise ConversationError(f"{where} has output_ids, the engine's own: give the file to `capture` as it is.")
        row = json.loads(line)
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ConversationError(f"{where} holds half of a character (\\ud800 to \\udfff): take it out.") from None
        tools = row.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise ConversationError(f"{where}: 'tools' is no list.")
        for place, message in enumerate(parsed.messages):
            if message["role"] not in ROLES:
                raise ConversationError(
                    f"{where}: messages[{place}] has the role {message['role']!r}, expected one of {', '.join(ROLES)}."
                )
        yield Chat(parsed.id, parsed.messages, tools, where)


def _as_sent(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message as an engine hands it to the template: parts joined to text, arguments of calls as objects."""
    sent = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise ConversationError(f"{where} has a part that is not text (an image?): only text can be rendered.")
        if not all(isinstance(part.get("text"), str) for part in content):
            raise ConversationError(
                f'{where} has a part of type "text" without a text, expected {{"text": …}} beside it.'
            )
        sent["content"] = " ".join(part["text"] for part in content)
    elif content is not None and not isinstance(content, str):
        raise ConversationError(f"{where} has {type(content).__name__} as a content, expected text or a list of parts.")
    if message.get("tool_calls"):
        try:
            sent["tool_calls"] = [_call(call) for call in message["tool_calls"]]
        except (TypeError, KeyError, ValueError):
            raise ConversationError(f"{where} has a tool call that is not in OpenAI's form.") from None
    return sent


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function["arguments"], str):
        function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}
