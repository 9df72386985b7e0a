"""kill -9 at any moment of training and export: the same command goes on, and the drafter is the same bit for bit."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drafter.__main__ import main
from drafter.checkpoint.folder import open_folder
from drafter.training.runstate import load_tensors


def in_a_child(work: Callable[[], int]) -> int:
    """A forked process, so that nothing has to be imported anew; its id."""
    child = os.fork()
    if child:
        return child
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        os._exit(work())
    finally:
        os._exit(99)


def run_killed_after(work: Callable[[], int], seconds: float) -> int | None:
    """The exit code, or None where it was killed first."""
    child, deadline = in_a_child(work), time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def whole_files(run: Path) -> None:
    """Whatever is there by its own name is whole."""
    for name in ("checkpoint.safetensors", "best.safetensors"):
        if (run / name).exists():
            load_tensors(run / name)
    if (run / "drafter").exists():
        open_folder(run / "drafter")


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_a_killed_run_ends_in_the_same_drafter(tmp_path, llama, shards, vocab_file, kills):
    def train(out: Path) -> Callable[[], int]:
        given = ("--shards", shards, "--target", llama.target, "--vocab", vocab_file, "--out", out, "--steps", 24)
        how = ("--ttt-steps", 2, "--batch-tokens", 200, "--held-share", 0.2, "--fp32", "--eval-every", 4)
        saves = ("--checkpoint-minutes", 1e-6, "--name", "a", "--threads", 1)  # a checkpoint after every step
        return lambda: main(["train", *map(str, (*given, *how, *saves))])

    begun = time.monotonic()
    assert run_killed_after(train(tmp_path / "whole"), 300) == 0
    takes = time.monotonic() - begun
    moments, killed, code = random.Random(6), 0, None
    while code is None:
        # later starts have less left to do, and may be faster than the first; the last one is left alone
        code = run_killed_after(train(tmp_path / "part"), moments.uniform(0, takes / 2) if killed < kills else 300)
        killed += code is None
        whole_files(tmp_path / "part")
    assert code == 0 and killed > 0

    a, b = (load_tensors(tmp_path / name / "checkpoint.safetensors") for name in ("whole", "part"))
    assert a[0].keys() == b[0].keys() and all(torch.equal(a[0][name], b[0][name]) for name in a[0])
    times = {"seconds": 0}
    assert a[1]["progress"] | times == b[1]["progress"] | times
    weights = [(tmp_path / name / "drafter" / "model.safetensors").read_bytes() for name in ("whole", "part")]
    assert weights[0] == weights[1]
    assert not list((tmp_path / "part").glob(".*.tmp"))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_an_export_that_is_killed_is_not_there(tmp_path, llama, share, monkeypatch):
    """Killed while it writes: after so much of the weights' file, and whatever comes after it."""
    from drafter.checkpoint.manifest import Manifest
    from drafter.training.export import export
    from drafter.training.model import load_drafter
    from drafter.training.target import load_target

    parent = llama.drafters["mha_perfect"]
    model = load_drafter(parent, load_target(llama.target).embed_VH)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    manifest = Manifest(name="a", vocab_hash=model.vocab.hash, target={}, capture={}, origin={}, training={})
    limit = int(share * sum(2 * x.numel() for x in weights.values()))

    def work() -> int:
        import drafter.checkpoint.manifest as writing

        before = writing.write_parts

        def cut(file: Path, parts: list, metadata: dict) -> str:
            if limit == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            written, counted = 0, []
            for part in parts:
                written += part.nbytes
                counted.append(part)
                if written > limit:
                    before(file, counted, metadata)
                    os.kill(os.getpid(), signal.SIGKILL)
            return before(file, parts, metadata)

        monkeypatch.setattr(writing, "write_parts", cut)
        export(tmp_path / "drafter", model, weights, manifest)
        return 0

    assert run_killed_after(work, 60) == -signal.SIGKILL
    assert not (tmp_path / "drafter").exists()
    export(tmp_path / "drafter", model, weights, manifest)
    assert open_folder(tmp_path / "drafter")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter"]
