"""Costs of a step on the real engine: acceptance is simulated, so even a noised drafter's cycle gives one token."""

from collections.abc import Callable

import pytest

from bench.step_cost import check, measure
from tests.engine.conftest import EnginePool
from tests.tiny import TinyPair

pytestmark = [pytest.mark.engine, pytest.mark.slow]


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
