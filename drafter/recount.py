"""A report's figures, counted again from the requests that it carries: one that was edited by hand contradicts itself.

What somebody forges throughout cannot be found out here; what is changed in one place can.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from drafter.acceptance import acceptance_length, add_histograms, cond_acc, flatness, full_acc
from drafter.schema import Report, ReportError

Requests = Sequence[Mapping[str, Any]]
TOLERANCE = 1e-9  # relative, of figures that were added up in another order


def recount(report: Report, what: str) -> None:
    """Raise ReportError where a figure is not what its requests give. `report` follows the schema."""
    measured = [variant for variant in report["variants"] if variant["status"] == "ok"]
    baseline = report["provenance"].get("baseline")
    plain = {_load(variant): variant for variant in measured if variant["drafter"] == baseline}
    for index, variant in enumerate(report["variants"]):
        if variant["status"] != "ok":
            continue
        where = f"{what}: variants[{index}]"
        _acceptance(variant, variant["requests"], where)
        missing = [name for name in ("full_acc", "cond_acc") if name not in variant]
        if missing and "acceptance_length" in variant:
            raise ReportError(f"{where} has no {missing[0]!r}: the report is incomplete; measure again.")
        for name, part in variant["categories"].items():
            own = [request for request in variant["requests"] if request["category"] == name]
            _acceptance({**part, "loop_share": part.get("loop_share")}, own, f"{where}.categories[{name!r}]")
        if "blocks" in variant:
            _speed(variant, where)
        if "sampling" in variant:
            found = variant["sampling"]
            _same("sampling.differs", found["differs"], found["p_value"] < found["error_rate"], where)
        _against(variant, plain.get(_load(variant)), where)
        if "greedy_equal" in variant:
            _greedy_equal(variant, plain.get(_load(variant)), where)

    for index, row in enumerate(report.get("comparisons", [])):
        _comparison(row, measured, f"{what}: comparisons[{index}]")


def _load(variant: Mapping[str, Any]) -> tuple[int, str]:
    return variant["concurrency"], variant["thinking"]


def _acceptance(table: Mapping[str, Any], requests: Requests, where: str) -> None:
    """What histograms say. A table without rates (a category of an older report) is not asked for them."""
    summed = add_histograms(request["histogram"] for request in requests)
    calm = add_histograms(request["histogram"] for request in requests if not request["looping"])
    _same("acceptance_length", table.get("acceptance_length"), acceptance_length(summed), where)
    _same("acceptance_length_no_loops", table.get("acceptance_length_no_loops"), acceptance_length(calm), where)
    if table.get("loop_share") is not None:
        looping = sum(request["looping"] for request in requests)
        _same("loop_share", table["loop_share"], looping / len(requests) if requests else None, where)
    if "full_acc" not in table:
        return
    # A position that was offered and never accepted counts as 0, so that the rates may go on beyond the histogram.
    padded = summed + [0] * (len(table["full_acc"]) + 1 - len(summed))
    _rates("full_acc", table["full_acc"], full_acc(padded), where)
    if "cond_acc" in table:
        _rates("cond_acc", table["cond_acc"], cond_acc(padded), where)
    if "flatness" in table:
        _same("flatness", table["flatness"], flatness(padded), where)


def _rates(name: str, stated: Sequence[float | None], counted: Sequence[float | None], where: str) -> None:
    if len(stated) != len(counted):
        raise _edited(f"{where}: {name!r} has {len(stated)} positions, but its requests give {len(counted)}")
    for position, pair in enumerate(zip(stated, counted, strict=True)):
        _same(f"{name}[{position}]", *pair, where)


def _speed(variant: Mapping[str, Any], where: str) -> None:
    """Tokens per second, from the blocks; the tokens of the blocks, from the requests of each pass."""
    blocks, requests = variant["blocks"], variant["requests"]
    for repeat in sorted({block["repeat"] for block in blocks} | {request.get("repeat", 0) for request in requests}):
        said = sum(block["tokens"] for block in blocks if block["repeat"] == repeat)
        counted = sum(request["tokens"] for request in requests if request.get("repeat", 0) == repeat)
        _same(f"tokens of pass {repeat}", said, counted, where)
    seconds = sum(block["seconds"] for block in blocks)
    tokens = sum(block["tokens"] for block in blocks)
    _same("tokens_per_second", variant["tokens_per_second"], tokens / seconds, where)
    # So many requests at a time cannot have kept the engine busy for longer than that.
    most = seconds * variant["concurrency"] * variant.get("answers_each", 1)
    busy = sum(request["seconds"] for request in requests)
    if busy > most * (1 + TOLERANCE):
        raise _edited(f"{where}: its requests took {busy:g} s, but its blocks leave them {most:g} s at the most")


def _against(variant: Mapping[str, Any], plain: Mapping[str, Any] | None, where: str) -> None:
    """What a variant says of itself and the baseline at its load."""
    if "loses" in variant:
        bounds = variant.get("speedup_ci95", [0.0, math.inf])
        _same("loses", variant["loses"], bounds[1] < 1 if bounds[1] < 1 or bounds[0] > 1 else None, where)
    if plain is None:
        return
    if "speedup" in variant:
        counted = variant["tokens_per_second"] / plain["tokens_per_second"]
        _same("speedup", variant["speedup"], counted, where)
    if "step_cost" in variant and "verify_step_ms" in variant and "decode_step_ms" in plain:
        _same("step_cost", variant["step_cost"], variant["verify_step_ms"] / plain["decode_step_ms"], where)


def _comparison(row: Mapping[str, Any], measured: Requests, where: str) -> None:
    """The difference and the ratio of two variants at one load."""
    pair = []
    for name in (row["a"], row["b"]):
        found = [
            variant
            for variant in measured
            if variant["drafter"] == name
            and row.get("concurrency") in (None, variant["concurrency"])
            and row.get("thinking") in (None, variant["thinking"])
        ]
        if len(found) != 1 or "acceptance_length" not in found[0]:
            raise _edited(f"{where}: {name!r} has no acceptance length there")
        pair += found
    a, b = pair
    counted = b["acceptance_length"] - a["acceptance_length"]
    if not math.isclose(row["delta_acceptance_length"], counted, abs_tol=TOLERANCE):
        _same("delta_acceptance_length", row["delta_acceptance_length"], counted, where)
    _same("speedup", row["speedup"], b["tokens_per_second"] / a["tokens_per_second"], where)


def _greedy_equal(variant: Mapping[str, Any], plain: Mapping[str, Any] | None, where: str) -> None:
    """Which answers are the baseline's, by the hashes of their token ids."""
    said = variant["greedy_equal"]
    if plain is not None:
        mine, theirs = variant["requests"], plain["requests"]
        if [_of(request) for request in mine] != [_of(request) for request in theirs]:
            raise _edited(f"{where}: its requests are not those of {plain['drafter']!r}")
        both = zip(mine, theirs, strict=True)
        _same(
            "greedy_equal.equal", said["equal"], sum(a["output_sha256"] == b["output_sha256"] for a, b in both), where
        )
    _same("greedy_equal.total", said["total"], len(variant["requests"]), where)
    if "differences" in said:
        rows = said["differences"]
        _same("greedy_equal.differences", len(rows), said["total"] - said["equal"], where)
        _same("greedy_equal.near_ties", said.get("near_ties"), sum(row.get("near_tie", False) for row in rows), where)


def _of(request: Mapping[str, Any]) -> tuple[str, int, int]:
    return request["prompt_id"], request.get("repeat", 0), request.get("answer", 0)


def _same(name: str, stated: float | None, counted: float | None, where: str) -> None:
    if stated is None or counted is None:
        alike = stated is counted
    else:
        alike = math.isclose(stated, counted, rel_tol=TOLERANCE)
    if not alike:
        raise _edited(f"{where}: {name!r} is {'absent' if stated is None else stated}, but its requests give {counted}")


def _edited(what: str) -> ReportError:
    return ReportError(f"{what}: the report was edited; measure again.")
