"""The verb `train` of python -m drafter. torch is imported when it runs, not before."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields
from pathlib import Path

from drafter.arguments import number, whole
from drafter.training.command import add_command, add_common, torch_of
from drafter.training.defaults import FINETUNE, KIMI_HIDDEN, SCRATCH

TRAIN = """Train an EAGLE-3 drafter on captured hidden states, from scratch or from an existing one.

A run is a folder (--out): log.jsonl, checkpoint.safetensors, and in the end drafter/, which the engine serves. The same
command goes on where a run was stopped. Held-out documents are chosen by a hash of their prompt; metrics are
loss_k, full_acc_k and cond_acc_k for each draft step k, over positions (evaluate walks as an engine does, and is what
to compare with serving). With --steps or --epochs a run that was stopped and resumed gives the same weights, bit for
bit; with --minutes the clock decides. Ctrl-C and SIGTERM end the step, write the checkpoint and exit.

Under torchrun the same command trains on every process together (FSDP2): each takes its part of every batch, so the
losses stay what they were. --out must be a folder that all of them see.
"""
TRAIN_EXAMPLES = """examples:
  python -m drafter train --shards shards --target models/smollm2 --vocab vocab.safetensors --out runs/a --minutes 30
  python -m drafter train --shards shards --target models/smollm2 --from drafters/a --out runs/b --epochs 1
  torchrun --nproc-per-node 8 -m drafter train --device cuda --batch-tokens 16384 --shards shards --target models/k2 ...
"""


def add_train(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `train`; its arguments carry `run`, a function from arguments to an exit code."""
    command = add_command(subparsers, "train", "train a drafter on captured hidden states", TRAIN, TRAIN_EXAMPLES)
    command.set_defaults(run=run_train)
    command.add_argument(
        "--shards",
        type=Path,
        required=True,
        action="append",
        metavar="DIR",
        help="what `capture` wrote; may be given several times, for one target and the same layers",
    )
    command.add_argument("--target", type=Path, required=True, metavar="DIR", help="the target's folder")
    command.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the run's folder; resumes what it holds"
    )
    command.add_argument(
        "--vocab",
        type=Path,
        metavar="FILE",
        help="the draft vocabulary: of a new drafter, or the one that the --from drafter must have already",
    )
    command.add_argument("--from", dest="parent", type=Path, metavar="DIR", help="go on from this drafter folder")
    command.add_argument(
        "--probe",
        type=Path,
        metavar="REPORT",
        help="report.json of bench/accept_len.py with that drafter: before the first step it is walked on the captured "
        "features, and must reach what it was served at",
    )
    command.add_argument(
        "--remapped-from",
        type=Path,
        metavar="DIR",
        help="what the --from drafter was remapped from (default: the folder beside it that its manifest names)",
    )
    command.add_argument("--force", action="store_true", help="go on from a drafter that is nearly always wrong")
    command.add_argument("--name", help="the drafter's name (default: the name of --out)")

    budget = command.add_argument_group("budget (one of them)").add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=number(above=True), help="time to train")
    budget.add_argument("--epochs", type=number(above=True), help="passes over the training documents")
    budget.add_argument("--steps", type=whole(), help="optimiser steps")

    shape = command.add_argument_group("shape of a new drafter (default: the target's, without grouped heads)")
    shape.add_argument(
        "--style",
        choices=("mha", "mla"),
        default="mha",
        help="LlamaForCausalLMEagle3, or latent attention: Eagle3DeepseekV2ForCausalLM (mha)",
    )
    for flag, text in (
        ("heads", "attention heads"),
        ("intermediate", "width of the MLP"),
        ("kv-heads", "mha: key and value heads; need not be the target's"),
        ("head-dim", "mha: width of a head"),
        ("q-lora-rank", "mla: rank of the queries"),
        ("kv-lora-rank", "mla: rank of the latent for keys and values"),
        ("nope-dim", "mla: width of a key's unturned part (qk_nope_head_dim)"),
        ("rope-dim", "mla: width of its turned part (qk_rope_head_dim)"),
        ("value-dim", "mla: width of a value (v_head_dim)"),
    ):
        shape.add_argument(f"--{flag}", type=whole(), metavar="N", help=text)

    how = command.add_argument_group("how to train (defaults: of a new drafter / of one that is trained on)")
    rate, share = number(above=True), number(0, 1)
    new, on = SCRATCH, FINETUNE
    by_width = f"{new.rate:g} / {on.rate:g} at hidden size {KIMI_HIDDEN}, more for a narrower one"
    for flag, kind, text in (
        ("ttt-steps", whole(), f"draft steps to train ({new.ttt_steps} / {on.ttt_steps})"),
        ("lr", rate, f"learning rate of AdamW ({by_width})"),
        ("warmup", number(), f"of the rate: a share of the run, or from 1 on steps ({new.warmup:g} / {on.warmup:g})"),
        ("clip", rate, f"largest norm of the gradients ({new.clip:g} / {on.clip:g})"),
        (
            "head-from",
            share,
            "lm_head learns after this share of the run; 1: never (1 where it is the target's own / 0 elsewhere)",
        ),
        ("head-lr", share, f"its share of the rate then ({new.head_lr:g} / {on.head_lr:g})"),
    ):
        how.add_argument(f"--{flag}", type=kind, metavar="N", help=text)
    for flag, kind, default, text in (
        ("batch-tokens", whole(), 1000, "tokens of an optimiser step; small ones learn faster in a short time"),
        ("min-lr", share, 0.03, "the rate falls by a cosine to this share of itself"),
        ("weight-decay", number(), 0.0, "of AdamW"),
        ("decay", rate, 0.8, "weight of step k in the loss is decay^k"),
        ("user-weight", share, 1.0, "weight in the loss of tokens that were not generated"),
        ("held-share", share, 0.1, "share of prompts held out"),
        ("max-length", whole(), 2048, "documents are cut here"),
        ("eval-every", whole(), 100, "steps between evaluations on the held-out documents"),
        ("eval-documents", whole(), 48, "held-out documents to evaluate on"),
        ("checkpoint-minutes", rate, 5.0, "minutes between checkpoints"),
    ):
        how.add_argument(f"--{flag}", type=kind, default=default, metavar="N", help=f"{text} ({default})")
    how.add_argument(
        "--curriculum",
        action=argparse.BooleanOptionalAction,
        help="draft steps one after another, or all from the start (default: for a new drafter alone)",
    )
    how.add_argument(
        "--patience", type=whole(0), default=0, metavar="N", help="stop after N evaluations without gain (0: never)"
    )
    how.add_argument(
        "--accumulate",
        type=whole(),
        default=1,
        metavar="N",
        help="take a rank's part of a batch in N pieces, for less memory (1)",
    )
    how.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to compute (cpu)")
    how.add_argument(
        "--memory-cap",
        type=number(above=True),
        metavar="GB",
        help="refuse a run that would take more on a rank (default: what is free)",
    )
    how.add_argument("--tensorboard", type=Path, metavar="DIR", help="write the curves for TensorBoard too")
    how.add_argument("--seed", type=whole(0), default=0, metavar="N", help="order of documents and first weights (0)")
    precision = how.add_mutually_exclusive_group()
    precision.add_argument("--bf16", action="store_true", help="products in bf16, weights in fp32")
    precision.add_argument("--fp32", action="store_true", help="products in fp32 (default: the machine's faster one)")
    how.add_argument("--export-fp32", action="store_true", help="write the drafter in fp32 (default: bf16)")
    add_common(command)


