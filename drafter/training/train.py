"""Train an EAGLE-3 drafter on captured hidden states: AdamW, a curriculum of draft steps, evaluation, resume.

A run is a folder: log.jsonl (a line for each record of metrics), checkpoint.safetensors, best.safetensors, the target's
choices, and in the end `drafter/`, exported from the best evaluation.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

from drafter.training.curves import Curves
from drafter.training.documents import Documents
from drafter.training.errors import TrainingError
from drafter.training.loss import Counts, Lesson, total_weights
from drafter.training.model import Eagle3
from drafter.training.ranks import Ranks, whole
from drafter.training.runstate import Progress, check_tensors, load_run, load_tensors, save_run, save_tensors
from drafter.training.target import Target

WARM_START_FLOOR = 0.1  # full_acc_0 below which a drafter that is trained on has learnt nothing that fits


@dataclass(frozen=True)
class Options:
    """How to train. The budget is the first of `steps`, `epochs` and `minutes` that is given.

    ttt_steps: draft steps trained, reached from 1 in equal parts of the run where `curriculum`. lr falls by a cosine
    to `min_lr` of itself after `warmup`: steps, or below 1 a share of the run. user_weight: weight of tokens that were
    not generated in the loss. head_from: share of the run after which lm_head learns too, at `head_lr` of the rate (0
    always, 1 never). patience: evaluations without a better accept_len_positions before the run stops (0: never).
    accumulate: pieces that each rank takes its part of a batch in, one after another, for as much less memory.
    """

    steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None
    ttt_steps: int = 4
    curriculum: bool = True
    batch_tokens: int = 1000
    lr: float = 3e-3
    min_lr: float = 0.03
    warmup: float = 20
    weight_decay: float = 0.0
    clip: float = 1.0
    decay: float = 0.8
    user_weight: float = 1.0
    head_from: float = 1.0
    head_lr: float = 0.3
    bf16: bool = True
    seed: int = 0
    eval_every: int = 100
    eval_documents: int = 48
    patience: int = 0
    accumulate: int = 1
    checkpoint_minutes: float = 5.0

    def __post_init__(self) -> None:
        if not any((self.steps, self.epochs, self.minutes)):
            raise TrainingError("the run has no budget: give --steps, --epochs or --minutes.")

    def draft_steps(self, progress: float) -> int:
        """Draft steps trained when `progress` (0 to 1) of the run is done."""
        if not self.curriculum:
            return self.ttt_steps
        return min(self.ttt_steps, 1 + int(progress * self.ttt_steps))

    def rate(self, step: int, progress: float) -> float:
        """Learning rate of a step."""
        cosine = self.min_lr + (1 - self.min_lr) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        if 0 < self.warmup < 1:
            return self.lr * cosine * min(1.0, progress / self.warmup + 0.1)  # the first step is not for nothing
        return self.lr * cosine * min(1.0, (step + 1) / max(1, self.warmup))


class Run:
    """One training run in `out`. `identity` says what data, target and vocabulary it has, beside its options.

    Every rank makes the same run and calls the same methods; the first of them writes the files.
    """

    def __init__(
        self,
        model: Eagle3,
        documents: Documents,
        target: Target,
        options: Options,
        out: Path,
        identity: dict[str, Any],
        ranks: Ranks | None = None,
        tensorboard: Path | None = None,
    ) -> None:
        self.model, self.documents, self.options, self.out = model, documents, options, out
        self.ranks = ranks or Ranks(torch.device("cpu"))
        self.teacher_UH = target.head_VH[model.target_ids_U].to(self.ranks.device)
        self._known_V = torch.from_numpy(model.vocab.t2d)
        self.dtype = torch.bfloat16 if options.bf16 else torch.float32
        if not options.bf16:
            self.teacher_UH = self.teacher_UH.float()
        # FSDP fixes what has a gradient when it shards: of a head that learns later it is thrown away until then
        model.lm_head.weight.requires_grad_(options.head_from < 1)
        self._lesson = self.ranks.shard(Lesson(model))
        head = model.lm_head.weight
        body = [parameter for parameter in model.parameters() if parameter is not head]
        self.optimizer = torch.optim.AdamW(
            [{"params": body}, {"params": [head]}],
            lr=options.lr,
            betas=(0.9, 0.95),
            weight_decay=options.weight_decay,
            fused=True,
        )
        self.progress = Progress()
        self.epoch_tokens = documents.tokens(documents.train)
        self.held = sorted(documents.held, key=lambda i: documents.shards.document(i).name)[: options.eval_documents]
        limits = {key: value for key, value in asdict(options).items() if key != "checkpoint_minutes"}
        self.identity = identity | {"config": model.config} | limits
        self._begun = time.monotonic()
        self._planned = -1  # the epoch that _batches are of
        self._batches: list[list[int]] = []
        self._checkpoint = out / "checkpoint.safetensors"
        self._curves = Curves(tensorboard) if tensorboard and self.ranks.leads else None

    def evaluate(self) -> dict[str, float]:
        """Metrics of all draft steps on the held-out documents, answers alone."""
        steps = self.options.ttt_steps
        counts = Counts.none(steps)
        with torch.no_grad():
            for batch in self.documents.epoch(self.held, 2 * self.options.batch_tokens, 0, 0):
                for part in self.ranks.parts(batch, self.documents.length, 1):
                    counts += self._loss(part, steps)[1]
        if isinstance(self._lesson, FSDPModule):
            self._lesson.reshard()
        return self._over_ranks(counts).rates(self.options.decay)

    def _loss(self, part: list[int], steps: int, **how: Any) -> tuple[Tensor, Counts]:
        """Loss and counts of these documents. Of none, what any other documents add when they do not count: FSDP's
        ranks must compute together."""
        batch = self.documents.batch(part or self.held[:1]).to(self.ranks.device)
        loss, counts = self._lesson(batch, self.teacher_UH, steps, self.options.decay, dtype=self.dtype, **how)
        return (loss, counts) if part else (loss * 0, Counts.none(steps))

    def _over_ranks(self, counts: Counts) -> Counts:
        return Counts(*self.ranks.sum(torch.stack(list(vars(counts).values()))))

    def start(self) -> dict[str, float]:
        """Evaluate before the first step, or take up the run that `out` holds; returns the metrics at this point."""
        self.out.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        if self._checkpoint.exists():
            self.progress = load_run(self._checkpoint, self.model, self.optimizer, self.identity)
            if self.ranks.leads:
                check_tensors(self.out / "best.safetensors")  # now, not when hours of training ask for it
                self._cut_log()
            return self.evaluate()
        if self.ranks.leads:
            (self.out / "log.jsonl").unlink(missing_ok=True)
        metrics = self.evaluate()
        self._log_evaluation(metrics)
        self._say_estimate((time.monotonic() - begun) / self.documents.tokens(self.held))
        return metrics

    def share_done(self) -> float:
        """How much of the budget is spent, 0 to 1."""
        if self.options.steps:
            return self.progress.step / self.options.steps
        if self.options.epochs:
            return self.progress.tokens / (self.options.epochs * self.epoch_tokens)
        assert self.options.minutes
        return self.seconds() / (60 * self.options.minutes)

    def seconds(self) -> float:
        """Time spent in training, this start's and those before."""
        return self.progress.seconds + time.monotonic() - self._begun

    def train(self, stop_after: int | None = None) -> None:
        """Train until the budget is spent, or patience is; `stop_after` leaves off at that step, checkpoint written.

        On Ctrl-C or SIGTERM the step is ended, the checkpoint written, and KeyboardInterrupt raised. Raises
        TrainingError where the loss is not finite.
        """
        self._begun = saved = time.monotonic()
        with self._bar() as bar, stopped() as asked:
            while True:
                late = time.monotonic() - saved > 60 * self.options.checkpoint_minutes
                done, save = self.ranks.decided(self.share_done(), late)
                stop = self.ranks.any(asked.is_set())
                if save or stop:
                    self.save()
                    saved = time.monotonic()
                if stop:
                    raise KeyboardInterrupt
                if done >= 1 or self._out_of_patience(done):
                    break
                if stop_after is not None and self.progress.step >= stop_after:
                    break
                self._next_step(bar, done)
        finished = stop_after is None or done >= 1
        if finished and self.progress.evaluated != self.progress.step:
            self._log_evaluation(self.evaluate())
        self.save()

    def _bar(self) -> tqdm[Any]:
        return tqdm(
            total=1.0,
            initial=self.share_done(),
            desc="train",
            disable=None if self.ranks.leads else True,
            bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}",
        )

    def _next_step(self, bar: tqdm[Any], done: float) -> None:
        progress, options = self.progress, self.options
        if self._planned != progress.epoch:
            self._planned = progress.epoch
            self._batches = self.documents.epoch(
                self.documents.train, options.batch_tokens, options.seed, progress.epoch
            )
        batches = self._batches
        indices = batches[progress.batch]
        metrics = self.step(indices, done)
        progress.step += 1
        progress.tokens += self.documents.tokens(indices)
        progress.batch += 1
        if progress.batch == len(batches):
            progress.epoch, progress.batch = progress.epoch + 1, 0
        bar.update(min(self.share_done(), 1.0) - bar.n)
        if progress.step % 10 == 0:
            speed = progress.tokens / max(self.seconds(), 1e-9)
            bar.set_postfix_str(f" step {progress.step}, loss {metrics['loss']:.3f}, {speed:.0f} tok/s", refresh=False)
            self._log("train", metrics)
        if progress.step % options.eval_every == 0:
            self._log_evaluation(self.evaluate())

    def step(self, indices: list[int], done: float) -> dict[str, float]:
        """One optimiser step on these documents when `done` of the run is over; returns its metrics."""
        options = self.options
        learns = done >= options.head_from
        if self.ranks.world == 1:
            self.model.lm_head.weight.requires_grad_(learns)
        rate = options.rate(self.progress.step, done)
        body, head = self.optimizer.param_groups
        body["lr"], head["lr"] = rate, rate * options.head_lr
        steps = options.draft_steps(done)
        parts = self.ranks.parts(indices, self.documents.length, options.accumulate)
        totals = self._totals(parts, steps)
        counts = Counts.none(steps)
        self.optimizer.zero_grad()
        for part in parts:
            loss, each = self._loss(part, steps, user_weight=options.user_weight, totals=totals)
            loss.backward()
            counts += each
        counts = self._over_ranks(counts)
        found = counts.rates(options.decay)
        if not math.isfinite(found["loss"]):
            raise TrainingError(
                f"the loss is {found['loss']} at step {self.progress.step}: lower --lr, or train in fp32."
            )
        if not learns:
            self.model.lm_head.weight.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.clip)
        self.optimizer.step()
        return found | {"lr": rate, "grad_norm": float(whole(norm)), "ttt_steps": steps}

    def _totals(self, parts: list[list[int]], steps: int) -> Tensor:
        """The weights of a step's rows, over all its pieces and ranks, float64 [K]."""
        weights = torch.zeros(steps, dtype=torch.float64)
        for part in filter(None, parts):
            batch = self.documents.batch(part, hidden=False)
            weights += total_weights(batch, self._known_V, steps, self.options.user_weight)
        return self.ranks.sum(weights)

    def save(self) -> None:
        """Write the checkpoint."""
        state = Progress(**(asdict(self.progress) | {"seconds": self.seconds()}))
        save_run(self._checkpoint, self.model, self.optimizer, state, self.identity, self.ranks.leads)

    def curve(self) -> list[dict[str, float]]:
        """Step, tokens, held-out loss and accept_len_positions of each evaluation."""
        lines = map(json.loads, (self.out / "log.jsonl").read_text("utf-8").splitlines())
        return [
            {
                "step": line["global_step"],
                "tokens": line["tokens"],
                "loss": round(line["val"]["loss_epoch"], 4),
                "accept_len_positions": round(line["val"]["accept_len_positions_epoch"], 4),
            }
            for line in lines
            if "val" in line
        ]

    def best_weights(self) -> dict[str, Tensor]:
        """The weights of the best evaluation."""
        return load_tensors(self.out / "best.safetensors")[0]

    def _out_of_patience(self, done: float) -> bool:
        patience = self.options.patience
        settled = self.options.draft_steps(done) == self.options.ttt_steps  # a new step brings new gains
        return settled and 0 < patience <= self.progress.evaluations_since_best

    def _log_evaluation(self, metrics: dict[str, float]) -> None:
        progress = self.progress
        progress.evaluated = progress.step
        progress.evaluations_since_best += 1
        if metrics["accept_len_positions"] > progress.best:
            progress.best, progress.best_step = metrics["accept_len_positions"], progress.step
            progress.evaluations_since_best = 0
            weights = {name: whole(parameter) for name, parameter in self.model.named_parameters()}
            if self.ranks.leads:
                save_tensors(self.out / "best.safetensors", weights, {"step": progress.step})
        self._log("val", {f"{name}_epoch": value for name, value in metrics.items()})
        rates = " ".join(f"{metrics[f'full_acc_{k}']:.3f}" for k in range(self.options.ttt_steps))
        self.ranks.say(
            f"step {progress.step}: held-out loss {metrics['loss']:.3f}, full_acc {rates}, "
            f"accept_len_positions {metrics['accept_len_positions']:.3f}"
        )

    def _log(self, kind: str, metrics: dict[str, float]) -> None:
        if not self.ranks.leads:
            return
        p = self.progress
        line = {kind: metrics, "epoch": p.epoch, "global_step": p.step, "tokens": p.tokens, "seconds": self.seconds()}
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        if self._curves is not None:
            self._curves.add(p.step, {f"{kind}/{name}": value for name, value in metrics.items()})

    def _cut_log(self) -> None:
        """Forget what was logged after the checkpoint: it will be logged again. Raises TrainingError."""
        file = self.out / "log.jsonl"
        text = file.read_bytes() if file.exists() else b""
        lines = text.decode("utf-8", "replace").split("\n")[:-1]  # one without its end was cut
        try:
            kept = [line for line in lines if json.loads(line)["global_step"] <= self.progress.step]
        except (ValueError, KeyError, TypeError) as error:
            raise TrainingError(
                f"{file} is no log of this run ({error!r}): remove it, and the curve begins where the run goes on."
            ) from None
        beside = file.with_suffix(".tmp")
        beside.write_text("".join(f"{line}\n" for line in kept), "utf-8")
        beside.replace(file)

    def _say_estimate(self, seconds_per_token: float) -> None:
        options = self.options
        tokens = options.epochs * self.epoch_tokens if options.epochs else (options.steps or 0) * options.batch_tokens
        # backwards costs twice what forwards does; the curriculum trains half of the draft steps on average
        minutes = options.minutes or tokens * seconds_per_token * 3 * (0.6 if options.curriculum else 1) / 60
        self.ranks.say(
            f"{len(self.documents.train)} documents, {self.epoch_tokens:,} tokens an epoch, "
            f"{len(self.documents.held)} held out, {self.documents.left_out} too short; the target's own choice at "
            f"{self.documents.agreement:.0%} of the answers' tokens; about {minutes:.0f} minutes"
        )


@contextmanager
def stopped() -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets, so that a step is ended first; a second Ctrl-C strikes at once.

    A second SIGTERM does not: what ends a job tells each of its processes, and torchrun tells its own once more.
    """
    asked = threading.Event()
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        asked.set()
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)

    if threading.current_thread() is threading.main_thread():
        for asking in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(asking) is not signal.SIG_IGN:  # what is ignored stays so
                before[asking] = signal.signal(asking, note)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_warm_start(metrics: dict[str, float], folder: Path, force: bool) -> None:
    """Raises TrainingError where a drafter to go on from is right less than one time in ten before the first step."""
    if metrics["full_acc_0"] < WARM_START_FLOOR and not force:
        raise TrainingError(
            f"{folder} has full_acc_0 {metrics['full_acc_0']:.3f} on the held-out documents before the first step, "
            f"below {WARM_START_FLOOR}: its layer ids, its vocabulary or its target differ from the shards'. Check "
            "them with `python -m drafter preflight`, or pass --force."
        )
