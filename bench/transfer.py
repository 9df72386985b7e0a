"""Reuse a drafter of the target before, or start from scratch? The case, from end to end, on the real engine.

A target that was trained further, and the drafter of the one before. Arms: that drafter as it is; trained on under the
wrong map; its rows moved by each init; moved and trained on; and one from scratch at the same tokens, for a curve of
budgets and several seeds. What wins is what is printed, whatever it is.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from bench.stats import Counts, acceptance_length
from drafter.acceptance import accepted_tokens, verify_steps
from drafter.arguments import whole
from drafter.checkpoint.headstart import INITS
from drafter.checkpoint.maps import read_map
from drafter.checkpoint.vocab import DraftVocab
from drafter.data.tensorfile import map_tensors, write_tensors
from drafter.report import command, machine, read_report, write_text
from server.config import load_profile

TEXT = """\
examples:
  python -m bench.transfer --moved $(python -m tests.moved) --out runs/transfer
  python -m bench.transfer --moved $(python -m tests.moved) --out runs/quick --quick

A folder for --moved holds profile.toml (the new target, [capture], and [probe] off), drafter (of the target before),
asked.jsonl and held.jsonl (prompts to learn from, and to measure on). Every step that has ended is kept in --out: the
same command goes on where it was stopped.

acceptance_length is walked, over the held-out prompts' greedy answers, as an engine would count it, and pooled over
seeds; the interval is of the prompts. The drafters that are not trained, and of the first seed those of the largest
budget, are served by the engine too, and the furthest that any lies from its walk is told. One
arm is ahead of the other where every seed of it is.
Each training run has its own budget, its learning rate falling within it: a point is no stop of a longer run.

