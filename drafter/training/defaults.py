"""How a drafter is trained where nobody says otherwise: one set of figures for a new one, one for going on.

Rates are those that drafters of Kimi's width are trained with; AdamW's fitting rate falls as one over the width
(arXiv 2203.03466), so a narrower drafter gets a higher one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KIMI_HIDDEN = 7168
STEEPEST = 3e-3  # of a new drafter's rate, however narrow it is


@dataclass(frozen=True)
class Defaults:
    """`rate` is the peak rate at KIMI_HIDDEN, `steepest` its limit; the others as in train.Options."""

    rate: float
    steepest: float
    warmup: float
    clip: float
    ttt_steps: int
    head_from: float
    head_lr: float

    def lr(self, hidden: int) -> float:
        """The peak learning rate of a drafter with this hidden size."""
        return min(self.steepest, self.rate * KIMI_HIDDEN / hidden)

    def options(self, hidden: int, own_head: bool, given: Mapping[str, Any]) -> dict[str, Any]:
        """These figures as keys of train.Options, except where `given` has another than None.

        `own_head`: whether lm_head is the target's own, and stays so.
        """
        ours = {
            "lr": self.lr(hidden),
            "warmup": self.warmup,
            "clip": self.clip,
            "ttt_steps": self.ttt_steps,
            "head_from": 1.0 if own_head else self.head_from,
            "head_lr": self.head_lr,
        }
        return {key: ours[key] if given[key] is None else given[key] for key in ours}


SCRATCH = Defaults(rate=1e-4, steepest=STEEPEST, warmup=0.015, clip=0.5, ttt_steps=5, head_from=1.0, head_lr=0.3)
# A head in the target's own basis stays as it is, as it was trained; one that was trained goes on.
FINETUNE = Defaults(rate=2e-5, steepest=STEEPEST / 5, warmup=0.015, clip=0.5, ttt_steps=5, head_from=0.0, head_lr=1.0)
