"""From prompts to a prediction, by the verbs, on the real engine in fp32: the walk counts what the engine counts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.accept_len import main as accept_len
from drafter.__main__ import main
from drafter.acceptance import acceptance_length, add_histograms
from drafter.checkpoint.maps import read_map
from drafter.data.conversations import read_with_ids
from drafter.report import read_report
from server.engine import Engine
from tests.engine.pool import EnginePool
from tests.engine.served import Served, on
from tests.tiny import TinyPair

pytestmark = pytest.mark.engine

PROMPTS, TOKENS, STEPS = 40, 48, 3
WORDS = "the eagle hunts over water and sees a fish then it dives holds turns lands feeds its young in spring"


@dataclass(frozen=True)
class Captured:
    """Prompts, a target's greedy answers to them, and what was captured of those."""

    prompts: Path
    conversations: Path
    shards: Path

    def order(self) -> list[str]:
        """The prompts' ids as the bench gives them, in the order of the answers, which is that of their ends."""
        lines = [json.loads(line)["prompt"] for line in self.prompts.read_text().splitlines()]
        places = [lines.index(each.messages[0]["content"]) + 1 for each in read_with_ids(self.conversations)]
        assert sorted(places) == list(range(1, PROMPTS + 1))
        return [f"{self.prompts.stem}/{number}" for number in places]


def keys(engine: Engine) -> list[str]:
    return ["--url", engine.url, "--key-file", str(engine.key_file)]


@pytest.fixture(scope="session")
def captured(
    get_served: Callable[[str], Served], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Captured]:
    """`captured("llama")`: made once for each target, by `generate` and `capture` on its capturing engine."""
    made: dict[str, Captured] = {}

    def make(target: str) -> Captured:
        if target not in made:
            served, folder, rng = get_served(f"{target}-capture"), tmp_path_factory.mktemp(target), random.Random(11)
            found = Captured(folder / "asked.jsonl", folder / "answers.jsonl", folder / "shards")
            lines = (" ".join(rng.choices(WORDS.split(), k=rng.randint(4, 30))) for _ in range(PROMPTS))
            found.prompts.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
            engine = served.engine
            asked = [
                "--model",
                engine.served_name,
                "--target",
                str(served.pair.target),
                "--prompts",
                str(found.prompts),
            ]
            budget = ["--max-tokens", str(TOKENS), "--past", str(STEPS + 1), "--concurrency", "12"]
            assert main(["generate", *keys(engine), *asked, *budget, "--out", str(found.conversations)]) == 0
            where = ["--dir", str(served.folder), "--out", str(found.shards)]
            assert main(["capture", str(found.conversations), *keys(engine), *where]) == 0
            made[target] = found
        return made[target]

    return make


@on("llama-capture", "kimi-capture")
def test_prompts_are_answered_and_captured(served: Served, captured: Callable[[str], Captured]) -> None:
    """What the test below walks, from the engine that serves at this moment."""
    assert len(captured(served.pair.name).order()) == PROMPTS


def walked_and_counted(
    engine: Engine, pair: TinyPair, drafter: Path, texts: Captured, out: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[list[list[int]], list[list[int]]]:
    """Each answer's histogram: by `evaluate`, and as the bench counts it on an engine that runs."""
    capsys.readouterr()
    command = ["evaluate", "--drafter", str(drafter), "--shards", str(texts.shards), "--target", str(pair.target)]
    assert main([*command, "--num-steps", str(STEPS), "--json"]) == 0
    walked = json.loads(capsys.readouterr().out)
    asked = ["--prompts", str(texts.prompts), "--max-tokens", str(TOKENS), "--concurrency", "12"]
    assert accept_len([*keys(engine), *asked, "--out", str(out)]) == 0
    (variant,) = read_report(out / "report.json")["variants"]
    counted: dict[str, Any] = {each["prompt_id"]: each["histogram"] for each in variant["requests"]}
    # The engine leaves out what never happened.
    histograms = [counted[name] + [0] * (STEPS + 1 - len(counted[name])) for name in texts.order()]
    assert variant["acceptance_length"] == acceptance_length(add_histograms(histograms))
    return [document["histogram"] for document in walked["documents"]], histograms


@on("llama-chain", "kimi-mha-chain", pytest.param("llama-perfect", marks=pytest.mark.slow))
def test_the_walk_counts_what_the_engine_counts(
    served: Served, captured: Callable[[str], Captured], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The drafter walked along plain greedy tokens gives every histogram of the engine, exactly."""
    pair, texts = served.pair, captured(served.pair.name)
    drafter = pair.drafters[served.drafter]
    walked, counted = walked_and_counted(served.engine, pair, drafter, texts, tmp_path / "out", capsys)
    assert walked == counted
    length = acceptance_length(add_histograms(counted))
    assert length is not None and length > 1.5


@pytest.mark.parametrize("style", ["mla", "mha"])
def test_a_new_drafter_for_kimi_is_served_as_it_is_walked(
    engines: EnginePool,
    tiny: Callable[[str], TinyPair],
    captured: Callable[[str], Captured],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    style: str,
) -> None:
    """Either style, trained here from nothing and then trained on, with the target's yarn."""
    pair, texts = tiny("kimi"), captured("kimi")
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
    walked, counted = walked_and_counted(engine, pair, drafter, texts, tmp_path / "out", capsys)
    lengths = [acceptance_length(add_histograms(each)) for each in (walked, counted)]
    assert lengths[0] is not None and lengths[1] is not None
    assert abs(lengths[0] - lengths[1]) < 0.02
    assert lengths[1] > 1.3, "nothing was learned"
