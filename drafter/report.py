"""An evidence report (`report.json`): writing, reading with checks, hashes, provenance.

A report carries every request's histogram, so that its figures can be counted again; reading does so. There is one
variant for each drafter and load (concurrency, thinking). Keys that a measurement did not produce are absent, never
null. What it must hold is in drafter/schema.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from drafter.recount import recount
from drafter.schema import FORMAT, Report, ReportError, check_schema
from drafter.settings import read_settings

__all__ = [
    "FORMAT",
    "Report",
    "ReportError",
    "check_report",
    "command",
    "common_flags",
    "file_sha256",
    "flag_groups",
    "ids_sha256",
    "machine",
    "now",
    "provenance",
    "read_report",
    "replaced",
    "to_json",
    "write_report",
    "write_text",
]


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: a temporary file beside it, synced, then renamed over it."""
    with replaced(path) as stream:
        stream.write(text)


@contextmanager
def replaced(path: Path) -> Iterator[TextIO]:
    """The same for a text that is written bit by bit; an error leaves what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def to_json(report: Report) -> str:
    """The report as JSON text. Raises ReportError on anything that breaks the schema, NaN and infinity included."""
    check_report(report, "the report")
    return json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_report(report: Report, path: Path) -> None:
    """Check and write `report.json`, whole or not at all."""
    write_text(path, to_json(report))


def read_report(path: Path) -> Report:
    """Read and check a report. Raises ReportError."""
    try:
        report = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except OSError as error:
        raise ReportError(f"report {path} cannot be read ({error.strerror}): check the path.") from None
    except (ValueError, RecursionError) as error:
        raise ReportError(f"report {path} is not JSON ({error}): it was cut or edited; measure again.") from None
    check_report(report, f"report {path}")
    return dict(report)


def check_report(report: Any, what: str = "the report") -> None:
    """Raise ReportError unless `report` follows the schema and its figures follow from its requests."""
    check_schema(report, what)
    recount(report, what)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a figure")


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes, in hex: how reports, shards and weights are named."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def ids_sha256(token_ids: Iterable[int]) -> str:
    """sha256 of token ids as little-endian int64: two answers are equal, token for token, if their hashes are."""
    return hashlib.sha256(b"".join(token.to_bytes(8, "little", signed=True) for token in token_ids)).hexdigest()


def now() -> str:
    """The time as `created` has it: UTC, ISO 8601, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def provenance(
    *,
    target: Mapping[str, Any],
    engine_version: str | None,
    engine_env: str,
    argvs: Sequence[Sequence[str]],
    profile_sha256: str | None,
    prompts_sha256: str,
) -> dict[str, Any]:
    """Where the figures come from.

    engine_env: "ours" where Eyas started the engine, so that nothing in its environment fakes acceptance; else
    "unknown". argvs: one engine command line for each variant that ran; `flags` is what they have in common.
    engine_version is left out where no engine came up, profile_sha256 where none was started from a profile.
    """
    block: dict[str, Any] = {
        "target": dict(target),
        "engine_env": engine_env,
        "flags": common_flags(argvs),
        "prompts_sha256": prompts_sha256,
        "machine": machine(),
        "command": command(),
    }
    if profile_sha256 is not None:
        block["profile_sha256"] = profile_sha256
    if engine_version is not None:
        block["engine_version"] = engine_version
    return block


def common_flags(argvs: Sequence[Sequence[str]]) -> list[str]:
    """The flags, with their values, that every command line has, in the order of the first."""
    if not argvs:
        return []
    grouped = [flag_groups(argv) for argv in argvs]
    return [word for group in grouped[0] if all(group in other for other in grouped[1:]) for word in group]


def flag_groups(argv: Sequence[str]) -> list[tuple[str, ...]]:
    """Each flag of a command line with its values."""
    groups: list[list[str]] = []
    for word in argv:
        if word.startswith("--"):
            groups.append([word])
        elif groups:
            groups[-1].append(word)
    return [tuple(group) for group in groups]


def command() -> str:
    """The command line that is running, as it would be typed again: the interpreter without its folder, and
    $EYAS_HOME for the folder that it stands for, since a report may be read on another machine."""
    home = str(read_settings().home)
    typed = shlex.join(["python", *sys.orig_argv[1:]])
    return typed.replace(f"{home}/", "$EYAS_HOME/") if shlex.quote(home) == home else typed


def machine() -> dict[str, Any]:
    """The machine in words and numbers: system, processor, cores, memory in GiB, and GPUs by `nvidia-smi`."""
    described: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "python": platform.python_version(),
        "gpus": _gpus(),
    }
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    described["memory_gib"] = round(pages * page_bytes / 2**30, 1)
    return described


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return named[1] if named else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"unknown (nvidia-smi: {error})"]
    return [line.strip() for line in found.stdout.splitlines() if line.strip()]
