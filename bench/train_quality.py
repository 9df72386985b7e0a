"""How good the trainer is: acceptance length against speculators' model class at the same tokens and steps.

Both learn from the same batches in one loop, several seeds and learning rates; each is judged at its own better rate,
walked over held-out greedy answers as an engine would count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench.train_speed import REPO, SPECULATORS
from drafter.arguments import number, whole
from drafter.checkpoint.vocab import DraftVocab
from drafter.data.shards import open_shards
from drafter.report import command, machine
from drafter.training.evaluate import evaluate
from drafter.training.model import Eagle3
from drafter.training.shape import Shape, drafter_config
from drafter.training.target import Target, load_target

TEXT = """\
examples:
  make speculators-env
  python -m tests.answers --out runs/tiny && python -m bench.train_quality --data runs/tiny --out runs/quality

--data holds target (the target's folder), vocab.safetensors, shards (to learn from) and held (captured greedy answers
of other prompts, with the tokens past them that `evaluate` asks for). Each run that has ended is kept in --out: the
same command goes on where it was stopped.
Both sides have the same batches, steps, AdamW, rate and clip; each has its own start, loss and model. speculators' is
Eagle3DraftModel in the form that SGLang serves, with as many parameters; it is not speculators' own trainer.
as good: the mean of this project's seeds is no lower than that of speculators' less the spread (largest less smallest)
of speculators' seeds.

exit codes: 0 as good, 3 lower, 1 a run failed, 2 usage, 130 interrupted
"""
LOWER = 3
SIDES = ("eyas", "speculators")


class QualityError(RuntimeError):
    """A comparison that could not be made: what failed, and what to do."""


class Runs:
    """The runs that have ended, a line each in `out`/runs.jsonl behind one with the plan they belong to."""

    def __init__(self, out: Path, plan: dict[str, Any]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.file = out / "runs.jsonl"
        text = self.file.read_text("utf-8") if self.file.exists() else ""
        lines = text.split("\n")[:-1]  # one without its end was cut
        try:
            first, *rest = [json.loads(line) for line in lines] or [None]
            self.found: list[dict[str, Any]] = rest
            before = first and first["plan"]
        except (ValueError, KeyError, TypeError) as error:
            raise QualityError(f"{self.file} is no journal of runs ({error!r}): name another --out.") from None
        if before is not None and before != plan:
            other = ", ".join(sorted(key for key in plan if before.get(key) != plan[key]))
            raise QualityError(f"{out} holds runs with another {other}: give the same, or name another --out.")
        self.file.write_text("".join(json.dumps(each) + "\n" for each in [{"plan": plan}, *self.found]), "utf-8")

    def of(self, side: str, lr: float, seed: int) -> dict[str, Any] | None:
        """The run, where it has ended."""
        wanted = {"side": side, "lr": lr, "seed": seed}
        return next((each for each in self.found if wanted.items() <= each.items()), None)

    def add(self, run: dict[str, Any]) -> None:
        self.found.append(run)
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(run) + "\n")


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """One run in a process of its own. Raises QualityError."""
    python = str(SPECULATORS) if settings["side"] == "speculators" else sys.executable
    argv = [python, "-m", "bench.quality_loop", json.dumps(settings)]
    done = subprocess.run(argv, cwd=REPO, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise QualityError(f"the side {settings['side']} ended with {done.returncode}: see what it wrote above.")
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def walk(weights: Path, data: Path, target: Target, num_steps: int) -> dict[str, Any]:
    """What an engine would accept of these weights over the held-out answers."""
    held, vocab = open_shards(data / "held"), DraftVocab.load(data / "vocab.safetensors")
    config = drafter_config(target, open_shards(data / "shards").manifest["layer_ids"], vocab, Shape())
    model = Eagle3(config, vocab, target.embed_VH)
    model.load_state_dict(load_file(weights))
    found = evaluate(model, held, num_steps).summary()
    return {key: found[key] for key in ("acceptance_length", "full_acc", "cond_acc")}


def measure(args: argparse.Namespace, runs: Runs, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every run, trained and walked, or read again."""
    target = load_target(args.data / "target")
    for lr in args.lr:
        for seed in range(args.seeds):
            for side in SIDES:
                run = runs.of(side, lr, seed)
                if run is None:
                    out = args.out / f"{side}-{lr:g}-{seed}.safetensors"
                    run = {"side": side, "lr": lr, "seed": seed}
                    run |= train(settings | run | {"out": str(out.absolute())})
                    run |= walk(out, args.data, target, args.ttt_steps)
                    runs.add(run)
                print(f"train_quality: {describe(run)}", file=sys.stderr)
                yield run


