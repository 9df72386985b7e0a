"""From acceptance and the cost of a step to speed: S(B, k) = AL(k) * T1(B) / C(B, k).

B requests run at a time; T1 is a decode step without speculation, C a whole cycle of k draft steps and the
verification of k + 1 tokens. Costs are measured (bench/step_cost.py) or computed (drafter/roofline.py); acceptance
comes from a report. Pure functions; a k of 0 stands for no speculation, and its speed-up is 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Acceptance = Sequence[float]  # full_acc: the share of steps that accept the draft tokens up to each position


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a decode step by batch size, and of a cycle by batch size and draft steps."""

    decode_ms: Mapping[int, float]
    step_ms: Mapping[int, Mapping[int, float]]
    source: str

    def __post_init__(self) -> None:
        if not self.decode_ms or set(self.decode_ms) != set(self.step_ms):
            raise ValueError(
                f"decode steps are known for batch sizes {sorted(self.decode_ms)}, cycles for {sorted(self.step_ms)}: "
                "measure both at the same ones."
            )
        times = [*self.decode_ms.values(), *(each for row in self.step_ms.values() for each in row.values())]
        if not all(math.isfinite(time) and time > 0 for time in times):
            raise ValueError("a step takes no time at all or is no number: the costs are broken, measure again.")

    @property
    def batches(self) -> list[int]:
        return sorted(self.decode_ms)

    def ratio(self, batch: int, steps: int) -> float:
        """C / T1: a cycle in decode steps, which is the acceptance length that breaks even. 1 for no speculation."""
        return self.step_ms[batch][steps] / self.decode_ms[batch] if steps else 1.0


def acceptance_length(acceptance: Acceptance, steps: int) -> float:
    """AL(k) = 1 + the sum of the first k of full_acc: what a shorter chain of the same drafter would have accepted.

    Raises ValueError beyond what was measured.
    """
    if not 0 <= steps <= len(acceptance):
        raise ValueError(f"acceptance is known for {len(acceptance)} draft steps, asked for {steps}: measure them.")
    return 1 + sum(acceptance[:steps])


def even_acceptance(rate: float, steps: int) -> list[float]:
    """full_acc of a drafter whose every token is accepted with the same chance once those before it are."""
    return [rate ** (place + 1) for place in range(steps)]


def rate_of(length: float, steps: int) -> float:
    """The even rate at which `steps` draft steps reach an acceptance length. Raises ValueError where none does."""
    if not 1 <= length <= steps + 1:
        raise ValueError(f"{steps} draft steps give an acceptance length between 1 and {steps + 1}, not {length:g}.")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 + sum(even_acceptance(middle, steps)) < length else (low, middle)
    return (low + high) / 2


def speedup(costs: Costs, acceptance: Acceptance, batch: int, steps: int) -> float:
    """S(B, k)."""
    return acceptance_length(acceptance, steps) / costs.ratio(batch, steps)


def best_steps(costs: Costs, acceptance: Acceptance, batch: int) -> tuple[int, float]:
    """The number of draft steps that is fastest at a batch size, and its speed-up; (0, 1.0) where none pays."""
    known = [steps for steps in sorted(costs.step_ms[batch]) if steps <= len(acceptance)]
    return max(
        [(0, 1.0), *((steps, speedup(costs, acceptance, batch, steps)) for steps in known)], key=lambda pair: pair[1]
    )


def stops_paying(costs: Costs, acceptance: Acceptance) -> int | None:
    """The smallest batch size from which on no number of draft steps pays; None where it pays at the largest."""
    stop = None
    for batch in reversed(costs.batches):
        if best_steps(costs, acceptance, batch)[0]:
            break
        stop = batch
    return stop


def adaptive_config(
    costs: Costs, overall: Acceptance, parts: Sequence[Acceptance] = ()
) -> dict[str, dict[str, object]]:
    """SGLang's `--speculative-adaptive-config`, from costs: which numbers of draft steps to choose from by batch size.

    For each batch size: the best number for all requests together, and the lowest that is best for a part of them (a
    category). SGLang moves down when the accepted tokens of a step fall to (lower number - 0.5, or 0.5 for none)
    + down_hysteresis; it is set to where the two are equally fast. An entry holds up to the next one's batch size
    (srt/speculative/adaptive_spec_params.py of SGLang 0.5.23).
    """
    config: dict[str, dict[str, object]] = {}
    last = None
    for batch in costs.batches:
        best, _ = best_steps(costs, overall, batch)
        low = min([best, *(best_steps(costs, part, batch)[0] for part in parts)])
        entry: dict[str, object] = {"candidate_steps": [best] if low == best else [low, best]}
        if low != best:
            threshold = 0.5 if low == 0 else low - 0.5
            entry |= {"up_hysteresis": 0.0, "down_hysteresis": round(_tie(costs, batch, low, best) - threshold, 4)}
        if entry != last:
            config[str(batch)] = entry
        last = entry
    return config


def _tie(costs: Costs, batch: int, low: int, high: int) -> float:
    """Accepted tokens of a step of `high` draft steps at which `low` are equally fast, acceptance being even."""
    below, above = 0.0, 1.0
    for _ in range(60):
        rate = (below + above) / 2
        chain = even_acceptance(rate, high)
        if speedup(costs, chain, batch, high) < speedup(costs, chain, batch, low):
            below = rate
        else:
            above = rate
    return sum(even_acceptance((below + above) / 2, high))
