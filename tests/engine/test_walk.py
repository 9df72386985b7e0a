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
from drafter.checkpoint.maps import read_map
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


def predicted_and_served(
    engine: Engine, drafter: Path, pair: TinyPair, texts: Walked, capsys: pytest.CaptureFixture[str]
) -> tuple[list[list[int]], list[list[int]]]:
    """Each answer's histogram: by `evaluate`, and as `engine` counts it."""
    capsys.readouterr()
    command = ["evaluate", "--drafter", str(drafter), "--shards", str(texts.shards)]
    assert main([*command, "--target", str(pair.target), "--num-steps", str(STEPS), "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    conversations = list(read_with_ids(texts.conversations))
    assert len(conversations) == PROMPTS
    with ThreadPoolExecutor(12) as threads:
        histograms = list(threads.map(lambda each: served(engine, each.messages), conversations))
    return [document["histogram"] for document in predicted["documents"]], histograms


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
    engine = engines.get(pair, drafter, num_steps=STEPS)
    predicted, histograms = predicted_and_served(engine, pair.drafters[drafter], pair, texts, capsys)
    assert predicted == histograms
    length = acceptance_length(add_histograms(histograms))
    assert length is not None and length > 1.5


@pytest.mark.parametrize("style", ["mla", "mha"])
def test_a_new_drafter_for_kimi_is_served_as_it_is_walked(
    engines: EnginePool,
    tiny: Callable[[str], TinyPair],
    walked: Callable[[str], Walked],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    style: str,
) -> None:
    """Either style, trained here from nothing and then trained on, with the target's yarn."""
    pair, texts = tiny("kimi"), walked("kimi")
    vocab, _ = read_map(pair.drafters["mla_perfect"]).sorted()
    vocab.save(tmp_path / "vocab.safetensors")
    common = ["train", "--shards", str(texts.shards), "--target", str(pair.target), "--fp32", "--export-fp32"]
    common += ["--ttt-steps", str(STEPS), "--batch-tokens", "600", "--held-share", "0.1", "--threads", "1"]
    new = ["--vocab", str(tmp_path / "vocab.safetensors"), "--style", style, "--steps", "150", "--lr", "1e-2"]
    assert main([*common, *new, "--out", str(tmp_path / "new")]) == 0
    parent = tmp_path / "new" / "drafter"
    assert main([*common, "--from", str(parent), "--steps", "20", "--out", str(tmp_path / "on")]) == 0
    drafter = tmp_path / "on" / "drafter"
    engine = engines.get(pair, str(drafter), num_steps=STEPS)
    predicted, histograms = predicted_and_served(engine, drafter, pair, texts, capsys)
    walked_length, served_length = (acceptance_length(add_histograms(each)) for each in (predicted, histograms))
    assert walked_length is not None and served_length is not None
    assert abs(walked_length - served_length) < 0.02
    assert served_length > 1.3, "nothing was learned"
