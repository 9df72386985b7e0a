"""The case in miniature, on the real engine: a permuted vocabulary map serves at length 1, and the engine is silent."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from server.config import load_profile
from server.engine import Engine, EngineError
from tests.drafter.mutation import Mutation
from tests.drafter.mutations import mutations
from tests.drafter.spoilt_files import split
from tests.drafter.spoilt_tensors import another_vocabulary, scramble
from tests.engine.pool import EnginePool
from tests.engine.profiles import profile_text
from tests.engine.served import Served, on
from tests.tiny import TinyPair

pytestmark = pytest.mark.engine

DRAFTER = "mha_noised_a"


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


@on("llama-chain")
def test_a_sound_drafter_is_accepted_in_part(served: Served, probed: Callable[[str], list[int]]) -> None:
    """What the tests below compare with, from the engine that serves at this moment."""
    histogram = probed(served.name)
    assert histogram[0] > 0 and sum(histogram[1:]) > 0


def test_a_scrambled_map_is_silent_in_the_engine_and_loud_here(
    pair: TinyPair, engines: EnginePool, tmp_path: Path
) -> None:
    engines.stop()
    drafter = with_map(pair, tmp_path, lambda tensors: scramble(tensors, 1))
    engine = engine_for(pair, drafter, tmp_path)
    assert not [finding for finding in engine.findings if finding.severity == "error"], "it is legal to every check"
    with pytest.raises(EngineError) as caught:
        engine.start()
    assert engine.probe is not None and engine.probe.acceptance_length < 1.1
    assert "d2t is not the map that lm_head was trained under" in str(caught.value)
    assert f"acceptance length {engine.probe.acceptance_length:.2f}" in str(caught.value)
    log = engine.log_tail(10_000)
    assert any("Uvicorn running" in line for line in log), "this is not what it said while it served"
    said = [line for line in log if re.search(r"\b(WARNING|ERROR|Traceback)\b", line)]
    assert not [line for line in said if re.search(r"d2t|vocab|token map|accept", line, re.IGNORECASE)], said


@pytest.mark.slow
def test_the_map_of_another_drafter(pair: TinyPair, tmp_path: Path) -> None:
    """A map that agrees with itself and with the sizes, as a trainer writes over the drafter's own."""
    drafter = with_map(pair, tmp_path, lambda tensors: another_vocabulary(tensors, 4, True))
    with pytest.raises(EngineError, match="hardly ever accepted"):
        engine_for(pair, drafter, tmp_path).start()


# What no check names, though a tool may write it. One cuts the weights into two files, where the others would not find
# them: it comes last. One takes away what another changes: it has a drafter of its own.
HARMLESS = sorted((each for each in mutations() if not each.names), key=lambda each: each.apply is split)
TAKEN_AWAY = [each for each in HARMLESS if each.kind == "missing"]


@pytest.mark.parametrize(
    "some",
    [
        pytest.param([each for each in HARMLESS if each not in TAKEN_AWAY], id="all but one"),
        pytest.param(TAKEN_AWAY, id="one", marks=pytest.mark.slow),
    ],
)
def test_harmless_changes_serve_alike(
    pair: TinyPair, engines: EnginePool, probed: Callable[[str], list[int]], tmp_path: Path, some: list[Mutation]
) -> None:
    """All of them in one drafter: the same histogram, step for step."""
    assert some
    wanted = probed("llama-chain")
    engines.stop()
    drafter = tmp_path / "harmless"
    shutil.copytree(pair.drafters[DRAFTER], drafter)
    for mutation in some:
        mutation.apply(drafter)
    with engine_for(pair, drafter, tmp_path) as engine:
        assert engine.probe is not None
        assert engine.probe.histogram == wanted
