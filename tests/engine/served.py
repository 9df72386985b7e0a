"""The engines that tests share, by name: a start takes half a minute, so all tests that can have the same one do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from server.engine import Engine
from tests.engine.pool import EnginePool
from tests.tiny import TinyPair

CHAIN = {"num_steps": 3}
TREE = {"num_steps": 3, "topk": 4, "draft_tokens": 8}
CHUNK = 64
# name: (target, drafter, options of the engine), in the order in which they run. Noised drafters, so that steps end at
# every position.
SERVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "none", {}),
    "llama-capture": ("llama", "none", {}),
    "llama-chunked": ("llama", "mha_noised_a", {**CHAIN, "extra_args": ("--chunked-prefill-size", str(CHUNK))}),
    "llama-chain": ("llama", "mha_noised_a", CHAIN),
    "llama-perfect": ("llama", "mha_perfect", CHAIN),
    "llama-tree": ("llama", "mha_noised_a", TREE),
    "llama-ngram": ("llama", "ngram", {}),
    "kimi": ("kimi", "none", {}),
    "kimi-capture": ("kimi", "none", {}),
    "kimi-serving": ("kimi", "mla_noised_a", CHAIN),
    "kimi-chain": ("kimi", "mla_noised_a", CHAIN),
    "kimi-mha-chain": ("kimi", "mha_noised_a", CHAIN),
    "kimi-tree": ("kimi", "mla_noised_a", TREE),
    "kimi-ngram": ("kimi", "ngram", {}),
    "kimi-tp2": ("kimi", "mla_noised_a", {**CHAIN, "tp": 2}),
}
CAPTURING = ("llama-capture", "llama-chunked", "kimi-capture", "kimi-serving")


@dataclass(frozen=True)
class Served:
    """One of SERVED. The engine starts when it is first asked for, and again if a test has killed it."""

    name: str
    pair: TinyPair
    drafter: str
    options: dict[str, Any]
    pool: EnginePool
    folder: Path | None
    """Where it captures to, if it does."""

    @property
    def engine(self) -> Engine:
        return self.pool.get(self.pair, self.drafter, **self.options)


def on(*names: str) -> pytest.MarkDecorator:
    """The test runs on each of these engines, beside all others that do; it takes the fixture `served`."""
    return pytest.mark.parametrize("served", names, indirect=True)


def place(item: pytest.Item) -> int:
    """Where an item stands among those of this folder: by its engine, those with engines of their own at the end."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return list(SERVED).index(parameters["served"]) if "served" in parameters else len(SERVED)
