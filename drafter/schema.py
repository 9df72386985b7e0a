"""What a report must hold, key by key: which there are, of which type, and which values cannot be.

Only the form is checked here; whether its figures follow from its requests is counted in drafter/recount.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from drafter.acceptance import check_histogram

FORMAT = 1
Report = dict[str, Any]
Kinds = tuple[type, ...]

NUMBER: Kinds = (int, float)
LARGEST = 1e20  # no figure of a report is near it; a seed has 64 bits
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
    "drafter_sha256": (str,),
    "steps": (int,),
    "draft_tokens": (int,),
    "ngram": (dict,),  # parameters and the corpus's sha256
    "foreign_vocabulary": (bool,),  # it drafts over a part of the vocabulary, and has no eyas.json that says whence
    "flushed": (bool,),  # whether the caches were emptied before each block
    "acceptance_length": NUMBER,
    "acceptance_length_no_loops": NUMBER,
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
# Those of them that are times: none takes no time at all.
TIMES = ("tokens_per_second_each", "tpot_ms_p50", "verify_step_ms", "decode_step_ms", "step_cost", "speedup")
CATEGORY_KEYS: dict[str, Kinds] = {
    "acceptance_length": NUMBER,
    "acceptance_length_no_loops": NUMBER,
    "flatness": NUMBER,
    "loop_share": NUMBER,
    "full_acc": (list,),
    "cond_acc": (list,),
    "acceptance_length_ci95": (list,),
}
BLOCK_KEYS: dict[str, Kinds] = {"repeat": (int,), "part": (int,), "seconds": NUMBER, "tokens": (int,)}
NGRAM_KEYS: dict[str, Kinds] = {"external_corpus_path": (str,), "external_corpus_sha256": (str,)}
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


def check_schema(report: Any, what: str) -> None:
    """Raise ReportError unless `report` holds what a report holds."""
    if not isinstance(report, dict) or "format" not in report:
        raise ReportError(f"{what} has no 'format': it is not a report of bench/accept_len.py.")
    if report["format"] != FORMAT:
        raise ReportError(
            f"{what} has format {report['format']!r}, expected {FORMAT}: read it with the version that wrote it."
        )
    _check_values(report, what)
    _check_keys(report, REPORT_KEYS, what)
    _check_created(report["created"], what)
    where = report["provenance"]
    _check_keys(where, PROVENANCE_KEYS, f"{what}: provenance")
    _check_present(where, ORIGIN_KEYS, f"{what}: provenance")
    _check_present(where["machine"], {"gpus": (list,)}, f"{what}: provenance.machine")
    _check_words(where["machine"].get("gpus", []), f"{what}: provenance.machine.gpus")
    _check_words(where["flags"], f"{what}: provenance.flags")
    if "sequential" in report:
        _check_keys(report["sequential"], SEQUENTIAL_KEYS, f"{what}: sequential")
    _check_present(report, {"comparisons": (list,), "verdict": (dict,)}, what)
    if "verdict" in report:
        _check_keys(report["verdict"], {"decision": (str,), "reasons": (list,)}, f"{what}: verdict")
        _check_words(report["verdict"]["reasons"], f"{what}: verdict.reasons")
    if not report["variants"]:
        raise ReportError(f"{what}: 'variants' is empty, expected at least one.")
    for index, variant in enumerate(report["variants"]):
        at = f"{what}: variants[{index}]"
        _check_keys(variant, {"status": (str,), "drafter": (str,)}, at)
        if not variant["drafter"]:
            raise ReportError(f"{at}: 'drafter' is '', expected a name.")
        if variant["status"] == "failed":
            _check_keys(variant, FAILED_KEYS, at)
        elif variant["status"] == "ok":
            _check_measured(variant, at)
        else:
            raise ReportError(f"{at}: 'status' is {variant['status']!r}, expected 'ok' or 'failed'.")
    _check_once(report["variants"], what)
    for index, comparison in enumerate(report.get("comparisons", [])):
        at = f"{what}: comparisons[{index}]"
        _check_keys(comparison, COMPARISON_KEYS, at)
        _check_present(comparison, LOAD_KEYS, at)
        _check_intervals(comparison, at)


def _check_values(value: Any, where: str) -> None:
    """Refuse, however deep, what cannot be written down again: figures beyond all measure, and halves of characters."""
    if isinstance(value, dict):
        for name, each in value.items():
            _check_values(name, where)
            _check_values(each, f"{where}.{name}")
    elif isinstance(value, list):
        for each in value:
            _check_values(each, where)
    elif isinstance(value, str):
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ReportError(f"{where!r} holds {value!r:.80}, which is no text: the report was edited; measure again.")
    elif isinstance(value, int | float) and not -LARGEST < value < LARGEST:
        raise ReportError(f"{where} is {value!r:.40}, which is no figure: the report was edited; measure again.")


def _check_created(created: str, what: str) -> None:
    try:
        datetime.fromisoformat(created)
    except ValueError:
        raise ReportError(f"{what}: 'created' is {created!r:.80}, expected a time as ISO 8601 writes it.") from None


def _check_once(variants: list[Any], what: str) -> None:
    """A drafter is measured once at a load."""
    seen = set()
    for variant in variants:
        load = (variant["drafter"], variant.get("concurrency"), variant.get("thinking"))
        if load in seen:
            raise ReportError(
                f"{what} holds {load[0]!r} twice at concurrency {load[1]}, thinking {load[2]}: reports were put "
                "together by hand; measure again."
            )
        seen.add(load)


def _check_measured(variant: Any, where: str) -> None:
    _check_keys(variant, MEASURED_KEYS, where)
    _check_words(variant["flags"], f"{where}.flags")
    if not variant["requests"]:
        raise ReportError(f"{where}: 'requests' is empty, expected every request that was measured.")
    for index, request in enumerate(variant["requests"]):
        at = f"{where}.requests[{index}]"
        _check_keys(request, REQUEST_KEYS, at)
        _check_present(request, PLACED_KEYS, at)
        _check_above_zero(request, ("seconds",), at)
        if request["tokens"] < 0:
            raise ReportError(f"{at}: 'tokens' is {request['tokens']}, expected a count.")
        try:
            check_histogram(request["histogram"])
        except ValueError as error:
            raise ReportError(f"{at}: {error}") from None
    _check_present(variant, DEFINED_KEYS, where)
    _check_above_zero(variant, ("tokens_per_second", "concurrency", *TIMES), where)
    _check_rates(variant, where)
    for name, part in variant["categories"].items():
        _check_keys(part, {}, f"{where}.categories[{name!r}]")
        _check_present(part, CATEGORY_KEYS, f"{where}.categories[{name!r}]")
        _check_rates(part, f"{where}.categories[{name!r}]")
    _check_parts(variant, where)


def _check_parts(variant: Any, where: str) -> None:
    """What lies one level deeper in a variant."""
    if "greedy_equal" in variant:
        equal = variant["greedy_equal"]
        _check_keys(equal, EQUAL_KEYS, f"{where}: greedy_equal")
        _check_present(equal, LOOKED_KEYS, f"{where}: greedy_equal")
        for index, difference in enumerate(equal.get("differences", [])):
            at = f"{where}: greedy_equal.differences[{index}]"
            _check_keys(difference, DIFFERENCE_KEYS, at)
            if "gap" in difference or "near_tie" in difference:
                _check_keys(difference, {"gap": NUMBER}, at)
                _check_present(difference, {"near_tie": (bool,)}, at)
    if "sampling" in variant:
        _check_keys(variant["sampling"], SAMPLING_KEYS, f"{where}: sampling")
    _check_present(variant.get("ngram", {}), NGRAM_KEYS, f"{where}: ngram")
    for index, block in enumerate(variant.get("blocks", [])):
        _check_keys(block, BLOCK_KEYS, f"{where}: blocks[{index}]")
        _check_above_zero(block, ("seconds", "tokens"), f"{where}: blocks[{index}]")
    for name in ("by_answer_position", "by_context_length"):
        for index, bucket in enumerate(variant.get(name, [])):
            _check_keys(bucket, BUCKET_KEYS, f"{where}: {name}[{index}]")


def _check_rates(table: Any, where: str) -> None:
    """Rates by position, and intervals."""
    for name, kinds in (("full_acc", NUMBER), ("cond_acc", (*NUMBER, type(None)))):
        for value in table.get(name, []):
            if not _is(value, kinds):
                raise ReportError(f"{where}: {name!r} holds {value!r:.80}, expected shares.")
    _check_intervals(table, where)


def _check_intervals(table: Any, where: str) -> None:
    for name in ("ci95", "acceptance_length_ci95", "speedup_ci95"):
        if name not in table:
            continue
        bounds = table[name]
        whole = isinstance(bounds, list) and len(bounds) == 2 and all(_is(bound, NUMBER) for bound in bounds)
        if not whole or bounds[0] > bounds[1]:
            raise ReportError(f"{where}: {name!r} is {bounds!r:.80}, expected [low, high].")


def _check_above_zero(table: Any, names: Iterable[str], where: str) -> None:
    for name in names:
        if name in table and table[name] <= 0:
            raise ReportError(f"{where}: {name!r} is {table[name]}, expected more than 0.")


def _check_words(found: Any, where: str) -> None:
    for each in found:
        if not isinstance(each, str):
            raise ReportError(f"{where} holds {each!r:.80}, expected text.")


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
    """isinstance, where a boolean is not a number."""
    return bool in kinds if isinstance(value, bool) else isinstance(value, kinds)
