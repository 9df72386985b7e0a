"""The arithmetic of a training step by brute force and by what torch counts, and the command on a tiny shape."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import train_speed
from bench.arithmetic import Shape, matrix_rate, needed_attention, needed_operations, needed_products
from bench.random_shards import SHAPES, make
from bench.train_loop import Side, eyas

SHAPE = Shape(hidden=8, intermediate=12, heads=2, head_dim=4, draft_vocab=16, target_vocab=32)


def brute(ends: list[int], steps: int, scored: list[int], labels: int) -> int:
    """Multiplications and additions, one row after another, with what each direction needs written out."""
    h, d, i, u, aux = 8, 8, 12, 16, 24
    total = 0
    tokens, fused = set(), set()
    for document, end in enumerate(ends):
        for k in range(steps):
            for row in range(end + 1):
                if row + 2 + k > end:
                    continue
                tokens.add((document, row + 1 + k))
                fused.add((document, row))
                states = 2 * (h * 3 * d + d * h + 3 * h * i)
                total += 3 * states  # forward, to the inputs, to the weight
                seen = row + 1 + k
                total += 2 * (2 * 2 * 4 * seen)  # two heads: scores and values, forward
                total += 2 * (4 * 2 * 4 * seen)  # and their four gradients
    total += 2 * len(fused) * 2 * aux * h + 2 * len(tokens) * 2 * h * 3 * d
    total += sum(2 * 2 * m * h * u for m in scored) + 2 * labels * h * u
    return total


@pytest.mark.parametrize("ends", [[9], [1], [0, 5], [7, 3, 12]])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_count_equals_brute_force(ends, steps):
    scored, labels = [5, 3, 2][:steps], 6
    assert needed_operations(SHAPE, ends, steps, scored, labels) == brute(ends, steps, scored, labels)


@pytest.fixture
def side(tmp_path):
    shape = SHAPES["tiny"]
    make(tmp_path, shape, 400, 50)
    settings = {
        "shape": vars(shape), "steps": 3, "device": "cpu", "bf16": False, "batch_tokens": 400, "threads": 1,
    }  # fmt: skip
    return Side(tmp_path, settings)


def test_the_trainer_computes_little_more_than_the_count(side):
    """torch's own counter over one step: nothing that is counted is missing, and little is computed twice."""
    step, indices = eyas(side), side.batches[0]
    with FlopCounterMode(display=False) as counter:
        step(indices)
    ends, scored, labels = side.counted(indices)
    needed = needed_operations(side.shape, ends, 3, scored, labels) - needed_attention(side.shape, ends, 3)
    attention = sum(count for op, count in counter.get_flop_counts()["Global"].items() if "attention" in str(op))
    assert needed <= counter.get_total_flops() - attention < 1.2 * needed
    assert min(scored) > 0.9 * sum(max(0, end - 3) for end in ends)  # the features lean towards the draft vocabulary


def test_the_rate_is_of_all_products():
    products = needed_products(SHAPE, [40], 2, [30, 30], 30)
    assert matrix_rate(products, torch.float32, torch.device("cpu"), repeats=1) > 0


def test_the_command_without_speculators(capsys):
    argv = ["--shape", "tiny", "--alone", "--rounds", "1", "--steps", "1", "--batch-tokens", "200", "--length", "50"]
    assert train_speed.main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens_per_second"] > 0 and 0 < found["matrix_rate_share"] < 1 and found["peak_rss_mb"] > 50
    assert found["runs"] and found["machine"] and found["command"]
    assert "ratio_vs_speculators" not in found


def test_a_side_that_fails_is_named(monkeypatch, capsys):
    monkeypatch.setattr(train_speed, "make", lambda *arguments: None)
    assert train_speed.main(["--shape", "tiny", "--alone"]) == 1
    assert "train_speed: the side products ended with 1" in capsys.readouterr().err


def test_without_its_environment_the_fix_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(train_speed, "SPECULATORS", tmp_path / "python")
    assert train_speed.main(["--shape", "tiny"]) == 1
    assert "make speculators-env" in capsys.readouterr().err
