"""Numbers and keys on a command line: read, or refused as a usage error that names what was found."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path


class KeyFileError(ValueError):
    """A key file that holds no engine's key: says which, and what to give."""


def whole(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """A type for argparse: whole numbers from `least` on, or to `most`."""
    wanted = f"of {least} or more" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= (int(text) if most is None else most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {wanted}")
        return int(text)

    return read


def number(least: float = 0.0, most: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """A type for argparse: finite numbers from `least` to `most`; with `above`, larger than `least`."""
    wanted = f"above {least:g}" if above else f"of {least:g} or more" if most == math.inf else f"from {least:g}"
    wanted += "" if most == math.inf else f" to {most:g}"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan  # lies in no range
        if not (math.isfinite(value) and least <= value <= most) or (above and value == least):
            raise argparse.ArgumentTypeError(f"{text!r} is not a finite number {wanted}")
        return value

    return read


def key_headers(file: Path | None) -> dict[str, str]:
    """The header that an engine's key file asks for; none without a file. Raises KeyFileError."""
    if file is None:
        return {}
    try:
        return {"authorization": f"Bearer {json.loads(file.read_text('utf-8'))['api-key']}"}
    except OSError as error:
        raise KeyFileError(f"--key-file: {file} cannot be read ({error.strerror}).") from None
    except (ValueError, KeyError, TypeError):
        raise KeyFileError(
            f"--key-file: {file} is no engine's key file: give the one that the engine printed."
        ) from None
