"""One run of bench.train_quality: a drafter trained by this project's trainer or as speculators' model class.

python -m bench.quality_loop SETTINGS: trains `steps` steps on the same batches whichever side it is, writes the weights
to settings["out"] by the names of SGLang's checkpoints, and prints what it took as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.train_loop import rows_of, speculators_model
from drafter.checkpoint.vocab import DraftVocab
from drafter.data.shards import open_shards
from drafter.training.documents import Documents
from drafter.training.initial import fit_fc, new_drafter
from drafter.training.ranks import Ranks
from drafter.training.shape import Shape, drafter_config
from drafter.training.target import load_target
from drafter.training.train import Options, Run

HELD_SHARE = 0.05  # of the shards, which are for training alone: what is measured on is captured apart
CPU = torch.device("cpu")


class Task:
    """What both sides share: the target, the shards' documents, the options and the batches."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, data = settings, Path(settings["data"])
        self.target, self.vocab = load_target(data / "target"), DraftVocab.load(data / "vocab.safetensors")
        shards = open_shards(data / "shards")
        self.documents = Documents(shards, self.target, HELD_SHARE, 2048, Path(settings["out"]).parent)
        self.config = drafter_config(self.target, shards.manifest["layer_ids"], self.vocab, Shape())
        self.layer_ids: list[int] = shards.manifest["layer_ids"]
        self.options = Options(
            steps=settings["steps"],
            ttt_steps=settings["ttt_steps"],
            batch_tokens=settings["batch_tokens"],
            lr=settings["lr"],
            warmup=0.015,
            clip=0.5,
            bf16=False,
            seed=settings["seed"],
        )

    def batches(self) -> Iterator[list[int]]:
        """The run's batches, epoch after epoch, by the seed."""
        epoch, documents, options = 0, self.documents, self.options
        while True:
            yield from documents.epoch(documents.train, options.batch_tokens, options.seed, epoch)
            epoch += 1


def eyas(task: Task) -> tuple[Callable[[list[int], int], object], Callable[[], dict[str, Tensor]]]:
    """This project's trainer, its start and its curriculum as `train` has them: (a step, the weights)."""
    model = new_drafter(task.config, task.vocab, task.target, task.options.seed)
    fit_fc(model, task.documents, task.options.seed)
    run = Run(model, task.documents, task.target, task.options, Path(task.settings["out"]).parent, {}, Ranks(CPU))

    def step(indices: list[int], number: int) -> None:
        run.step(indices, number / task.settings["steps"])
        run.progress.step += 1

    return step, lambda: dict(model.named_parameters())


def speculators(task: Task) -> tuple[Callable[[list[int], int], object], Callable[[], dict[str, Tensor]]]:
    """speculators' model, its own start and loss, with this loop's AdamW, rate and clip: (a step, the weights)."""
    from speculators.losses.eager import kl_div_loss

    options, settings = task.options, task.settings
    torch.manual_seed(options.seed)
    model = speculators_model(
        Path(settings["data"]) / "target",
        task.vocab,
        task.layer_ids,
        options.ttt_steps,
        settings["attention"],
        num_key_value_heads=task.config["num_key_value_heads"],
        head_dim=task.config["head_dim"],
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(indices: list[int], number: int) -> None:
        (group,) = optimizer.param_groups
        group["lr"] = options.rate(number, number / settings["steps"])
        _, loss, _ = model(
            **rows_of(task.documents.batch(indices)),
            ttt_steps=options.ttt_steps,
            ttt_step_loss_decay=options.decay,
            loss_config={"kl_div": (kl_div_loss, 1.0)},
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, options.clip)
        optimizer.step()

    def weights() -> dict[str, Tensor]:
        kept = ("fc.", "layers.0.", "norm.", "lm_head.")
        named = {name: x for name, x in model.named_parameters() if name.startswith(kept)}
        return {name.replace("layers.0.", "midlayer."): x for name, x in named.items()}

    return step, weights


SIDES = {"eyas": eyas, "speculators": speculators}


def main(text: str) -> None:
    settings = json.loads(text)
    torch.set_num_threads(settings["threads"])
    task = Task(settings)
    step, weights = SIDES[settings["side"]](task)
    batches, tokens, begun = task.batches(), 0, time.process_time()
    for number in range(settings["steps"]):
        indices = next(batches)
        tokens += task.documents.tokens(indices)
        step(indices, number)
    seconds = time.process_time() - begun
    found = {name: x.detach().float().contiguous() for name, x in weights().items()}
    save_file(found, settings["out"])
    print(json.dumps({"tokens": tokens, "cpu_seconds": round(seconds, 3), "parameters": _count(found)}), flush=True)


def _count(tensors: dict[str, Tensor]) -> int:
    return sum(x.numel() for x in tensors.values())


if __name__ == "__main__":
    main(sys.argv[1])
