"""Real engines for tests: one at a time, kept while the tests that follow want the same one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from server.config import Profile, load_profile
from server.engine import Engine
from tests.engine.profiles import profile_text
from tests.tiny import TinyPair, build


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
        file.write_text(profile_text(pair, requests, extra_args))
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
        """The engine that serves `pair` with `drafter`: none, ngram, a name in `pair.drafters`, or a folder."""
        key = (pair.name, drafter, requests, extra_args, tuple(sorted(options.items())))
        if key != self._key or self._engine is None or self._engine.state != "ready":
            self.stop()
            self._count += 1
            what = drafter if drafter in ("none", "ngram") else str(pair.drafters.get(drafter, drafter))
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
