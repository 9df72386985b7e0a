"""What an engine's log tells: how far its start is, that it lost its port, and its last lines that say something."""

from __future__ import annotations

import re

# The stages of a start, by what SGLang logs.
STAGES = (
    (re.compile(r"Load weight begin"), "loading the target's weights"),
    (re.compile(r"KV Cache is allocated|Memory pool end"), "allocating the cache"),
    (re.compile(r"Uvicorn running|Application startup complete"), "warming up"),
)
PORT_LOST = re.compile(r"address already in use", re.IGNORECASE)
# Lines that say nothing about this engine: model classes that cannot be imported here, and access logs.
NOISE = re.compile(r'Ignore import error|"(GET|POST) /|^\s*$|kill_process_tree|Received sigquit')


def stage_of(log: str) -> str | None:
    """How far the start is, in words; None before the first stage."""
    return next((name for pattern, name in reversed(STAGES) if pattern.search(log)), None)


def lost_its_port(log: str) -> bool:
    """Whether another process took the engine's port before it listened."""
    return PORT_LOST.search(log) is not None


def last_words(log: str, lines: int) -> list[str]:
    """The last lines that are not noise."""
    return [line for line in log.splitlines() if not NOISE.search(line)][-lines:]
