"""How fast the trainer is: against the machine's own products of matrices, and against speculators' model class.

Random features of a target's shape, made for the run. Each round times plain products, this project's step and
speculators' model (in the same loop, on the same shards) one after another, so that a busy machine slows all three.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.random_shards import SHAPES, make
from drafter.arguments import whole
from drafter.report import command, machine

REPO = Path(__file__).resolve().parents[1]
SPECULATORS = REPO / ".cache" / "speculators" / "bin" / "python"

TEXT = """\
examples:
  make speculators-env; python -m bench.train_speed --rounds 5
  python -m bench.train_speed --shape kimi --device cuda --bf16 --alone --json >speed.json

tokens_per_second: of this project's step (read, loss, gradients, clip, AdamW, metrics), by CPU time on a CPU
matrix_rate_share: (operations that the step needs, see bench/arithmetic.py) / seconds / (rate of plain products of
those shapes, same type, same threads); medians over the rounds of ratios within a round
ratio_vs_speculators: median over the rounds of tokens/s against speculators' Eagle3DraftModel in this project's loop,
its attention set to sdpa (flex attention, its default, has no backward on a CPU); it is not speculators' own trainer
exit codes: 0 fine, 1 a side failed, 2 usage, 130 interrupted
"""


class SpeedError(RuntimeError):
    """A measurement that could not be made: which side, and what to do."""


class Worker:
    """One side in a process of its own."""

    def __init__(self, python: str, name: str, folder: Path, settings: dict[str, Any]) -> None:
        self.name = name
        argv = [python, "-m", "bench.train_loop", name, str(folder), json.dumps(settings)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPO, text=True)
        self._answer()

    def run(self, steps: int) -> dict[str, float]:
        """So many steps: seconds, tokens, operations needed, and the mean of what a step returns."""
        assert self._process.stdin
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> dict[str, float]:
        """Ends it; its peak memory in MB, and a GPU's."""
        assert self._process.stdin
        self._process.stdin.close()
        peaks = self._answer()
        self._process.wait()
        return peaks

    def stop(self) -> None:
        """Ends it where something failed."""
        self._process.terminate()
        self._process.wait()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("{"):  # a library may print beside it
                found: dict[str, float] = json.loads(line)
                return found
        raise SpeedError(f"the side {self.name} ended with {self._process.wait()}: see what it wrote above.")


def measure(folder: Path, settings: dict[str, Any], rounds: int, steps: int, alone: bool) -> dict[str, Any]:
    """All rounds, and the figures of `train_speed`."""
    pythons = {"products": sys.executable, "eyas": sys.executable}
    if not alone:
        pythons["speculators"] = str(SPECULATORS)
    workers: dict[str, Worker] = {}
    runs: list[dict[str, Any]] = []
    try:
        for name, python in pythons.items():
            workers[name] = Worker(python, name, folder, settings)
            workers[name].run(1)  # warm
        for _ in range(rounds):
            found = {name: worker.run(1 if name == "products" else steps) for name, worker in workers.items()}
            runs.append(one_round(found))
            print(f"train_speed: {describe(runs[-1])}", file=sys.stderr)
        peaks = {name: worker.end() for name, worker in workers.items()}
    except BaseException:
        for worker in workers.values():
            worker.stop()
        raise
    figures = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    figures |= peaks["eyas"]
    if not alone:
        theirs = peaks["speculators"]["peak_rss_mb"]
        figures["speculators_peak_rss_mb"] = theirs
        figures["memory_ratio_vs_speculators"] = figures["peak_rss_mb"] / theirs
    return figures | {"runs": runs}


def one_round(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """The figures of one round, from what each side took."""
    ours = found["eyas"]
    speed = ours["tokens"] / ours["seconds"]
    result = {
        "tokens_per_second": speed,
        "needed_gflop_per_token": ours["operations"] / ours["tokens"] / 1e9,
        "matrix_gflops": found["products"]["value"] / 1e9,
        "matrix_rate_share": ours["operations"] / ours["seconds"] / found["products"]["value"],
    }
    if "speculators" in found:
        theirs = found["speculators"]
        result["speculators_tokens_per_second"] = theirs["tokens"] / theirs["seconds"]
        result["ratio_vs_speculators"] = speed / result["speculators_tokens_per_second"]
    return result


def describe(run: dict[str, float]) -> str:
    """One round in words."""
    words = (
        f"{run['tokens_per_second']:.0f} tokens/s, {run['matrix_rate_share']:.0%} of {run['matrix_gflops']:.0f} GFLOP/s"
    )
    if "ratio_vs_speculators" in run:
        words += (
            f", x{run['ratio_vs_speculators']:.2f} of speculators' {run['speculators_tokens_per_second']:.0f} tokens/s"
        )
    return words


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(
        prog="train_speed", description=__doc__, epilog=TEXT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = top.add_argument
    add("--shape", choices=sorted(SHAPES), default="smollm2", help="whose drafter (default: smollm2)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda also reports its own memory")
    add("--bf16", action="store_true", help="products in bf16 (default: fp32), on all sides")
    add("--attention", choices=("sdpa", "eager"), default="sdpa", help="speculators' attention (default: sdpa)")
    add("--alone", action="store_true", help="without speculators")
    add("--draft-steps", type=whole(), default=3, metavar="K", help="draft steps trained (default: 3)")
    add("--batch-tokens", type=whole(), default=1000, metavar="N", help="tokens of a step (default: 1000)")
    add("--length", type=whole(), default=250, metavar="N", help="tokens of a document (default: 250)")
    add("--rounds", type=whole(), default=3, metavar="N", help="interleaved rounds (default: 3)")
    add("--steps", type=whole(), default=4, metavar="N", help="steps of a side in a round (default: 4)")
    add("--threads", type=whole(), default=1, metavar="N", help="torch's threads, on all sides (default: 1)")
    add("--dir", type=Path, metavar="DIR", help="where the shards are made (default: a temporary folder)")
    add("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Make, measure, remove, report; returns the exit code."""
    args = parser().parse_args(argv)
    if not args.alone and not SPECULATORS.exists():
        print("train_speed: speculators is not there: run `make speculators-env`, or pass --alone.", file=sys.stderr)
        return 1
    settings = {
        "shape": asdict(SHAPES[args.shape]),
        "steps": args.draft_steps,
        "device": args.device,
        "bf16": args.bf16,
        "attention": args.attention,
        "batch_tokens": args.batch_tokens,
        "threads": args.threads,
    }
    if args.device == "cuda" and not args.alone:
        parser().error("speculators' side runs on the CPU here: pass --alone with --device cuda")
    try:
        with tempfile.TemporaryDirectory(prefix="train-speed-", dir=args.dir) as folder:
            make(Path(folder), SHAPES[args.shape], args.batch_tokens, args.length)
            found = measure(Path(folder), settings, args.rounds, args.steps, args.alone)
    except (SpeedError, OSError, ValueError) as error:
        print(f"train_speed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train_speed: interrupted; what was made is removed.", file=sys.stderr)
        return 130
    labels = {"speculators": f"Eagle3DraftModel of speculators 0.9.0 in this project's loop, {args.attention}"}
    found = found | settings | labels | {"machine": machine(), "command": command()}
    print(json.dumps(found) if args.json else describe(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
