"""Costs of a step on the real engine: acceptance is simulated, so even a noised drafter's cycle gives one token."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.step_cost import ask, check, measure
from drafter.speedup import Costs, adaptive_config
from server.config import load_profile
from server.engine import Engine
from tests.engine.pool import EnginePool
from tests.engine.profiles import profile_text
from tests.tiny import TinyPair

pytestmark = pytest.mark.engine


@pytest.mark.slow
def test_longer_chains_cost_more_and_every_cycle_gives_one_token(engines: EnginePool, tiny: Callable[[str], TinyPair]):
    engines.stop()
    llama = tiny("llama")
    profile = engines.profile(llama)
    drafter = str(next(iter(llama.drafters.values())))
    check(profile, drafter, [1, 4], [1, 5], 24)
    said: list[str] = []
    costs, drift = measure(profile, drafter, [1, 4], [1, 5], 24, 3, said.append)
    assert said[0].startswith("no speculation") and said[-1] == "no speculation: 4 at a time"
    for batch in (1, 4):
        # Nothing is said of a decode step: the tiny target's is the scheduler's work and hardly its own.
        assert costs.ratio(batch, 5) > costs.ratio(batch, 1)
    assert drift >= 0


def test_the_engine_serves_by_an_adaptive_config_of_ours(
    engines: EnginePool, tiny: Callable[[str], TinyPair], tmp_path: Path
):
    """It takes the file, keeps adaptive speculation on, and answers one and four requests at a time."""
    engines.stop()
    llama = tiny("llama")
    costs = Costs({1: 10.0, 4: 10.0}, {1: {1: 11.0, 3: 12.0}, 4: {1: 12.0, 3: 30.0}}, "made up")
    config = adaptive_config(costs, [0.7, 0.5, 0.35])
    assert config == {"1": {"candidate_steps": [3]}, "4": {"candidate_steps": [1]}}
    (tmp_path / "adaptive.json").write_text(json.dumps(config))
    folder = next(iter(llama.drafters.values()))
    text = profile_text(llama) + f'[drafters.own]\npath = "{folder}"\nadaptive = "adaptive.json"\n'
    (tmp_path / "profile.toml").write_text(text)
    with Engine(load_profile(tmp_path / "profile.toml"), "own") as engine:
        assert engine.resolved["speculative_adaptive"] is True
        prompts = [[place + 1] * 16 for place in range(4)]
        for batch in (1, 4):
            _, cycles = ask(engine, prompts[:batch], 48)
            assert all(0 < each < 48 for each in cycles)
