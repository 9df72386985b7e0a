"""Remapped drafters of the real kind: there and back is the same file, and a scrambled map is mended and serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from drafter.__main__ import main
from drafter.checkpoint.maps import read_map
from drafter.checkpoint.vocab import DraftVocab
from drafter.data.tensorfile import map_tensors, write_tensors
from tests.engine.pool import EnginePool
from tests.engine.served import CHAIN
from tests.tiny import TinyPair

DRAFTERS = [("llama", "mha_noised_a"), ("kimi", "mla_noised_a")]


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


def same_file(one: Path, other: Path) -> bool:
    return (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("target", "drafter"), DRAFTERS)
def test_there_and_back_is_the_same_file(
    tiny: Callable[[str], TinyPair], tmp_path: Path, target: str, drafter: str
) -> None:
    """To a vocabulary with 100 tokens more, and to its own again: so it also serves the same."""
    pair = tiny(target)
    source = pair.drafters[drafter]
    old = read_map(source)
    missing = np.setdiff1d(np.arange(pair.vocab_size), old.target_ids)[:100]
    large = DraftVocab(np.sort(np.concatenate([old.target_ids, missing])), pair.vocab_size)
    large.save(tmp_path / "large.safetensors")
    remap(pair, source, tmp_path / "large.safetensors", tmp_path / "large")
    assert not same_file(tmp_path / "large", source)
    assert same_file(remap(pair, tmp_path / "large", source, tmp_path / "back"), source)


@pytest.mark.engine
def test_a_scrambled_map_is_mended(
    engines: EnginePool, probed: Callable[[str], list[int]], tiny: Callable[[str], TinyPair], tmp_path: Path
) -> None:
    """Remapped by the map that its rows were trained under it is accepted as before it was spoilt.

    That it serves at length 1 as it is, and that the engine says nothing, is in test_probe.py.
    """
    pair = tiny("llama")
    source, old = pair.drafters["mha_noised_a"], tmp_path / "trained.safetensors"
    read_map(source).sorted()[0].save(old)
    bad = scrambled(source, tmp_path / "spoilt")
    folder = remap(pair, bad, bad, tmp_path / "mended", "--rows-vocab", str(old))
    wanted = probed("llama-chain")
    engine = engines.get(pair, str(folder), **CHAIN)
    assert engine.probe is not None
    assert engine.probe.histogram == wanted
