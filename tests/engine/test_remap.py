"""Remapped drafters on the real engine: there and back accepts the same, and a scrambled map is mended."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from drafter.__main__ import main
from drafter.acceptance import acceptance_length, add_histograms, histogram_of_details
from drafter.checkpoint.maps import read_map
from drafter.checkpoint.vocab import DraftVocab
from drafter.data.tensorfile import map_tensors, write_tensors
from server.engine import Engine
from tests.engine.conftest import EnginePool
from tests.engine.test_lossless import prompts
from tests.tiny import TinyPair

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS, TOKENS, STEPS = 24, 48, 3
DRAFTERS = [("llama", "mha_noised_a"), ("kimi", "mla_noised_a")]


def histograms(engine: Engine) -> list[list[int]]:
    """What each greedy answer's verify steps accepted."""

    def ask(prompt: str) -> list[int]:
        body = {
            "model": engine.served_name,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_spec_tokens_details": True,
        }
        url = f"{engine.url}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers=engine.headers, timeout=120).raise_for_status().json()
        counted = histogram_of_details(answer["sglext"]["spec_tokens_details"])
        return counted + [0] * (STEPS + 1 - len(counted))  # the engine leaves out what never happened

    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(ask, prompts()[:PROMPTS]))


def remap(pair: TinyPair, source: Path, vocab: Path, out: Path, *flags: str) -> Path:
    command = ["remap", str(source), "--vocab", str(vocab), "--verifier", str(pair.target), "--out", str(out)]
    assert main([*command, "--init", "scaled", *flags]) == 0
    return out


def scrambled(source: Path, folder: Path) -> Path:
    """The drafter with its map in another order: the same tokens, each row another one. Legal to any static check."""
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    before = read_map(source).target_ids
    ids = np.random.default_rng(5).permutation(before)
    assert (ids == before).mean() < 0.05
    tensors = map_tensors(source / "model.safetensors") | {"d2t": ids - np.arange(len(ids))}
    write_tensors(folder / "model.safetensors", tensors)
    return folder


@pytest.fixture(scope="module")
def served(
    engines: EnginePool, tiny: Callable[[str], TinyPair], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str, Callable[[TinyPair, Path, Path], Path] | None], list[list[int]]]:
    """`served(target, drafter, change)`: histograms, of what `change(pair, drafter, folder)` made where given."""
    known: dict[object, list[list[int]]] = {}

    def serve(
        target: str, drafter: str, change: Callable[[TinyPair, Path, Path], Path] | None = None
    ) -> list[list[int]]:
        key = (target, drafter, change)
        if key not in known:
            pair, name = tiny(target), drafter
            if change is not None:
                name = f"{drafter}-{change.__name__}"
                folder = change(pair, pair.drafters[drafter], tmp_path_factory.mktemp(name))
                pair = replace(pair, drafters=pair.drafters | {name: folder})
            known[key] = histograms(engines.get(pair, name, num_steps=STEPS))
        return known[key]

    return serve


def there_and_back(pair: TinyPair, source: Path, folder: Path) -> Path:
    """To a vocabulary with 100 tokens more, and to its own again."""
    old = read_map(source)
    missing = np.setdiff1d(np.arange(pair.vocab_size), old.target_ids)[:100]
    large = DraftVocab(np.sort(np.concatenate([old.target_ids, missing])), pair.vocab_size)
    large.save(folder / "large.safetensors")
    remap(pair, source, folder / "large.safetensors", folder / "large")
    return remap(pair, folder / "large", source, folder / "back")


def mended(pair: TinyPair, source: Path, folder: Path) -> Path:
    """With a scrambled d2t, remapped by the map that its rows were trained under."""
    old = folder / "trained.safetensors"
    read_map(source).sorted()[0].save(old)
    bad = scrambled(source, folder / "spoilt")
    return remap(pair, bad, bad, folder / "mended", "--rows-vocab", str(old))


@pytest.mark.parametrize(("target", "drafter"), DRAFTERS)
def test_there_and_back_accepts_the_same(served: Callable[..., list[list[int]]], target: str, drafter: str) -> None:
    before = served(target, drafter)
    length = acceptance_length(add_histograms(before))
    assert length is not None and 1.5 < length < STEPS + 1, "a drafter that is all right or all wrong shows nothing"
    assert served(target, drafter, there_and_back) == before


def test_a_scrambled_map_is_mended(served: Callable[..., list[list[int]]]) -> None:
    """That it serves at length 1 as it is, and that the engine says nothing, is in test_probe.py."""
    target, drafter = DRAFTERS[0]
    assert served(target, drafter, mended) == served(target, drafter)
