"""A target's chat template, as much of it as generating needs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from drafter.data.asking import GenerateError


@dataclass(frozen=True)
class Template:
    """The target's chat template around a first user message: what stands before it, and what ends it."""

    before: str
    end: str
    end_ids: frozenset[int]

    @classmethod
    def of_folder(cls, folder: Path, own_prompts: bool) -> Template:
        """Read it from a target folder; without prompts of its own only the end tokens matter. Raises GenerateError."""
        import transformers

        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            found = json.loads((folder / "config.json").read_text("utf-8")).get("eos_token_id")
            end_ids = {*(found if isinstance(found, list) else [found]), tokenizer.eos_token_id} - {None}
            if not own_prompts:
                return cls("", "", frozenset(end_ids))
            marked = tokenizer.apply_chat_template([{"role": "user", "content": "\x00"}], tokenize=False)
        except (OSError, ValueError) as error:
            raise GenerateError(
                f"{folder} has no usable tokenizer with a chat template ({error}): name the target's folder."
            ) from None
        before, _, after = marked.partition("\x00")
        ids = tokenizer.encode(after.strip(), add_special_tokens=False)
        if not ids:
            raise GenerateError(
                f"the chat template of {folder} puts no token after a user's message, so the target's own prompts "
                "would have no end: give prompts to answer with --prompts."
            )
        return cls(before, tokenizer.decode(ids[:1]), frozenset(end_ids))
