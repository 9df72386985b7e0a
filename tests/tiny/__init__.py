"""Tiny targets and drafters that the real engine serves in seconds, for tests: see `build` and `TinyPair`."""

from tests.tiny.pair import NAMES, TinyPair, build

__all__ = ["NAMES", "TinyPair", "build"]
