"""Chats that `tokenize` renders have, token for token, the ids that the engine makes of them and writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer

from drafter.__main__ import main
from drafter.data.conversations import read_with_ids
from tests.engine.conftest import EnginePool
from tests.tiny import TinyPair

pytestmark = pytest.mark.engine

ASKED = (
    ["what is this"],
    ["tell me of the river, and of the stone 12 that lies in it", "and what then?"],
    ["one", "two two", "three three three"],
)


@pytest.mark.parametrize("name", ["llama", "kimi"])
def test_ids_are_the_engines(engines: EnginePool, tiny: Callable[[str], TinyPair], name: str, tmp_path: Path) -> None:
    pair = tiny(name)
    engine = engines.get(pair, "none")
    model = engines.profile(pair).target.served_name
    told, expected = [], {}
    for number, questions in enumerate(ASKED):
        messages: list[dict[str, str]] = []
        for turn, question in enumerate(questions):
            messages.append({"role": "user", "content": question})
            body = {
                "model": model,
                "messages": messages,
                "max_tokens": 10,
                "temperature": 0,
                "return_input_ids_in_sglext": True,
                "return_output_ids_in_sglext": True,
            }
            said = httpx.post(
                f"{engine.url}/v1/chat/completions", json=body, headers=engine.headers, timeout=120
            ).json()
            messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
            ids = said["sglext"]
            expected[f"c{number}/{turn}" if turn else f"c{number}"] = (ids["input_ids"], ids["output_ids"][0])
        told.append({"id": f"c{number}", "messages": messages})
    chats, out = tmp_path / "chats.jsonl", tmp_path / "out.jsonl"
    chats.write_text("".join(json.dumps(chat) + "\n" for chat in told))
    assert main(["tokenize", str(chats), "--target", str(pair.target), "--out", str(out)]) == 0
    found = {each.id: (list(each.input_ids), list(each.output_ids)) for each in read_with_ids(out)}
    assert found.keys() == expected.keys() and len(found) == 6
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    told_apart = 0
    for name_of, (input_ids, output_ids) in expected.items():
        assert found[name_of][0] == input_ids
        # A toy writes letters one by one that its tokenizer would write as one token; of such an answer only the text
        # is known.
        text = tokenizer.decode(output_ids, skip_special_tokens=True)
        if tokenizer.encode(text, add_special_tokens=False) == output_ids:
            assert found[name_of][1] == output_ids
            told_apart += 1
    assert told_apart >= 2
