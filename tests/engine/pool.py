"""Real engines for tests: one at a time, kept while the tests that follow want the same one."""

from pathlib import Path
from typing import Any

from server.config import Profile, load_profile
from server.engine import Engine
from tests.engine.profiles import profile_text
from tests.tiny import TinyPair


class EnginePool:
    """Starts engines on demand and stops the one before: two at once are too many for this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key: object = None
        self._engine: Engine | None = None
        self._count = 0

    def profile(self, pair: TinyPair, *more: Any) -> Profile:
        """A profile that serves `pair.target` in fp32; `more` as profile_text takes it."""
        file = self._folder / f"{pair.name}-{self._count}.toml"
        file.write_text(profile_text(pair, *more))
        return load_profile(file)

    def get(
        self,
        pair: TinyPair,
        drafter: str,
        *,
        requests: int = 16,
        extra_args: tuple[str, ...] = (),
        tp: int = 1,
        tool_call_parser: str | None = None,
        **options: Any,
    ) -> Engine:
        """The engine that serves `pair` with `drafter`: none, ngram, a name in `pair.drafters`, or a folder."""
        key = (pair.name, drafter, requests, extra_args, tp, tool_call_parser, tuple(sorted(options.items())))
        if key != self._key or self._engine is None or self._engine.state != "ready":
            self.stop()
            self._count += 1
            what = drafter if drafter in ("none", "ngram") else str(pair.drafters.get(drafter, drafter))
            profile, run_dir = self.profile(pair, *key[2:6]), self._folder / f"run-{self._count}"
            engine = Engine(profile, what, run_dir=run_dir, **options)
            engine.start()
            self._engine, self._key = engine, key
        return self._engine

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.stop()
        self._engine = self._key = None
