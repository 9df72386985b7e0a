"""One side of bench.train_speed: this project's trainer, speculators' model, or plain products, driven by stdin.

python -m bench.train_loop SIDE FOLDER SETTINGS: makes itself ready, then reads lines from stdin: a number runs that
many steps and prints what they took as JSON; the end of stdin ends it, with its peak memory. Both trainers walk the
same batches of the same shards, and do the same around the model: read, loss, gradients, clip, fused AdamW.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.arithmetic import Shape, clock, matrix_rate, needed_operations, needed_products
from drafter.checkpoint.vocab import DraftVocab
from drafter.data.shards import open_shards
from drafter.training.batch import Batch
from drafter.training.device import keep_memory
from drafter.training.documents import Documents
from drafter.training.initial import new_drafter
from drafter.training.model import Eagle3
from drafter.training.ranks import Ranks
from drafter.training.shape import Shape as DrafterShape
from drafter.training.shape import drafter_config
from drafter.training.target import Target, load_target
from drafter.training.train import Options, Run

DECAY = 0.8
Step = Callable[[list[int]], float]


class Side:
    """What both trainers share: the target, the shards' documents and the batches of an epoch."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.settings, self.folder = settings, folder
        self.shape, self.steps = Shape(**settings["shape"]), int(settings["steps"])
        self.device = torch.device(settings["device"])
        self.dtype = torch.bfloat16 if settings["bf16"] else torch.float32
        self.target = load_target(folder / "target")
        self.vocab = DraftVocab.load(folder / "vocab.safetensors")
        shards = open_shards(folder / "shards")
        self.documents = Documents(shards, self.target, 0.5, 1 << 20, folder, Ranks(self.device))
        self.layer_ids: list[int] = shards.manifest["layer_ids"]
        self.batches = self.documents.epoch(self.documents.train, int(settings["batch_tokens"]), 0, 0)

    def cycle(self) -> Iterator[list[int]]:
        """The batches, again and again."""
        while True:
            yield from self.batches

    def counted(self, indices: list[int]) -> tuple[list[int], list[int], int]:
        """Of one batch: its documents' last generated tokens, the rows scored in each step, and the labels."""
        batch = self.documents.batch(indices)
        known = torch.from_numpy(self.vocab.t2d)[batch.best_T]
        ends = [int(mask.nonzero()[-1]) for mask in batch.generated_T.split(batch.lengths)]
        shifts = [batch.shift(k) for k in range(self.steps)]
        scored = [int((shift.inside_T & known[shift.label_T]).sum()) for shift in shifts]
        used = torch.cat([shift.label_T[shift.inside_T] for shift in shifts]).unique()
        return ends, scored, int(known[used].sum())


def eyas(side: Side) -> Step:
    """This project's trainer: a step of its own run, metrics included; memory as `train` keeps it."""
    keep_memory()
    model = new_drafter(
        drafter_config(side.target, side.layer_ids, side.vocab, DrafterShape()), side.vocab, side.target, 0
    )
    run = make_run(model, side.documents, side.target, side)
    return lambda indices: run.step(indices, 1.0)["loss"]


def make_run(model: Eagle3, documents: Documents, target: Target, side: Side) -> Run:
    """A run of these settings."""
    options = Options(
        steps=1 << 30, ttt_steps=side.steps, curriculum=False, decay=DECAY, bf16=side.dtype == torch.bfloat16
    )
    return Run(model, documents, target, options, side.folder / "run", {}, Ranks(side.device))


