"""Real engines for tests: one at a time, kept while the tests that follow want the same one."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from server.config import Profile, load_profile
from server.engine import Engine
from tests.tiny import TinyPair, build

PROFILE = """
[target]
path = "{target}"
served_name = "{name}"
trust_remote_code = {remote_code}
[engine]
device = "cpu"
dtype = "float32"
context_length = 1024
max_running_requests = {requests}
max_total_tokens = 65536
env = {{OMP_NUM_THREADS = "1"}}
extra_args = {extra_args}
[drafters.ngram]
algorithm = "NGRAM"
ngram = {{draft_tokens = 8}}
[capture]
layer_ids = {layer_ids}
convention = "{convention}"
"""


class EnginePool:
    """Starts engines on demand and stops the one before: two at once are too many for this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key: object = None
        self._engine: Engine | None = None
        self._count = 0

    def profile(self, pair: TinyPair, requests: int = 16, extra_args: tuple[str, ...] = ()) -> Profile:
        """A profile that serves `pair.target` in fp32."""
        file = self._folder / f"{pair.name}-{requests}.toml"
        text = PROFILE.format(
            target=pair.target,
            name=f"tiny-{pair.name}",
            remote_code=str(pair.trust_remote_code).lower(),
            requests=requests,
            extra_args=json.dumps(extra_args),
            layer_ids=list(pair.layer_ids),
            convention=pair.convention,
        )
        file.write_text(text)
        return load_profile(file)

    def get(
        self,
        pair: TinyPair,
        drafter: str,
        *,
        requests: int = 16,
        extra_args: tuple[str, ...] = (),
        **options: Any,
    ) -> Engine:
        """The engine that serves `pair` with `drafter`: none, ngram, or a name in `pair.drafters`."""
        key = (pair.name, drafter, requests, extra_args, tuple(sorted(options.items())))
        if key != self._key or self._engine is None or self._engine.state != "ready":
            self.stop()
            self._count += 1
            what = drafter if drafter in ("none", "ngram") else str(pair.drafters[drafter])
            profile, run_dir = self.profile(pair, requests, extra_args), self._folder / f"run-{self._count}"
            engine = Engine(profile, what, run_dir=run_dir, **options)
            engine.start()
            self._engine, self._key = engine, key
        return self._engine

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.stop()
        self._engine = self._key = None


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    pool = EnginePool(tmp_path_factory.mktemp("engines"))
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], TinyPair]:
    """`tiny("llama")` or `tiny("kimi")`: trained once, then cached."""
    return build
