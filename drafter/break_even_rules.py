"""Break-even acceptance lengths as a Prometheus recording rule: what a drafter must reach at the load of this moment.

Prometheus cannot read costs, so they are written into the expression; between two measured batch sizes it is a line.
"""

from __future__ import annotations

from itertools import pairwise

from drafter.speedup import Costs

LOAD = "eyas:running_requests:avg5m"  # deploy/prometheus/rules/acceptance.yml, by arm
NAME = "eyas:break_even_acceptance_length:now"


def break_even_rules(costs: Costs, steps: int, command: str) -> str:
    """A rule file (YAML) for a drafter of so many draft steps. Raises ValueError where a batch size lacks their cost.

    Under the smallest batch size its figure holds, above the largest that one's, which is a lower bound.
    """
    missing = [batch for batch in costs.batches if steps not in costs.step_ms[batch]]
    if missing:
        raise ValueError(
            f"the costs know no cycle of {steps} draft steps at a batch size of {missing[0]}: choose --num-steps from "
            f"{', '.join(map(str, sorted(costs.step_ms[missing[0]])))}."
        )
    values = [(batch, costs.ratio(batch, steps)) for batch in costs.batches]
    first, last = values[0], values[-1]
    bands = [f"({first[1]:.4f} + 0 * {LOAD}) and {LOAD} <= {first[0]}"]
    for (low, before), (high, after) in pairwise(values):
        slope = (after - before) / (high - low)
        bands.append(f"({before:.4f} + {slope:.6f} * ({LOAD} - {low})) and {LOAD} <= {high}")
    bands.append(f"{last[1]:.4f} + 0 * {LOAD}")
    expression = "\n          or ".join(bands)
    return f"""\
# Costs: {costs.source}; {steps} draft steps.
# Written by: {command}
groups:
  - name: eyas-break-even
    rules:
      - record: {NAME}
        labels:
          num_steps: "{steps}"
        expr: |
          {expression}
"""
