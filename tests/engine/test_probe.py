"""The case in miniature, on the real engine: a permuted vocabulary map serves at length 1, and the engine is silent."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from server import probe
from server.config import load_profile
from server.engine import Engine, EngineError
from tests.drafter.mutations import another_vocabulary, mutations, scramble
from tests.engine.profiles import profile_text
from tests.tiny import TinyPair

pytestmark = [pytest.mark.engine, pytest.mark.slow]

DRAFTER = "mha_noised_a"
HARMLESS = [mutation for mutation in mutations() if not mutation.names]


@pytest.fixture
def pair(tiny: Callable[[str], TinyPair]) -> TinyPair:
    return tiny("llama")


def engine_for(pair: TinyPair, drafter: Path, folder: Path, probe_table: str = "", **options: object) -> Engine:
    file = folder / "profile.toml"
    file.write_text(profile_text(pair) + probe_table)
    return Engine(load_profile(file), str(drafter), run_dir=folder / "run", num_steps=3, **options)  # type: ignore[arg-type]


def with_map(pair: TinyPair, folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    copy = folder / "drafter"
    shutil.copytree(pair.drafters[DRAFTER], copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_a_scrambled_map_is_silent_in_the_engine_and_loud_here(pair: TinyPair, tmp_path: Path) -> None:
    drafter = with_map(pair, tmp_path, lambda tensors: scramble(tensors, 1))
    engine = engine_for(pair, drafter, tmp_path, '[probe]\noff = "to hear what the engine says"')
    assert not [finding for finding in engine.findings if finding.severity == "error"], "it is legal to every check"
    with engine:
        served = probe.ask(engine.url, engine.served_name, engine.headers, 120)
        said = [line for line in engine.log_tail(10_000) if re.search(r"\b(WARNING|ERROR|Traceback)\b", line)]
    assert served.acceptance_length < 1.1
    assert not [line for line in said if re.search(r"d2t|vocab|token map|accept", line, re.IGNORECASE)], said

    with pytest.raises(EngineError) as caught:
        engine_for(pair, drafter, tmp_path).start()
    assert "d2t is not the map that lm_head was trained under" in str(caught.value)
    assert f"acceptance length {served.acceptance_length:.2f}" in str(caught.value)


def test_the_map_of_another_drafter(pair: TinyPair, tmp_path: Path) -> None:
    """A map that agrees with itself and with the sizes, as a trainer writes over the drafter's own."""
    drafter = with_map(pair, tmp_path, lambda tensors: another_vocabulary(tensors, 4, True))
    with pytest.raises(EngineError, match="hardly ever accepted"):
        engine_for(pair, drafter, tmp_path).start()


def test_harmless_changes_serve_alike(pair: TinyPair, tmp_path: Path) -> None:
    """What no check names, though a tool may write it: the same histogram, step for step."""
    with engine_for(pair, pair.drafters[DRAFTER], tmp_path) as engine:
        assert engine.probe is not None
        wanted = engine.probe.histogram
    assert wanted[0] > 0 and sum(wanted[1:]) > 0
    found = {}
    for number, mutation in enumerate(HARMLESS):
        drafter = tmp_path / f"harmless-{number}"
        shutil.copytree(pair.drafters[DRAFTER], drafter)
        mutation.apply(drafter)
        with engine_for(pair, drafter, tmp_path) as engine:
            assert engine.probe is not None
            found[str(mutation)] = engine.probe.histogram
    assert found == dict.fromkeys(found, wanted), json.dumps(found)
