"""Several processes train as one: torchrun's ranks on gloo against a single process, and what a signal does to them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from drafter.training.ranks import Ranks, join_ranks
from drafter.training.runstate import load_tensors
from drafter.training.train import stopped

REPO = Path(__file__).parents[3]
HOW = ("--ttt-steps", 2, "--batch-tokens", 200, "--held-share", 0.2, "--fp32", "--eval-every", 4, "--threads", 1)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def train(llama, shards, vocab_file, out, *more, ranks=0) -> list[str]:
    """The command, under torchrun where there are ranks."""
    launch = [sys.executable]
    if ranks:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    given = ("--shards", shards, "--target", llama.target, "--vocab", vocab_file, "--out", out)
    return [str(word) for word in (*launch, "-m", "drafter", "train", *given, *HOW, *more)]


def losses(out: Path) -> list[tuple[int, str, float]]:
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [
        (line["global_step"], key, value)
        for line in lines
        for kind in ("train", "val")
        for key, value in line.get(kind, {}).items()
    ]


def run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=REPO, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_two_ranks_give_one_process_losses(tmp_path, llama, shards, vocab_file):
    """A head that begins to learn in mid-run, and gradients in two pieces."""
    more = ("--steps", 12, "--head-from", 0.5)
    run(train(llama, shards, vocab_file, tmp_path / "one", *more))
    run(train(llama, shards, vocab_file, tmp_path / "two", *more, "--accumulate", 2, ranks=2))
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert [each[:2] for each in one] == [each[:2] for each in two]
    assert [each[2] for each in one] == pytest.approx([each[2] for each in two], rel=1e-3, abs=1e-4)
    weights = [load_tensors(tmp_path / name / "checkpoint.safetensors")[0] for name in ("one", "two")]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=2e-2, atol=2e-3, msg=lambda m, n=name: f"{n}: {m}")
    assert (tmp_path / "two" / "drafter" / "model.safetensors").exists()


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_sigterm_saves_and_the_same_command_goes_on(tmp_path, llama, shards, vocab_file, ranks):
    whole, part = (
        train(llama, shards, vocab_file, tmp_path / n, "--steps", 60, ranks=ranks) for n in ("whole", "part")
    )
    run(whole)
    process = subprocess.Popen(part, cwd=REPO, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    log, deadline = tmp_path / "part" / "log.jsonl", time.monotonic() + 120
    while not (log.exists() and '"train"' in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    said = process.communicate()[1]
    assert process.returncode != 0 and ("interrupted" in said) and (ranks or "Traceback" not in said)
    _, facts = load_tensors(tmp_path / "part" / "checkpoint.safetensors")
    assert 0 < facts["progress"]["step"] < 60
    run(part)
    a, b = (load_tensors(tmp_path / name / "checkpoint.safetensors")[0] for name in ("whole", "part"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert losses(tmp_path / "whole") == losses(tmp_path / "part")


def test_a_second_sigterm_lets_the_step_end_and_a_second_ctrl_c_does_not():
    """A job's end reaches a rank twice: from what ends the job, and from torchrun."""
    with stopped() as asked:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert asked.is_set()
    with stopped() as asked:
        signal.raise_signal(signal.SIGINT)
        assert asked.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_parts_of_a_batch_are_all_of_it():
    """By brute force over small batches: every document once, loads as even as one document allows, pieces in step."""
    lengths = [5, 9, 2, 7, 7, 1, 30, 4]
    for documents in ([0], [1, 2], list(range(8)), [6, 5, 4]):
        for world in (1, 2, 3):
            for pieces in (1, 2):
                found = [
                    Ranks(torch.device("cpu"), rank, world, mesh=object()).parts(documents, lengths.__getitem__, pieces)
                    for rank in range(world)
                ]
                assert {len(parts) for parts in found} == {pieces}
                assert sorted(i for parts in found for part in parts for i in part) == sorted(documents)
                loads = [sum(lengths[i] for i in part) for parts in found for part in parts]
                assert max(loads) - min(loads) <= max(lengths[i] for i in documents)


def test_one_process_alone_has_no_empty_piece():
    alone = join_ranks(torch.device("cpu"))
    assert alone.leads and alone.parts([3, 1], lambda index: index, 4) == [[3], [1]]
    assert alone.decided(0.5, True) == [0.5, 1.0] and not alone.any(False)
