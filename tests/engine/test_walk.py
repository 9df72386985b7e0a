"""From prompts to a prediction, by the verbs, on the real engine in fp32: the walk counts what the engine counts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from drafter.__main__ import main
from drafter.acceptance import acceptance_length, add_histograms, histogram_of_details
from drafter.data.conversations import read_with_ids
from server.engine import Engine
from tests.engine.conftest import EnginePool
from tests.tiny import TinyPair

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS, TOKENS, STEPS = 40, 48, 3
WORDS = "the eagle hunts over water and sees a fish then it dives holds turns lands feeds its young in spring"
DRAFTERS = {"llama": ("mha_noised_a", "mha_perfect"), "kimi": ("mha_noised_a",)}


@dataclass(frozen=True)
class Walked:
    """A target's greedy answers, and what was captured of them."""

    conversations: Path
    shards: Path


def keys(engine: Engine) -> list[str]:
    return ["--url", engine.url, "--key-file", str(engine.key_file)]


@pytest.fixture(scope="module")
def walked(
    engines: EnginePool, tiny: Callable[[str], TinyPair], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Walked]:
    made: dict[str, Walked] = {}

    def make(name: str) -> Walked:
        if name not in made:
            pair, folder, rng = tiny(name), tmp_path_factory.mktemp(name), random.Random(11)
            prompts = folder / "asked.jsonl"
            lines = (" ".join(rng.choices(WORDS.split(), k=rng.randint(4, 30))) for _ in range(PROMPTS))
            prompts.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
            found = Walked(folder / "answers.jsonl", folder / "shards")
            engine = engines.get(pair, "none")
            asked = ["generate", *keys(engine), "--model", engine.served_name, "--target", str(pair.target)]
            budget = ["--prompts", str(prompts), "--max-tokens", str(TOKENS), "--past", str(STEPS + 1)]
            assert main([*asked, *budget, "--out", str(found.conversations), "--concurrency", "12"]) == 0
            spool = folder / "spool"
            engine = engines.get(pair, "none", capture_dir=spool)
            command = ["capture", str(found.conversations), *keys(engine), "--dir", str(spool)]
            assert main([*command, "--out", str(found.shards)]) == 0
            made[name] = found
        return made[name]

    return make


def served(engine: Engine, messages: Any) -> list[int]:
    body = {"model": engine.served_name, "messages": messages, "max_tokens": TOKENS, "temperature": 0}
    answer = httpx.post(
        f"{engine.url}/v1/chat/completions",
        json=body | {"return_spec_tokens_details": True},
        headers=engine.headers,
        timeout=120,
    ).json()
    counted = histogram_of_details(answer["sglext"]["spec_tokens_details"])
    return counted + [0] * (STEPS + 1 - len(counted))  # the engine leaves out what never happened


@pytest.mark.parametrize(("target", "drafter"), [(name, each) for name, some in DRAFTERS.items() for each in some])
def test_the_walk_counts_what_the_engine_counts(
    engines: EnginePool,
    tiny: Callable[[str], TinyPair],
    walked: Callable[[str], Walked],
    capsys: pytest.CaptureFixture[str],
    target: str,
    drafter: str,
) -> None:
    pair, texts = tiny(target), walked(target)
    capsys.readouterr()
    command = ["evaluate", "--drafter", str(pair.drafters[drafter]), "--shards", str(texts.shards)]
    assert main([*command, "--target", str(pair.target), "--num-steps", str(STEPS), "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    engine = engines.get(pair, drafter, num_steps=STEPS)
    conversations = list(read_with_ids(texts.conversations))
    with ThreadPoolExecutor(12) as threads:
        histograms = list(threads.map(lambda each: served(engine, each.messages), conversations))
    assert len(conversations) == PROMPTS
    assert [document["histogram"] for document in predicted["documents"]] == histograms
    length = acceptance_length(add_histograms(histograms))
    assert predicted["acceptance_length"] == length
    assert length is not None and length > 1.5