exit codes: 0 fine, 1 a command failed, 2 usage, 130 interrupted
"""
AS_IS, WRONG, REMAPPED, TUNED, SCRATCH = (
    "as it is",
    "wrong map, trained on",
    "remapped",
    "remapped, trained on",
    "scratch",
)

Served = dict[str, float | None]  # acceptance length on the engine, by the drafter's folder


class TransferError(RuntimeError):
    """A step that failed: which, and what it said last."""


@dataclass(frozen=True)
class Plan:
    """Budgets in optimiser steps of batch_tokens; tokens: longest answer; num_steps: draft steps."""

    moved: Path
    out: Path
    budgets: tuple[int, ...]
    seeds: int
    count: int
    held: int
    tokens: int
    vocab: int | None
    num_steps: int = 3
    batch_tokens: int = 600
    init: str = "scaled"
    every_init: bool = True
    tuned: tuple[str, ...] = ()
    scratch: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arm:
    """One drafter: its folder, and the training that it had."""

    name: str
    folder: Path
    budget: int = 0
    seed: int = 0
    tokens: int = 0
    accept_len_positions: float | None = None


class Experiment:
    """All steps, each done once in `plan.out`."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.out = plan, plan.out
        self.profile_file = plan.moved / "profile.toml"
        profile = load_profile(self.profile_file)
        self.target, self.served_name = profile.model_path, profile.target.served_name
        self.old = (plan.moved / "drafter").resolve()
        self.vocab = self.out / "vocab.safetensors"

    def run(self) -> dict[str, Any]:
        """Everything, and the report."""
        plan = self.plan
        self.out.mkdir(parents=True, exist_ok=True)
        self.data()
        arms = [*self.untrained(), *self.trained()]
        walks = [self.walk(arm) for arm in arms]
        last = plan.budgets[-1]
        served = self.serve([arm for arm in arms if arm.seed == 0 and arm.budget in (0, last)])
        return self.report(arms, walks, served)

    def data(self) -> None:
        """The new target's answers, what a drafter is fed over them, and its vocabulary."""
        plan, out = self.plan, self.out
        sets: tuple[tuple[str, str, int, list[str]], ...]
        sets = (("train", "asked", plan.count, []), ("held", "held", plan.held, ["--past", str(plan.num_steps + 5)]))
        ask, read = [], []
        for name, asked, count, more in sets:
            words = ["--model", self.served_name, "--target", self.target, "--max-tokens", plan.tokens, *more]
            words += ["--prompts", plan.moved / f"{asked}.jsonl", "--count", count, "--concurrency", 16]
            ask.append(self._verb("generate", *words, "--out", out / f"{name}.jsonl"))
            words = [out / f"{name}.jsonl", "--dir", out / "spool", "--out", out / f"shards-{name}"]
            read.append(self._verb("capture", *words))
        self._once("wrote", self._engine(["--drafter", "none"], ask))
        self._once("captured", self._engine(["--capture", out / "spool"], read))
        size = plan.vocab or len(read_map(self.old).target_ids)
        self._once(
            "vocabulary",
            self._verb(
                *("vocab", "--conversations", out / "train.jsonl", "--held-out", out / "held.jsonl"),
                *("--target", self.target, "--size", size, "--out", self.vocab),
            ),
        )

    def untrained(self) -> list[Arm]:
        """The old drafter as it is, and moved to the new vocabulary by each init."""
        plan, arms = self.plan, [Arm(AS_IS, self.old)]
        for init in INITS if plan.every_init else (plan.init,):
            folder = self.out / f"remapped-{init}"
            if not folder.exists():
                move = self._verb("remap", self.old, "--vocab", self.vocab, "--verifier", self.target)
                self._call([*move, "--init", init, "--out", folder])
            arms.append(Arm(f"{REMAPPED} ({init})", folder))
        return arms

    def trained(self) -> list[Arm]:
        """Every budget and seed of the starts that are trained."""
        plan, arms = self.plan, []
        moved = self.out / f"remapped-{plan.init}"
        starts: list[tuple[str, str, int, list[Any]]] = [
            (TUNED, "tuned", plan.seeds, ["--from", moved, "--remapped-from", self.old, "--force", *plan.tuned]),
            (SCRATCH, "scratch", plan.seeds, ["--vocab", self.vocab, *plan.scratch]),
        ]
        if len(read_map(self.old).target_ids) == len(DraftVocab.load(self.vocab)):
            starts.append((WRONG, "wrong", 1, ["--from", self.wrong_map(), "--force", *plan.tuned]))
        for name, short, seeds, words in starts:
            for budget in plan.budgets:
                arms += [self._train(name, f"{short}-{budget}-{seed}", budget, seed, words) for seed in range(seeds)]
        return arms

    def wrong_map(self) -> Path:
        """The old drafter under the new vocabulary, as other trainers make it: the map replaced, no row moved."""
        folder = self.out / "wrong-map"
        if not folder.exists():
            beside = self.out / "wrong-map.tmp"
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            shutil.copy(self.old / "config.json", beside)
            vocab = DraftVocab.load(self.vocab)
            tensors = dict(map_tensors(self.old / "model.safetensors"))
            tensors |= {"d2t": vocab.target_ids - np.arange(len(vocab))}
            if "t2d" in tensors:
                tensors["t2d"] = vocab.t2d
            write_tensors(beside / "model.safetensors", tensors)
            beside.rename(folder)
        return folder

    def walk(self, arm: Arm) -> dict[str, Any]:
        """What an engine would accept of it on the held-out answers."""
        folder = self.out / "walks"
        folder.mkdir(exist_ok=True)
        file = folder / f"{self._short(arm)}.json"
        if not file.exists():
            words = ["--drafter", arm.folder, "--shards", self.out / "shards-held", "--target", self.target]
            write_text(
                file, self._call([*self._verb("evaluate", *words), "--num-steps", self.plan.num_steps, "--json"])
            )
        found: dict[str, Any] = json.loads(file.read_text("utf-8"))
        return found

    def serve(self, arms: Sequence[Arm]) -> Served:
        """Acceptance length on the engine, by the arms' folders."""
        plan = self.plan
        words: list[Any] = [
            "--profile",
            self.profile_file,
            "--prompts",
            plan.moved / "held.jsonl",
            "--limit",
            plan.held,
        ]
        for arm in arms:
            words += ["--drafter", arm.folder]
        words += [
            "--limit",
            plan.held,
            "--baseline",
            arms[0].folder,
            "--max-tokens",
            plan.tokens,
            "--num-steps",
            plan.num_steps,
        ]
        self._once("served", [sys.executable, "-m", "bench.accept_len", *words, "--out", self.out / "served"])
        report = read_report(self.out / "served" / "report.json")
        found = {each["drafter"]: each["acceptance_length"] for each in report["variants"] if each["status"] == "ok"}
        return {str(arm.folder): found.get(str(arm.folder), found.get(arm.folder.name)) for arm in arms}

    def report(
        self, arms: Sequence[Arm], walks: Sequence[dict[str, Any]], served: dict[str, float | None]
    ) -> dict[str, Any]:
        """INTERFACES' `transfer`: arms pooled over seeds, and which start is ahead at each budget."""
        groups: dict[tuple[str, int], list[tuple[Arm, dict[str, Any]]]] = {}
        for arm, walked in zip(arms, walks, strict=True):
            groups.setdefault((arm.name, arm.budget), []).append((arm, walked))
        rows = [_row(name, budget, some, served) for (name, budget), some in groups.items()]
        apart = [abs(row["served"] - row["by_seed"][0]) for row in rows if row["served"] is not None]
        winners = {
            str(budget): ahead(
                [walked["acceptance_length"] for _, walked in groups[TUNED, budget]],
                [walked["acceptance_length"] for _, walked in groups[SCRATCH, budget]],
            )
            for budget in self.plan.budgets
        }
        return {
            "arms": rows,
            "winner_by_budget": winners,
            "verdict": verdict(winners, self.plan.batch_tokens),
            "furthest_from_served": max(apart, default=None),
            "runs": self.plan.seeds,
            "machine": machine(),
            "command": command(),
        }

    def _train(self, name: str, short: str, budget: int, seed: int, words: Sequence[Any]) -> Arm:
        out, plan = self.out / "runs" / short, self.plan
        said = out / "result.json"
        if not said.exists():
            how = ["--shards", self.out / "shards-train", "--target", self.target, "--out", out, "--name", short]
            how += ["--steps", budget, "--batch-tokens", plan.batch_tokens, "--ttt-steps", plan.num_steps]
            how += ["--seed", seed, "--fp32", "--export-fp32", "--threads", 1, "--eval-every", max(10, budget // 8)]
            shutil.rmtree(out / "drafter", ignore_errors=True)  # finished, but killed before it could say so
            write_text(said, self._call([*self._verb("train", *how), *words, "--json"]))
        found = json.loads(said.read_text("utf-8"))
        return Arm(name, out / "drafter", budget, seed, found["tokens"], found["best"]["accept_len_positions"])

    def _short(self, arm: Arm) -> str:
        return arm.folder.parent.name if arm.budget else arm.folder.name

    def _verb(self, verb: str, *words: Any) -> list[Any]:
        return [sys.executable, "-m", "drafter", verb, *words]

    def _engine(self, how: Sequence[Any], verbs: Sequence[Sequence[Any]]) -> list[Any]:
        """Verbs that talk to an engine, one after the other, and the engine for as long as they run."""
        start = [sys.executable, "-m", "server", "engine", "--profile", self.profile_file, *how, "--"]
        lines = [" ".join([shlex.join(map(str, verb)), "--url {url} --key-file {key_file}"]) for verb in verbs]
        return [*start, "sh", "-euc", " && ".join(lines)]

    def _once(self, mark: str, words: Iterable[Any]) -> None:
        done = self.out / f".{mark}"
        if not done.exists():
            self._call(words)
            done.touch()

    def _call(self, words: Iterable[Any]) -> str:
        """Run a command; its stdout. Raises TransferError with what it said last."""
        argv = [str(word) for word in words]
        with (self.out / "log.txt").open("a", encoding="utf-8") as log:
            print(f"\n$ {' '.join(argv)}", file=log, flush=True)
            print(f"transfer: {' '.join(argv[2:5])} …", file=sys.stderr)
            done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=log, text=True)
            log.write(done.stdout)
        if done.returncode:
            last = (self.out / "log.txt").read_text("utf-8", "replace").strip().splitlines()[-6:]
            raise TransferError(f"{' '.join(argv[1:5])} ended with {done.returncode}:\n  " + "\n  ".join(last))
        return done.stdout


def ahead(tuned: Sequence[float], scratch: Sequence[float]) -> str:
    """Which start is ahead: one whose every seed is above every seed of the other, else neither."""
    if min(tuned) > max(scratch):
        return TUNED
    return SCRATCH if min(scratch) > max(tuned) else "neither"


def verdict(winners: dict[str, str], batch_tokens: int) -> str:
    """The curve in a sentence."""
    parts = [f"{winner} at {int(budget) * batch_tokens:,} tokens" for budget, winner in winners.items()]
    last = list(winners.values())[-1]
    crossed = next((budget for budget, winner in winners.items() if winner == SCRATCH), None)
    end = (
        f"scratch is ahead from about {int(crossed) * batch_tokens:,} tokens on"
        if crossed and all(winner == SCRATCH for b, winner in winners.items() if int(b) >= int(crossed))
        else "the reused drafter is never overtaken in these budgets"
        if last == TUNED
        else "at the largest budget neither start is ahead of the other"
        if last == "neither"
        else "no budget from which one start stays ahead"
    )
    return f"ahead: {'; '.join(parts)}. So {end}."


def words_of(found: dict[str, Any]) -> str:
    """The report for a person."""
    lines = [f"{'arm':<24} {'tokens':>10}  acceptance length      seeds' range   served  positions"]
    for row in found["arms"]:
        low, high = row["ci95"]
        served = "-" if row["served"] is None else f"{row['served']:.3f}"
        positions = "-" if row["accept_len_positions"] is None else f"{row['accept_len_positions']:.3f}"
        lines.append(
            f"{row['name']:<24} {row['tokens']:>10,}  {row['acceptance_length']:.3f} ({low:.3f} to {high:.3f})  "
            f"{min(row['by_seed']):.3f} to {max(row['by_seed']):.3f}  {served:>6}  {positions:>9}"
        )
    return "\n".join([*lines, found["verdict"]])


def _row(
    name: str, budget: int, some: list[tuple[Arm, dict[str, Any]]], served: dict[str, float | None]
) -> dict[str, Any]:
    """An arm of the report: the seeds' walks of each prompt added up."""
    histograms = [[each["histogram"] for each in walked["documents"]] for _, walked in some]
    counts = Counts(
        np.sum([[float(accepted_tokens(h)) for h in seed] for seed in histograms], axis=0),
        np.sum([[float(verify_steps(h)) for h in seed] for seed in histograms], axis=0),
    )
    estimate = acceptance_length(counts, ["held"] * len(counts.steps))
    positions = [arm.accept_len_positions for arm, _ in some if arm.accept_len_positions is not None]
    return {
        "name": name,
        "steps": budget,
        "tokens": some[0][0].tokens,
        "acceptance_length": estimate.value,
        "ci95": [estimate.low, estimate.high],
        "by_seed": [walked["acceptance_length"] for _, walked in some],
        "flatness": mean([walked["flatness"] or 0.0 for _, walked in some]),
        "accept_len_positions": mean(positions) if positions else None,
        "served": served.get(str(some[0][0].folder)),
    }


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(
        prog="python -m bench.transfer",
        description=__doc__,
        epilog=TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = top.add_argument
    add("--moved", type=Path, required=True, metavar="DIR", help="the new target's folder, as tests.moved makes it")
    add("--out", type=Path, required=True, metavar="DIR", help="where everything goes, and goes on from")
    add("--budgets", type=_budgets, metavar="N,N", help="optimiser steps of 600 tokens (default: 40,160,640,2560)")
    add("--seeds", type=whole(), metavar="N", help="of each budget (default: 3)")
    add("--count", type=whole(), metavar="N", help="prompts to learn from (default: 800)")
    add("--init", choices=INITS, default="scaled", help="of the drafter that is trained on (default: scaled)")
    add("--tuned", default="", metavar="WORDS", help="more arguments of `train` for the reused drafter")
    add("--scratch", default="", metavar="WORDS", help="and for the new one")
    add("--quick", action="store_true", help="two small budgets, one seed and init, 80 prompts: to see that it runs")
    add("--json", action="store_true", help="print the report as one JSON object on stdout, and nothing else there")
    return top


def main(argv: list[str] | None = None) -> int:
    """Run the experiment and return its exit code."""
    args = parser().parse_args(argv)
    plan = Plan(
        moved=args.moved,
        out=args.out,
        budgets=args.budgets or ((20, 60) if args.quick else (40, 160, 640, 2560)),
        seeds=args.seeds or (1 if args.quick else 3),
        count=args.count or (80 if args.quick else 800),
        held=16 if args.quick else 120,
        tokens=64,
        vocab=None,
        init=args.init,
        every_init=not args.quick,
        tuned=tuple(args.tuned.split()),
        scratch=tuple(args.scratch.split()),
    )
    try:
        found = Experiment(plan).run()
    except KeyboardInterrupt:
        print("transfer: interrupted; the same command goes on from here.", file=sys.stderr)
        return 130
    except (TransferError, ValueError, OSError) as error:
        print(f"transfer: {error}", file=sys.stderr)
        return 1
    write_text(plan.out / "transfer.json", json.dumps(found, indent=1) + "\n")
    print(json.dumps(found) if args.json else words_of(found))
    return 0


def _budgets(text: str) -> tuple[int, ...]:
    found = tuple(whole()(part) for part in text.split(","))
    if list(found) != sorted(set(found)):
        raise argparse.ArgumentTypeError(f"{text!r} does not rise")
    return found


if __name__ == "__main__":
    sys.exit(main())
