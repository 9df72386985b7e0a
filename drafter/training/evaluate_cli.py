"""The verb `evaluate` of python -m drafter. torch is imported when it runs, not before."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from drafter.arguments import whole
from drafter.training.command import add_command, add_common, torch_of

EVALUATE = """Predict what an engine would accept: walk greedy answers, the drafter's own guesses fed back.

The documents are a prompt, the target's greedy answer (the loss mask) and at least as many tokens past it as there are
draft steps, generated with the end token ignored. Figures are per verify step, the ones that serving counts.
"""
EVALUATE_EXAMPLES = """examples:
  python -m drafter evaluate --drafter runs/a/drafter --shards held-out --target models/smollm2 --num-steps 3
  python -m drafter evaluate --drafter runs/a/drafter --shards held-out --target models/smollm2 --oracle-hidden --json
"""


def add_evaluate(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `evaluate`; its arguments carry `run`, a function from arguments to an exit code."""
    text = "predict the acceptance length of a drafter"
    command = add_command(subparsers, "evaluate", text, EVALUATE, EVALUATE_EXAMPLES)
    command.set_defaults(run=run_evaluate)
    command.add_argument("--drafter", type=Path, required=True, metavar="DIR", help="a drafter folder")
    command.add_argument("--shards", type=Path, required=True, metavar="DIR", help="captured greedy answers")
    command.add_argument("--target", type=Path, required=True, metavar="DIR", help="the target's folder")
    command.add_argument("--num-steps", type=whole(), default=3, metavar="N", help="draft steps, as served (3)")
    command.add_argument("--limit", type=whole(), metavar="N", help="only so many documents")
    command.add_argument(
        "--oracle-hidden",
        action="store_true",
        help="later steps get the target's own features: tells a faulty roll-out from a weak first step",
    )
    command.add_argument("--bf16", action="store_true", help="products in bf16 (default: fp32)")
    add_common(command)


def run_evaluate(arguments: argparse.Namespace) -> int:
    """Walk and print. Raises ValueError with a sentence for what a person must change."""
    from drafter.data.shards import open_shards
    from drafter.training.compatible import check_drafter, check_shards
    from drafter.training.evaluate import evaluate
    from drafter.training.model import load_drafter
    from drafter.training.target import load_target

    torch = torch_of(arguments)
    a = arguments
    shards, target = open_shards(a.shards), load_target(a.target)
    check_shards(shards, target)
    check_drafter(a.drafter, shards)
    found = evaluate(
        load_drafter(a.drafter, target.embed_VH),
        shards,
        a.num_steps,
        a.oracle_hidden,
        torch.bfloat16 if a.bf16 else torch.float32,
        a.limit,
    ).summary()
    facts = {"drafter": str(a.drafter), "shards": str(a.shards), "oracle_hidden": a.oracle_hidden}
    print(json.dumps(facts | found) if a.json else render(found))
    return 0


def render(found: dict[str, Any]) -> str:
    """An evaluation for a person: a line for each draft step."""

    def rate(value: float | None) -> str:
        return "    -" if value is None else f"{value:.3f}"

    steps = zip(found["full_acc"], found["cond_acc"], strict=True)
    return "\n".join(
        [
            f"acceptance length {found['acceptance_length']:.3f} at {found['num_steps']} draft steps, "
            f"{sum(found['histogram'])} verify steps of {len(found['documents'])} answers",
            f"without loops {rate(found['acceptance_length_no_loops'])}, flatness {rate(found['flatness'])}, "
            f"out of vocabulary {found['oov_rate']:.1%}",
            "step  full_acc  cond_acc",
            *(f"{k:>4}  {rate(full):>8}  {rate(cond):>8}" for k, (full, cond) in enumerate(steps)),
        ]
    )
