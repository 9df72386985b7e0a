"""The schema of an evidence report (`report.json`): writing, reading with checks, hashes, provenance.

A report carries every request's histogram, so that each figure in it can be worked out again; reading does so for
acceptance length. There is one variant for each drafter and load (concurrency, thinking). Keys that a measurement did
not produce are absent, never null.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drafter.acceptance import acceptance_length, add_histograms, check_histogram

FORMAT = 1
Report = dict[str, Any]
Kinds = tuple[type, ...]

NUMBER: Kinds = (int, float)
REPORT_KEYS: dict[str, Kinds] = {
    "format": (int,),
    "created": (str,),
    "simulated": (bool,),
    "provenance": (dict,),
    "variants": (list,),
}
PROVENANCE_KEYS: dict[str, Kinds] = {
    "target": (dict,),
    "engine_env": (str,),
    "flags": (list,),
    "prompts_sha256": (str,),
    "machine": (dict,),
    "command": (str,),
}
# Keys that a report's provenance has where there is such a thing: a profile where the bench started the engines.
ORIGIN_KEYS: dict[str, Kinds] = {
    "engine_version": (str,),
    "profile_sha256": (str,),
    "baseline": (str,),  # name of the variant that the others are held against
    "order": (list,),  # names of the variants in the order of the engine's starts
    "resumed": (int,),  # how often a killed run was gone on with
}
FAILED_KEYS: dict[str, Kinds] = {"drafter": (str,), "error": (str,)}
MEASURED_KEYS: dict[str, Kinds] = {
    "drafter": (str,),
    "engine_version": (str,),
    "flags": (list,),
    "dtype": (str,),
    "temperature": NUMBER,
    "max_tokens": (int,),
    "thinking": (str,),
    "concurrency": (int,),
    "tokens_per_second": NUMBER,
    "loop_share": NUMBER,
    "categories": (dict,),
    "requests": (list,),
}
# Keys that an "ok" variant has where the figure is defined. Times are in milliseconds.
DEFINED_KEYS: dict[str, Kinds] = {
    "answers_each": (int,),  # answers to each request (n)
    "ngram": (dict,),  # parameters and the corpus's sha256
    "foreign_vocabulary": (bool,),  # it drafts over a part of the vocabulary, and has no eyas.json that says whence
    "flushed": (bool,),  # whether the caches were emptied before each block
    "full_acc": (list,),
    "cond_acc": (list,),
    "flatness": NUMBER,
    "acceptance_length_ci95": (list,),
    "tokens_per_second_each": NUMBER,  # tokens of the answers over their summed seconds: what one user sees
    "ttft_ms_p50": NUMBER,
    "ttft_ms_p99": NUMBER,
    "tpot_ms_p50": NUMBER,
    "itl_ms_p50": NUMBER,
    "itl_ms_p99": NUMBER,
    "verify_step_ms": NUMBER,  # of variants that speculate
    "decode_step_ms": NUMBER,  # of those that do not
    "step_cost": NUMBER,  # verify_step_ms over the decode_step_ms of no speculation at this load
    "speedup": NUMBER,  # tokens/s over the baseline's at this load
    "speedup_ci95": (list,),
    "loses": (bool,),  # slower than the baseline: absent where the interval holds 1
    "greedy_equal": (dict,),
    "sampling": (dict,),
    "by_answer_position": (list,),
    "by_context_length": (list,),
    "placed_share": NUMBER,  # verify steps whose place is known, of all
    "blocks": (list,),
}
EQUAL_KEYS: dict[str, Kinds] = {"equal": (int,), "total": (int,)}
# Of greedy_equal, where the answers that differ were looked at: how many differ at a near tie, and each by itself.
LOOKED_KEYS: dict[str, Kinds] = {"near_ties": (int,), "differences": (list,)}
# `position` counts the answer's tokens from 0; `gap` is how much likelier (in nats) the target finds one token than the
# other where they part; both are absent where an answer only ended earlier or the engine gave no figure.
DIFFERENCE_KEYS: dict[str, Kinds] = {"prompt_id": (str,), "repeat": (int,), "position": (int,)}
SAMPLING_KEYS: dict[str, Kinds] = {
    "differs": (bool,),
    "p_value": NUMBER,  # the smallest of the prompts', times their number
    "error_rate": NUMBER,
    "samples": (int,),
    "reference_samples": (int,),
    "prompts": (int,),
}
BUCKET_KEYS: dict[str, Kinds] = {"from": (int,), "to": (int,), "steps": (int,), "acceptance_length": NUMBER}
REQUEST_KEYS: dict[str, Kinds] = {
    "prompt_id": (str,),
    "category": (str,),
    "histogram": (list,),
    "tokens": (int,),
    "seconds": NUMBER,
    "ttft_s": NUMBER,
    "looping": (bool,),
    "output_sha256": (str,),
}
# Keys that a request has where they are known. `accepted`: the accepted draft tokens of each verify step, in order, one
# base-36 digit each.
PLACED_KEYS: dict[str, Kinds] = {"repeat": (int,), "answer": (int,), "prompt_tokens": (int,), "accepted": (str,)}


COMPARISON_KEYS: dict[str, Kinds] = {
    "a": (str,),
    "b": (str,),
    "delta_acceptance_length": NUMBER,
    "ci95": (list,),
    "p_adjusted": NUMBER,
    "speedup": NUMBER,
}
# Keys that a comparison has since loads are measured side by side. prompts_needed: to find a difference of 0.05.
LOAD_KEYS: dict[str, Kinds] = {
    "concurrency": (int,),
    "thinking": (str,),
    "speedup_ci95": (list,),
    "prompts_needed": (int,),
}
SEQUENTIAL_KEYS: dict[str, Kinds] = {"looks": (int,), "done": (int,), "level": NUMBER, "stopped": (bool,)}


class ReportError(ValueError):
    """A report that cannot be read or trusted: says the file, the key, what was found and what to do."""


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: a temporary file beside it, synced, then renamed over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
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
    except ValueError as error:
        raise ReportError(f"report {path} is not JSON ({error}): it was cut or edited; measure again.") from None
    check_report(report, f"report {path}")
    return dict(report)


def check_report(report: Any, what: str = "the report") -> None:
    """Raise ReportError unless `report` follows the schema and its acceptance lengths follow from its requests."""
    if not isinstance(report, dict) or "format" not in report:
        raise ReportError(f"{what} has no 'format': it is not a report of bench/accept_len.py.")
    if report["format"] != FORMAT:
        raise ReportError(
            f"{what} has format {report['format']!r}, expected {FORMAT}: read it with the version that wrote it."
        )
    _check_keys(report, REPORT_KEYS, what)
    _check_keys(report["provenance"], PROVENANCE_KEYS, f"{what}: provenance")
    _check_present(report["provenance"], ORIGIN_KEYS, f"{what}: provenance")
    if "sequential" in report:
        _check_keys(report["sequential"], SEQUENTIAL_KEYS, f"{what}: sequential")
    if not report["variants"]:
        raise ReportError(f"{what}: 'variants' is empty, expected at least one.")
    for index, variant in enumerate(report["variants"]):
        where = f"{what}: variants[{index}]"
        _check_keys(variant, {"status": (str,)}, where)
        if variant["status"] == "failed":
            _check_keys(variant, FAILED_KEYS, where)
        elif variant["status"] == "ok":
            _check_measured(variant, where)
        else:
            raise ReportError(f"{where}: 'status' is {variant['status']!r}, expected 'ok' or 'failed'.")
    for index, comparison in enumerate(report.get("comparisons", [])):
        _check_keys(comparison, COMPARISON_KEYS, f"{what}: comparisons[{index}]")
        _check_present(comparison, LOAD_KEYS, f"{what}: comparisons[{index}]")


def _check_measured(variant: Any, where: str) -> None:
    _check_keys(variant, MEASURED_KEYS, where)
    if not variant["requests"]:
        raise ReportError(f"{where}: 'requests' is empty, expected every request that was measured.")
    for index, request in enumerate(variant["requests"]):
        _check_keys(request, REQUEST_KEYS, f"{where}.requests[{index}]")
        _check_present(request, PLACED_KEYS, f"{where}.requests[{index}]")
        try:
            check_histogram(request["histogram"])
        except ValueError as error:
            raise ReportError(f"{where}.requests[{index}]: {error}") from None
    _check_present(variant, DEFINED_KEYS, where)
    _check_parts(variant, where)
    for name, kept in (
        ("acceptance_length", variant["requests"]),
        ("acceptance_length_no_loops", [request for request in variant["requests"] if not request["looping"]]),
    ):
        counted = acceptance_length(add_histograms(request["histogram"] for request in kept))
        stated = variant.get(name)
        if (stated is None) != (counted is None) or (
            counted is not None and not (_is(stated, NUMBER) and math.isclose(stated, counted, rel_tol=1e-9))
        ):
            raise ReportError(
                f"{where}: {name!r} is {stated if stated is not None else 'absent'}, but its requests give {counted}: "
                "the report was edited; measure again."
            )
    if "acceptance_length" in variant:
        _check_keys(variant, {"full_acc": (list,), "cond_acc": (list,)}, where)


def _check_parts(variant: Any, where: str) -> None:
    """What lies one level deeper in a variant."""
    if "greedy_equal" in variant:
        equal = variant["greedy_equal"]
        _check_keys(equal, EQUAL_KEYS, f"{where}: greedy_equal")
        _check_present(equal, LOOKED_KEYS, f"{where}: greedy_equal")
        for index, difference in enumerate(equal.get("differences", [])):
            _check_keys(difference, DIFFERENCE_KEYS, f"{where}: greedy_equal.differences[{index}]")
            _check_present(difference, {"gap": NUMBER, "near_tie": (bool,)}, f"{where}: greedy_equal.differences")
    if "sampling" in variant:
        _check_keys(variant["sampling"], SAMPLING_KEYS, f"{where}: sampling")
    for name in ("by_answer_position", "by_context_length"):
        for index, bucket in enumerate(variant.get(name, [])):
            _check_keys(bucket, BUCKET_KEYS, f"{where}: {name}[{index}]")


def _check_present(table: Any, keys: Mapping[str, Kinds], where: str) -> None:
    """Check those of the keys that are there."""
    _check_keys(table, {name: kinds for name, kinds in keys.items() if name in table}, where)


def _check_keys(table: Any, keys: Mapping[str, Kinds], where: str) -> None:
    if not isinstance(table, dict):
        raise ReportError(f"{where} is {type(table).__name__}, expected an object.")
    for name, kinds in keys.items():
        if name not in table:
            raise ReportError(f"{where} has no {name!r}: the report is incomplete; measure again.")
        if not _is(table[name], kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ReportError(f"{where}: {name!r} is {table[name]!r:.80}, expected {expected}.")


def _is(value: Any, kinds: Kinds) -> bool:
    """isinstance, where a boolean is not a number and a number is finite."""
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) and (not isinstance(value, float) or math.isfinite(value))


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
    """The command line that is running, as it would be typed again (the interpreter without its folder)."""
    return shlex.join(["python", *sys.orig_argv[1:]])


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
