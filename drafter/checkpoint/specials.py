"""The target's tokens that structure an answer, and what a drafter pays for each kind that it cannot propose."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafter.checkpoint.vocab import Ids, VocabError
from drafter.data.tensorfile import plain_bytes

# The first kind whose pattern is found in a token's text.
KINDS = {
    "think": re.compile("think"),
    "tool": re.compile("tool"),
    "media": re.compile("media|image|vision|video|audio"),
    "end": re.compile(r"im_end|eot|eos|end_?of_?(text|turn)|^</s>$", re.IGNORECASE),
}
# A step that meets such a token keeps what was accepted before it and gives the token itself: never more than that.
COSTS = {
    "think": "each change into or out of thinking ends a verify step early, and thinking answers have two",
    "tool": "each tool call is cut at its markers into several verify steps that accept little: agents pay most",
    "media": "nothing in answers of text, since the target reads these and does not write them",
    "end": "each answer's last step offers tokens past its end that are thrown away; short answers pay most",
}
KIMI_VOCAB = 163_840  # of Kimi-K2 and K2.5, whose ids these are (their tokenizer_config.json)
KIMI = {
    163_585: "[EOS]",
    163_586: "<|im_end|>",
    163_593: "[EOT]",
    163_595: "<|tool_calls_section_begin|>",
    163_596: "<|tool_calls_section_end|>",
    163_597: "<|tool_call_begin|>",
    163_598: "<|tool_call_argument_begin|>",
    163_599: "<|tool_call_end|>",
    163_602: "<|media_begin|>",
    163_603: "<|media_content|>",
    163_604: "<|media_end|>",
    163_605: "<|media_pad|>",
    163_606: "<think>",
    163_607: "</think>",
}


class NoAddedTokens(VocabError):
    """A tokenizer of a kind whose files here do not name its added tokens."""


@dataclass(frozen=True)
class Special:
    """One token of a kind in KINDS."""

    id: int
    token: str
    kind: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def kind_of(token: str) -> str | None:
    """The kind of a token by its text; None for one that structures nothing."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(token)), None)


def specials_of(tokens: Iterable[tuple[int, str]]) -> list[Special]:
    """Those of the (id, text) pairs that have a kind, by id."""
    return [Special(number, token, kind) for number, token in sorted(tokens) if (kind := kind_of(token)) is not None]


def known_specials(target_vocab_size: int | None) -> list[Special] | None:
    """Without a target folder: Kimi's, known by the size of its vocabulary alone; None for any other."""
    return specials_of(KIMI.items()) if target_vocab_size == KIMI_VOCAB else None


def target_specials(folder: Path, vocab_size: int | None) -> list[Special] | None:
    """The specials of a target folder's tokenizer; where it names none, those known by the size of its vocabulary.

    None where neither tells. Raises VocabError for a tokenizer that cannot be read.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return known_specials(vocab_size)
    try:
        return specials_of((token["id"], token["content"]) for token in added_tokens(folder))
    except NoAddedTokens:
        return known_specials(vocab_size)


def missing(specials: Iterable[Special], target_ids: Ids) -> list[Special]:
    """Those that a draft vocabulary lacks."""
    known = set(target_ids.tolist())
    return [special for special in specials if special.id not in known]


def special_ids(folder: Path) -> list[int]:
    """Every token that a draft vocabulary must hold: those marked special, and those of a kind. Raises VocabError."""
    return [token["id"] for token in added_tokens(folder) if token["special"] or kind_of(token["content"])]


def added_tokens(folder: Path) -> list[dict[str, Any]]:
    """`{id, content, special}` of each token that a target's tokenizer adds to those of its training.

    From tokenizer.json, or from tokenizer_config.json where there is none (Kimi's is tiktoken). Raises VocabError.
    """
    file = folder / "tokenizer.json"
    try:
        if file.exists() or not (folder / "tokenizer_config.json").is_file():
            found = read_json(file).get("added_tokens", [])
        else:
            file = folder / "tokenizer_config.json"
            named = read_json(file).get("added_tokens_decoder")
            if named is None:
                raise NoAddedTokens(f"{file} has no added_tokens_decoder: put the target's tokenizer.json beside it.")
            found = [{"id": int(number)} | token for number, token in named.items()]
        return [
            {
                "id": int(token["id"]),
                "content": str(token.get("content", "")),
                "special": bool(token.get("special")),
            }
            for token in found
        ]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, VocabError):
            raise
        raise VocabError(f"{file} has no readable added tokens: is it a target's folder?") from None


def target_vocab_size(folder: Path) -> int:
    """V of a target folder. Raises VocabError."""
    config = read_json(folder / "config.json")
    try:
        return int((config.get("text_config") or config)["vocab_size"])
    except (AttributeError, KeyError, TypeError, ValueError):
        raise VocabError(f"{folder / 'config.json'} names no vocab_size: is it a target's folder?") from None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file of a target. Raises VocabError."""
    try:
        found: dict[str, Any] = json.loads(plain_bytes(file))
    except (OSError, ValueError, RecursionError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise VocabError(f"{file} cannot be read ({reason}): name the target's folder.") from None
    return found