def describe(run: dict[str, Any]) -> str:
    """One run in words."""
    return (
        f"{run['side']}, rate {run['lr']:g}, seed {run['seed']}: acceptance length {run['acceptance_length']:.3f} "
        f"after {run['tokens']:,} tokens, {run['cpu_seconds']:.0f} s of CPU"
    )


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each side at its better rate, and whether this project's is no lower by more than the other's spread."""
    sides: dict[str, Any] = {}
    for side in SIDES:
        by_rate: dict[float, list[float]] = {}
        for run in found:
            if run["side"] == side:
                by_rate.setdefault(run["lr"], []).append(run["acceptance_length"])
        lr = max(by_rate, key=lambda each: statistics.mean(by_rate[each]))
        lengths = by_rate[lr]
        sides[side] = {
            "lr": lr,
            "acceptance_length": statistics.mean(lengths),
            "by_seed": lengths,
            "spread": max(lengths) - min(lengths),
            "parameters": next(run["parameters"] for run in found if run["side"] == side),
        }
    ours, theirs = (sides[side] for side in SIDES)
    difference = ours["acceptance_length"] - theirs["acceptance_length"]
    return {"sides": sides, "difference": difference, "as_good": difference >= -theirs["spread"]}


def words(found: dict[str, Any]) -> str:
    """The outcome for a person."""
    lines = [
        f"{side:<12} {each['acceptance_length']:.3f} at rate {each['lr']:g}, seeds "
        f"{', '.join(f'{x:.3f}' for x in each['by_seed'])}"
        for side, each in found["sides"].items()
    ]
    verdict, spread = "as good" if found["as_good"] else "lower", found["sides"]["speculators"]["spread"]
    lines.append(f"{verdict}: {found['difference']:+.3f}, the spread of speculators' seeds is {spread:.3f}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(
        prog="python -m bench.train_quality",
        description=__doc__,
        epilog=TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = top.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="target, vocab.safetensors, shards and held")
    add("--out", type=Path, required=True, metavar="DIR", help="where the runs go, and go on from")
    add("--steps", type=whole(), default=600, metavar="N", help="optimiser steps of each run (default: 600)")
    add("--batch-tokens", type=whole(), default=600, metavar="N", help="tokens of a step (default: 600)")
    add("--ttt-steps", type=whole(), default=3, metavar="K", help="draft steps, trained and walked (default: 3)")
    add("--seeds", type=whole(), default=3, metavar="N", help="of first weights and order (default: 3)")
    add("--lr", type=number(above=True), nargs="+", default=[1e-3, 3e-3], metavar="N", help="rates (1e-3 3e-3)")
    add("--attention", choices=("sdpa", "eager"), default="sdpa", help="speculators' attention (default: sdpa)")
    add("--threads", type=whole(), default=1, metavar="N", help="torch's threads (default: 1)")
    add("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Train, walk, compare; returns the exit code."""
    args = parser().parse_args(argv)
    if not SPECULATORS.exists():
        print("train_quality: speculators is not there: run `make speculators-env`.", file=sys.stderr)
        return 1
    keys = ("steps", "batch_tokens", "ttt_steps", "attention", "threads")
    settings = {key: getattr(args, key) for key in keys} | {"data": str(args.data.absolute())}
    torch.set_num_threads(args.threads)
    try:
        hashes = {name: open_shards(args.data / name).data_hash for name in ("shards", "held")}
        vocab = DraftVocab.load(args.data / "vocab.safetensors").hash
        plan = {key: settings[key] for key in keys} | hashes | {"vocab": vocab}
        found = summary(list(measure(args, Runs(args.out, plan), settings)))
    except KeyboardInterrupt:
        print("train_quality: interrupted; the same command goes on from here.", file=sys.stderr)
        return 130
    except (QualityError, ValueError, OSError) as error:
        print(f"train_quality: {error}", file=sys.stderr)
        return 1
    labels = {"speculators": f"Eagle3DraftModel of speculators 0.9.0 in this project's loop, {args.attention}"}
    found = found | {key: settings[key] for key in keys} | labels | {"machine": machine(), "command": command()}
    print(json.dumps(found) if args.json else words(found))
    return 0 if found["as_good"] else LOWER


if __name__ == "__main__":
    sys.exit(main())