def run_train(arguments: argparse.Namespace) -> int:
    """Train, and export the best evaluation. Raises ValueError with a sentence for what a person must change."""
    from drafter.checkpoint.folder import open_folder
    from drafter.checkpoint.manifest import Manifest
    from drafter.checkpoint.preflight import read_folder
    from drafter.checkpoint.vocab import DraftVocab
    from drafter.data.shards import join_shards, open_shards
    from drafter.report import write_text
    from drafter.training.compatible import check_drafter, check_shards, differences
    from drafter.training.device import bf16_is_fast, keep_memory
    from drafter.training.documents import Documents
    from drafter.training.errors import TrainingError
    from drafter.training.estimate import estimate
    from drafter.training.export import export, origin
    from drafter.training.finetune import check_before, check_teacher, check_vocab
    from drafter.training.initial import fit_fc, has_own_head, new_drafter
    from drafter.training.model import load_drafter
    from drafter.training.ranks import join_ranks, leave_ranks
    from drafter.training.shape import Shape, drafter_config
    from drafter.training.target import load_target
    from drafter.training.train import Options, Run, check_warm_start

    torch = torch_of(arguments)
    a = arguments
    keep_memory()
    ranks = join_ranks(torch.device(a.device))
    folder: Path = a.out / "drafter"
    if folder.exists():
        raise TrainingError(f"{a.out} holds a finished run, {folder}: name another --out.")
    shards, target = join_shards([open_shards(path) for path in a.shards]), load_target(a.target)
    check_shards(shards, target)
    shape = Shape(**{field.name: getattr(a, field.name) for field in fields(Shape)})
    _check_start(a, shape.given())
    parent = open_folder(a.parent) if a.parent else None
    if a.parent:
        check_drafter(a.parent, shards)
        config = read_folder(a.parent).config
    else:
        vocab = DraftVocab.load(a.vocab)
        if vocab.target_vocab_size != len(target.embed_VH):
            raise TrainingError(
                f"{a.vocab} is over a target vocabulary of {vocab.target_vocab_size:,}, {a.target} has "
                f"{len(target.embed_VH):,}: build it for this target."
            )
        config = drafter_config(target, shards.manifest["layer_ids"], vocab, shape)
    defaults = FINETUNE if a.parent else SCRATCH
    bf16 = a.bf16 or (not a.fp32 and bf16_is_fast(ranks.device))
    sizes = {key: getattr(a, key) for key in ("batch_tokens", "max_length", "accumulate")}
    needs = estimate(config, shards, ranks, bf16=bf16, ttt_steps=a.ttt_steps or defaults.ttt_steps, **sizes)
    needs.check(ranks, a.memory_cap, a.out)
    ranks.say(needs.sentence())
    if a.parent:
        model = load_drafter(a.parent, target.embed_VH)
        if a.vocab:
            check_vocab(model.vocab, a.parent, a.vocab, a.target)
    else:
        model = new_drafter(config, vocab, target, a.seed)
    documents = Documents(shards, target, a.held_share, a.max_length, a.out, ranks)
    fresh = not (a.out / "checkpoint.safetensors").exists()
    before = a.out / "before.json"  # what a run that is resumed knows no more
    if fresh:
        check_teacher(documents, target)
    if fresh and parent and ranks.leads:
        for line in differences(model.config, target):
            ranks.say(f"{a.parent} keeps its own {line}")
        checked = check_before(parent, model, documents, shards, target, a.probe, a.remapped_from)
        ranks.say(checked.sentence())
        write_text(before, json.dumps(asdict(checked)))
    if fresh and not a.parent:
        fitted = fit_fc(model, documents, a.seed)
        ranks.say(f"fc fitted to the target's final states: R2 {fitted:.3f} on held-out documents")
    options = Options(
        steps=a.steps,
        epochs=a.epochs,
        minutes=a.minutes,
        curriculum=not a.parent if a.curriculum is None else a.curriculum,
        batch_tokens=a.batch_tokens,
        min_lr=a.min_lr,
        weight_decay=a.weight_decay,
        decay=a.decay,
        user_weight=a.user_weight,
        bf16=bf16,
        seed=a.seed,
        eval_every=a.eval_every,
        eval_documents=a.eval_documents,
        patience=a.patience,
        accumulate=a.accumulate,
        checkpoint_minutes=a.checkpoint_minutes,
        **defaults.options(model.config["hidden_size"], has_own_head(model, target), vars(a)),
    )
    identity = {
        "data_hash": shards.data_hash,
        "vocab_hash": model.vocab.hash,
        "target": shards.manifest["target"],
        "parent": str(a.parent) if a.parent else None,
        "parent_sha256": parent.sha256 if parent else None,
        "held_share": a.held_share,
        "max_length": a.max_length,
    }
    run = Run(model, documents, target, options, a.out, identity, ranks, a.tensorboard)
    first = run.start()
    if a.parent and fresh:
        check_warm_start(first, a.parent, a.force)
    run.train()
    leave_ranks()
    if not ranks.leads:
        return 0

    best = {"accept_len_positions": run.progress.best, "step": run.progress.best_step}
    training = {
        "options": run.identity,
        "steps": run.progress.step,
        "tokens": run.progress.tokens,
        "seconds": round(run.seconds(), 3),
        "first": first,
        **({"before": json.loads(before.read_bytes())} if parent else {}),
        "best": best,
        "curve": run.curve(),
    }
    manifest = Manifest(
        name=a.name or a.out.name,
        vocab_hash=model.vocab.hash,
        target=shards.manifest["target"],
        capture={key: shards.manifest[key] for key in ("layer_ids", "convention")},
        origin=origin(parent, shards.data_hash),
        training=training,
    )
    export(folder, model, run.best_weights(), manifest, torch.float32 if a.export_fp32 else torch.bfloat16)
    if a.json:
        print(json.dumps({"drafter": str(folder), **training}))
    else:
        print(f"{folder}: accept_len_positions {best['accept_len_positions']:.3f} at step {best['step']}")
    return 0


def _check_start(a: argparse.Namespace, shape: list[str]) -> None:
    """Raises TrainingError for arguments that do not go together; `shape` are the flags of a shape that were given."""
    from drafter.training.errors import TrainingError

    if not a.parent and not a.vocab:
        raise TrainingError("give --vocab FILE for a new drafter, or --from DIR to go on from one.")
    if a.parent and shape:
        raise TrainingError(f"{', '.join(shape)}: {a.parent} has its own shape, which stays: leave it out.")
    alone = [flag for flag, value in (("--probe", a.probe), ("--remapped-from", a.remapped_from)) if value]
    if alone and not a.parent:
        raise TrainingError(f"{', '.join(alone)}: of a drafter that is trained on, and there is none: add --from.")