def speculators_model(
    target: Path, vocab: DraftVocab, layer_ids: list[int], steps: int, attention: str, **layer: Any
) -> torch.nn.Module:
    """speculators' own Eagle3DraftModel as it begins, without the norms that no engine serves, on shards whose final
    states are after the norm. `layer` changes its decoder layer's config; `attention` must have a backward here."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    decoder = LlamaConfig.from_pretrained(target)
    decoder.update({"num_hidden_layers": 1, **layer})
    decoder._attn_implementation = attention
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=decoder,
        draft_vocab_size=len(vocab),
        eagle_aux_hidden_state_layer_ids=layer_ids,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(target)),
        ),
    )
    model: torch.nn.Module = Eagle3DraftModel(config)
    model.load_vocab_mappings(torch.from_numpy(vocab.t2d), torch.from_numpy(vocab.d2t))
    model.load_verifier_weights()
    model.verifier_norm = torch.nn.Identity()
    return model.float().train()


def speculators(side: Side) -> Step:
    """speculators' own model class in the same loop, its attention set to what has a backward on a CPU."""
    from speculators.losses.eager import kl_div_loss

    torch.manual_seed(0)
    model = speculators_model(
        side.folder / "target", side.vocab, side.layer_ids, side.steps, side.settings["attention"]
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(indices: list[int]) -> float:
        with torch.autocast(side.device.type, side.dtype, enabled=side.dtype != torch.float32):
            _, loss, metrics = model(
                **rows_of(side.documents.batch(indices)),
                ttt_steps=side.steps,
                ttt_step_loss_decay=DECAY,
                loss_config={"kl_div": (kl_div_loss, 1.0)},  # the default is the same in Triton, for GPUs alone
            )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(metrics["loss_sum"])

    return step


def rows_of(batch: Batch) -> dict[str, Tensor]:
    """A batch as speculators' loader hands it over: in each document g[:-1] beside x[1:], y[1:] and the mask's [1:]."""
    rows: dict[str, list[Tensor]] = {name: [] for name in ("hidden", "ids", "final", "mask", "position", "document")}
    for number, span in enumerate(torch.arange(len(batch.tokens_T)).split(batch.lengths)):
        here, following = span[:-1], span[1:]
        rows["hidden"].append(batch.aux_TA[here].float())
        rows["ids"].append(batch.tokens_T[following])
        rows["final"].append(batch.final_TH[following].float())
        rows["mask"].append(batch.generated_T[following])
        rows["position"].append(torch.arange(1, len(span)))
        rows["document"].append(torch.full((len(here),), number))
    joined = {name: torch.cat(parts)[None] for name, parts in rows.items()}
    return {
        "hidden_states": joined["hidden"],
        "input_ids": joined["ids"],
        "document_ids": joined["document"],
        "loss_mask": joined["mask"],
        "position_ids": joined["position"],
        "verifier_last_hidden_states": joined["final"],
    }


def products(side: Side) -> Step:
    """Plain products of the first batch's shapes; what it returns is their rate."""
    ends, scored, labels = side.counted(side.batches[0])
    wanted = needed_products(side.shape, ends, side.steps, scored, labels)
    return lambda indices: matrix_rate(wanted, side.dtype, side.device)


SIDES: dict[str, Callable[[Side], Step]] = {"eyas": eyas, "speculators": speculators, "products": products}


def peak_mb() -> float:
    """The most memory that this process has held, in MB of 10^6 bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024 / 1e6


def main(argv: list[str]) -> None:
    name, folder, text = argv
    settings = json.loads(text)
    torch.set_num_threads(settings["threads"])
    side = Side(Path(folder), settings)
    step, batches = SIDES[name](side), side.cycle()
    print(json.dumps({"ready": name}), flush=True)
    for line in sys.stdin:
        operations = tokens = 0
        values, seconds = [], 0.0
        for _ in range(int(line)):
            indices = next(batches)
            operations += needed_operations(side.shape, *_arguments(side, indices))
            tokens += side.documents.tokens(indices)
            begun = clock(side.device)
            values.append(step(indices))
            seconds += clock(side.device) - begun
        print(
            json.dumps(
                {"seconds": seconds, "tokens": tokens, "operations": operations, "value": float(np.mean(values))}
            ),
            flush=True,
        )
    peaks = {"peak_rss_mb": peak_mb()}
    if side.device.type == "cuda":
        peaks["peak_gpu_mb"] = torch.cuda.max_memory_allocated(side.device) / 1e6
    print(json.dumps(peaks), flush=True)


def _arguments(side: Side, indices: list[int]) -> tuple[list[int], int, list[int], int]:
    ends, scored, labels = side.counted(indices)
    return ends, side.steps, scored, labels


if __name__ == "__main__":
    main(sys.argv[1:])
