"""Measured costs of a step: the file that bench/step_cost.py writes, and what reports at several loads say.

A report gives them where it holds, at each concurrency, a variant without speculation (its decode step) and one with
(its verify step). A cycle costs what it costs whether its tokens are accepted or not, so simulated ones serve as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from drafter.report import Report, check_report, write_text
from drafter.speedup import Costs

FORMAT = 1
KIND = "step_cost"


class CostsError(ValueError):
    """Costs that cannot be read or put together: says the file and what to do."""


def to_document(costs: Costs, *, simulated: bool, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What is written. simulated: the cycles accepted as many tokens as they were told to."""
    return {
        "format": FORMAT,
        "kind": KIND,
        "simulated": simulated,
        "provenance": dict(provenance),
        "source": costs.source,
        "decode_ms": {str(batch): time for batch, time in sorted(costs.decode_ms.items())},
        "step_ms": {
            str(batch): {str(steps): time for steps, time in sorted(row.items())}
            for batch, row in sorted(costs.step_ms.items())
        },
    }


def write_costs(document: Mapping[str, Any], path: Path) -> None:
    """Write a document of `to_document`, whole or not at all."""
    write_text(path, json.dumps(document, indent=1) + "\n")


def read_costs(path: Path) -> Costs:
    """Read the costs of a step_cost file or of a report. Raises CostsError."""
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise CostsError(f"{path} cannot be read ({error.strerror}): check the path.") from None
    except ValueError as error:
        raise CostsError(f"{path} is not JSON ({error}): it was cut or edited; measure again.") from None
    if isinstance(document, dict) and "variants" in document:
        check_report(document, f"report {path}")
        return costs_of_reports([document], str(path))
    if not isinstance(document, dict) or document.get("kind") != KIND or document.get("format") != FORMAT:
        raise CostsError(f"{path} holds no costs: make it by `python -m bench.step_cost --out {path}`.")
    try:
        return Costs(
            decode_ms={int(batch): float(time) for batch, time in document["decode_ms"].items()},
            step_ms={
                int(batch): {int(steps): float(time) for steps, time in row.items()}
                for batch, row in document["step_ms"].items()
            },
            source=str(document["source"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CostsError(f"{path} is broken ({type(error).__name__}: {error}): measure again.") from None


def adaptive_steps(path: Path) -> list[int]:
    """Every number of draft steps in a file for SGLang's --speculative-adaptive-config. Raises CostsError."""
    fix = "write it by `python -m drafter speedup --costs FILE --adaptive-config FILE`."
    try:
        config = json.loads(path.read_bytes())
        steps = {each for key, entry in config.items() if key.isdigit() for each in entry["candidate_steps"]}
        return sorted(int(each) for each in steps)
    except OSError as error:
        raise CostsError(f"{path} cannot be read ({error.strerror}): {fix}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CostsError(f"{path} is no adaptive config ({type(error).__name__}: {error}): {fix}") from None


def costs_of_reports(reports: Iterable[Report], source: str) -> Costs:
    """The costs that reports hold, batch sizes being concurrencies. Raises CostsError where they hold none."""
    decode: dict[int, float] = {}
    cycles: dict[int, dict[int, float]] = {}
    for report in reports:
        for variant in report["variants"]:
            if variant["status"] != "ok":
                continue
            if "decode_step_ms" in variant:
                decode[variant["concurrency"]] = variant["decode_step_ms"]
            elif "verify_step_ms" in variant and "steps" in variant:
                cycles.setdefault(variant["concurrency"], {})[variant["steps"]] = variant["verify_step_ms"]
    both = sorted(set(decode) & set(cycles))
    if not both:
        raise CostsError(
            f"{source} holds no concurrency at which both a variant without speculation and one with draft steps were "
            "timed: measure `none` beside the drafter."
        )
    try:
        return Costs({batch: decode[batch] for batch in both}, {batch: cycles[batch] for batch in both}, source)
    except ValueError as error:
        raise CostsError(f"{source}: {error}") from None
