"""THE definition of acceptance length, and everything derived from the same histogram.

h[i] is the number of verify steps in which exactly i draft tokens were accepted (SGLang's
`spec_correct_drafts_histogram`). Training, evaluation, the bench, the gateway and the dashboard call these functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LOOP_DISTINCT_SHARE = 0.7  # fixed: an answer loops when fewer of its 4-grams than this are distinct
LOOP_NGRAM = 4
LOOP_MIN_TOKENS = 32
LOOP_WINDOW = 64  # tokens in which a loop shows, to find where it starts

Histogram = Sequence[int]


def check_histogram(histogram: Histogram) -> None:
    """Raise ValueError unless every entry is a count."""
    for accepted, steps in enumerate(histogram):
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise ValueError(f"histogram[{accepted}] is {steps!r}, expected a count of verify steps (an integer >= 0).")


def add_histograms(histograms: Iterable[Histogram]) -> list[int]:
    """Sum histograms of any lengths, entry by entry: the requests of a variant, or the answers of one request."""
    total: list[int] = []
    for histogram in histograms:
        total.extend([0] * (len(histogram) - len(total)))
        for accepted, steps in enumerate(histogram):
            total[accepted] += steps
    return total


def verify_steps(histogram: Histogram) -> int:
    """Number of verify steps: sum of h."""
    return sum(histogram)


def accepted_tokens(histogram: Histogram) -> int:
    """Number of draft tokens accepted: sum of i * h[i]."""
    return sum(accepted * steps for accepted, steps in enumerate(histogram))


def acceptance_length(histogram: Histogram) -> float | None:
    """Tokens per verify step, bonus token included: 1 + sum(i*h[i]) / sum(h). None without a step.

    A ratio of sums: pass the summed histogram of all requests, never average over requests.
    """
    steps = verify_steps(histogram)
    return 1 + accepted_tokens(histogram) / steps if steps else None


def full_acc(histogram: Histogram) -> list[float]:
    """Share of verify steps in which the draft tokens up to and including position k were accepted, for each k."""
    steps = verify_steps(histogram)
    return [sum(histogram[k + 1 :]) / steps for k in range(len(histogram) - 1)] if steps else []


def cond_acc(histogram: Histogram) -> list[float | None]:
    """Share of the steps that reached position k (all before it accepted) in which k was accepted too.

    None where no step reached k.
    """
    rates: list[float | None] = []
    for k in range(len(histogram) - 1):
        reached = sum(histogram[k:])
        rates.append(sum(histogram[k + 1 :]) / reached if reached else None)
    return rates if verify_steps(histogram) else []


def flatness(histogram: Histogram) -> float | None:
    """cond_acc[1] / cond_acc[0]: about 1 in a healthy drafter.

    Far below 1 points first to a roll-out defect (hidden-state feedback, positions, norm, vocabulary) or a foreign
    initialisation, before too little training. None where it is not defined.
    """
    rates = cond_acc(histogram)
    if len(rates) < 2 or rates[0] is None or rates[1] is None or rates[0] == 0:
        return None
    return rates[1] / rates[0]


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether an answer of 32 tokens or more repeats itself: fewer than 0.7 of its overlapping 4-grams are distinct.

    Loops are easy to predict and inflate acceptance length, so every figure is also given without such answers.
    """
    if len(token_ids) < LOOP_MIN_TOKENS:
        return False
    grams = [tuple(token_ids[at : at + LOOP_NGRAM]) for at in range(len(token_ids) - LOOP_NGRAM + 1)]
    return len(set(grams)) < LOOP_DISTINCT_SHARE * len(grams)


def before_loop(token_ids: Sequence[int]) -> Sequence[int]:
    """What of an answer comes before it loops: up to the first 4-gram that was said before in the first LOOP_WINDOW
    tokens that loop. All of it where nothing loops; nothing where only the whole does."""
    for start in range(len(token_ids) - LOOP_WINDOW + 1):
        window = token_ids[start : start + LOOP_WINDOW]
        if is_looping(window):
            seen: set[tuple[int, ...]] = set()
            for at in range(LOOP_WINDOW):
                gram = tuple(window[at : at + LOOP_NGRAM])
                if gram in seen:
                    return token_ids[: start + at]
                seen.add(gram)
    return token_ids[:0] if is_looping(token_ids) else token_ids


def histogram_of_details(details: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[int]:
    """The histogram in SGLang's `spec_tokens_details`: one object, or a list of them where a request had n answers.

    Raises ValueError where a field is missing, or where the engine contradicts itself: sum(h) must equal
    `spec_verify_ct` and sum(i*h[i]) must equal `spec_num_correct_drafts`.
    """
    if not isinstance(details, Mapping):
        return add_histograms(histogram_of_details(answer) for answer in details)
    for name in ("spec_correct_drafts_histogram", "spec_verify_ct", "spec_num_correct_drafts"):
        if details.get(name) is None:
            raise ValueError(
                f"the engine's speculation details have no {name}, only {sorted(details)}: "
                "acceptance needs SGLang 0.5.19 or later."
            )
    histogram = list(details["spec_correct_drafts_histogram"])
    check_histogram(histogram)
    for name, counted in (
        ("spec_verify_ct", verify_steps(histogram)),
        ("spec_num_correct_drafts", accepted_tokens(histogram)),
    ):
        if details[name] != counted:
            raise ValueError(
                f"the engine says {name} {details[name]} but its histogram {histogram} gives {counted}: "
                "do not trust acceptance figures of this engine version."
            )
    return histogram
