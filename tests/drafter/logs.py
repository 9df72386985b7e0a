"""Training logs as their trainers write them, made up from the same curve."""

from __future__ import annotations

import json
from collections.abc import Sequence

# The line that a real fine-tune on a foreign drafter ended with, cut off in its last number.
CASE = """\
[17:20:01] INFO     Starting validation epoch 0
Validation: 100%|##########| 250/250 [03:21<00:00,  1.24it/s]
[speculators.metrics] {'val': {'loss_epoch': 6.1432, 'full_acc_0_epoch': 0.3800190306513927, \
'cond_acc_1_epoch': 0.03483982407936639, 'cond_acc_2_epoch': 0.02521324353551839, 'cond_acc_3_epoch': 0.0136831"""

Curve = Sequence[tuple[int, Sequence[float]]]  # (step, cond_acc_k for each k)
CURVE: Curve = [(0, (0.01, 0.01, 0.01)), (100, (0.4, 0.3, 0.2)), (200, (0.6, 0.5, 0.4)), (300, (0.7, 0.68, 0.6))]


def products(cond: Sequence[float]) -> list[float]:
    """full_acc_k of cond_acc_k."""
    full, reached = [], 1.0
    for rate in cond:
        reached *= rate
        full.append(reached)
    return full


def rates(cond: Sequence[float], end: str = "") -> dict[str, float]:
    found = {"loss" + end: 8 - sum(cond)}
    for k, (full, rate) in enumerate(zip(products(cond), cond, strict=True)):
        found |= {f"loss_{k}{end}": 2.5, f"full_acc_{k}{end}": full, f"cond_acc_{k}{end}": rate}
    return found


def ours(curve: Curve = CURVE) -> str:
    """log.jsonl of `train`."""
    lines = []
    for step, cond in curve:
        if step:
            lines.append({"train": rates(cond) | {"lr": 1e-3, "ttt_steps": 3}, "epoch": 0, "global_step": step})
        lines.append({"val": rates(cond, "_epoch"), "epoch": 0, "global_step": step, "tokens": 1000 * step})
    return "".join(json.dumps(line) + "\n" for line in lines)


def speculators(curve: Curve = CURVE, width: int | None = None) -> str:
    """Python dicts between other lines; wrapped at `width` as a terminal does."""
    lines = []
    for epoch, (step, cond) in enumerate(curve):
        lines.append(f"Epoch {epoch}:  12%|#1        | 30/250 [00:24<02:59,  1.22it/s]")
        record = {"train": rates(cond), "epoch": epoch, "lr": 1e-05, "global_step": step}
        lines.append(f"[17:20:01] INFO     [speculators.metrics] {record}")
        lines.append("[17:20:02] WARNING  something else happened (not {a record})")
        lines.append(f"[speculators.metrics] { ({'val': rates(cond, '_epoch'), 'epoch': epoch}) }")
    if width:
        lines = [line[at : at + width] for line in lines for at in range(0, len(line), width)]
    return "\n".join(lines) + "\n"


def specforge(curve: Curve = CURVE) -> str:
    """A dict of metrics after its step; the rates are marginal, all positions in one list."""
    lines = []
    for step, cond in curve:
        found = {"eval/avg_loss": 3.0, "eval/per_position_acc": list(cond), "eval/acceptance_rate_0": 0.5}
        lines += [f"step {step}: {found}", f"saved checkpoint {step}"]
    return "\n".join(lines) + "\n"


def eagle(curve: Curve = CURVE) -> str:
    """Lines of one position each; the rates are marginal."""
    lines = []
    for epoch, (_, cond) in enumerate(curve, start=1):
        lines += [f"Test Epoch [{epoch}/9], position {k},  Acc: {rate:.2f}" for k, rate in enumerate(cond)]
        lines += [f"Test Epoch [{epoch}/9], position {k}, pLoss: 2.50" for k in range(len(cond))]
    return "\n".join(lines) + "\n"


def flat(curve: Curve = CURVE) -> str:
    """Names and numbers to three digits on a console, wrapped between pairs and with the source's column."""
    lines = []
    for epoch, (step, cond) in enumerate(curve):
        pairs = [f"val/{name}={value:.3f}" for name, value in rates(cond, "_epoch").items()]
        pairs += [f"epoch={epoch}", f"global_step={step}"]
        lines.append(f"[17:20:01] INFO     {', '.join(pairs[:3])},      trainer.py:670")
        lines.append(f"                    {', '.join(pairs[3:])}")
    return "\n".join(lines) + "\n"


FORMS = {
    "ours": ours(),
    "speculators": speculators(),
    "speculators wrapped": speculators(width=57),
    "specforge": specforge(),
    "eagle": eagle(),
    "flat": flat(),
}
