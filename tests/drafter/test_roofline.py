"""The roofline: its parts against brute force, its sums against the models' known sizes, its table against rules."""

import itertools
import math
import random

import pytest

from drafter.roofline import (
    AllReduce,
    Kernel,
    PaperError,
    cycle,
    data,
    decode_step,
    distinct_experts,
    machine,
    paper_costs,
    target,
)

KIMI, B200 = "kimi-k2.5-nvfp4", "8xb200"


@pytest.mark.parametrize(("experts", "chosen", "tokens"), [(384, 8, 1), (384, 8, 16), (384, 8, 256), (8, 2, 5)])
def test_distinct_experts_by_drawing_them(experts: int, chosen: int, tokens: int):
    dice = random.Random(tokens)
    drawn = [len({each for _ in range(tokens) for each in dice.sample(range(experts), chosen)}) for _ in range(2000)]
    assert distinct_experts(experts, chosen, tokens) == pytest.approx(sum(drawn) / len(drawn), rel=0.01)


def test_a_kernel_takes_the_longest_of_its_three_times():
    on = machine("8xh200")
    assert on.seconds(Kernel("glue")) == pytest.approx(3e-6)
    assert on.seconds(Kernel("weights", bytes=4.8e9)) == pytest.approx(1e-3)
    assert on.seconds(Kernel("weights", bytes=4.8e9, operations=989e12)) == pytest.approx(1.0)
    assert on.seconds(Kernel("weights", operations=1979e9, math="fp8")) == pytest.approx(1e-3)


def test_an_allreduce_between_before_and_beyond_its_points():
    lines = AllReduce("x", ((1000.0, 10.0), (3000.0, 30.0), (5000.0, 70.0)), None, False, "")
    sizes = (1, 1000, 2000, 3000, 4000, 5000, 6000)
    assert [lines.microseconds(size, 8) for size in sizes] == [10, 10, 20, 30, 50, 70, 90]
    link = AllReduce("y", ((1000.0, 10.0),), 100.0, True, "")  # 100 GB/s are 100,000 bytes a microsecond
    assert link.microseconds(801_000, 8) == pytest.approx(10 + 2 * 7 / 8 * 8)
    assert link.microseconds(801_000, 1) == 0.0


@pytest.mark.parametrize("name", list(data()["allreduces"]))
def test_a_larger_message_never_takes_much_less(name: str):
    """Within what a table of measurements may wobble: 2 %."""
    reduce = machine("8xb200", name).allreduce
    times = [reduce.microseconds(2**power, 8) for power in range(6, 28)]
    assert all(later >= earlier * 0.98 for earlier, later in itertools.pairwise(times))


def parameters(name: str) -> tuple[float, float]:
    """(all, active) parameters of a model in the table, straight from its shape."""
    model = target(name)
    hidden, heads, attention = model.hidden, model.heads, 0.0
    if "mla" in model.table:
        mla = model.mla
        attention += hidden * (mla["q_rank"] + mla["kv_rank"] + mla["rope"])
        attention += heads * (
            mla["q_rank"] * (mla["nope"] + mla["rope"]) + mla["kv_rank"] * (mla["nope"] + mla["value"])
        )
        attention += heads * mla["value"] * hidden
    else:
        gqa = model.gqa
        attention += hidden * gqa["head"] * (heads + 2 * gqa["kv_heads"]) + heads * gqa["head"] * hidden
    both = model.layers * attention + model.dense_layers * 3 * hidden * model.dense_inner + 2 * model.vocab * hidden
    if "moe" not in model.table:
        return both, both
    moe, sparse = model.moe, model.layers - model.dense_layers
    expert = 3 * hidden * moe["inner"]
    both += sparse * (hidden * moe["experts"] + moe["shared"] * expert)
    return both + sparse * moe["experts"] * expert, both + sparse * moe["chosen"] * expert


@pytest.mark.parametrize(
    ("name", "whole", "active"),
    [(KIMI, 1.04e12, 32e9), ("deepseek-r1-fp8", 671e9, 37e9), ("llama-3.1-8b", 8.03e9, 8.03e9)],
)
def test_the_shapes_add_up_to_what_their_makers_say(name: str, whole: float, active: float):
    found = parameters(name)
    assert found[0] == pytest.approx(whole, rel=0.02) and found[1] == pytest.approx(active, rel=0.04)


def test_a_step_reads_every_weight_once():
    """With no floor and a slow memory, the step of a dense model is its bytes over the memory's rate."""
    on = machine("1xh100")
    slow = type(on)(**{**vars(on), "floor_s": 0.0})
    model = target("llama-3.1-8b")
    without_embedding = parameters("llama-3.1-8b")[0] - model.vocab * model.hidden
    assert decode_step(slow, model, 1, 0).total == pytest.approx(1e3 * without_embedding * 2 / 3.35e12, rel=1e-3)


def test_the_cache_is_read_once_however_many_tokens_are_verified():
    on, model, context = machine("8xh200"), target("kimi-k2.5-int4"), 100_000
    more = decode_step(on, model, 4, context).attention
    assert more == pytest.approx(1e3 * 61 * 4 * context * 576 * 2 / 4.8e12, rel=0.01)  # whole on every GPU


def test_the_number_of_allreduces():
    """Two a layer, one for the embedding, and the logits' gathering: with one time for every message, count them."""
    on = machine(B200)
    flat = AllReduce("flat", ((0.0, 1000.0),), 1e12, True, "")
    counted = decode_step(type(on)(**{**vars(on), "allreduce": flat}), target(KIMI), 1, 1024).allreduce
    assert counted == pytest.approx(2 * 61 + 1 + 1, rel=1e-6)


def test_more_steps_and_a_larger_batch_never_take_less():
    for name in data()["machines"]:
        costs = paper_costs(
            machine(name), target("kimi-k2.5-int4"), "kimi-eagle3-mla", (1, 2, 8, 64), (1, 2, 3, 5), 1024
        )
        decode = [costs.decode_ms[batch] for batch in costs.batches]
        assert decode == sorted(decode)
        for batch in costs.batches:
            row = [costs.decode_ms[batch], *(costs.step_ms[batch][steps] for steps in (1, 2, 3, 5))]
            assert row == sorted(row)


def test_a_cheaper_allreduce_is_worth_what_it_saves():
    model = target("kimi-k2.5-int4")
    slow, fast = machine("8xrtx-pro-6000"), machine("8xrtx-pro-6000", "pcie-ipc")
    before, after = decode_step(slow, model, 8, 1024), decode_step(fast, model, 8, 1024)
    assert before.total - after.total == pytest.approx(before.allreduce - after.allreduce)
    assert before.allreduce > 10 * after.allreduce


def test_every_drafter_of_the_table_can_be_counted():
    for name in data()["drafters"]:
        model = target("llama-3.1-8b" if name.startswith("llama") else "kimi-k2.5-int4")
        one, two = (cycle(machine(B200), model, name, 2, steps, 1024).total for steps in (1, 2))
        assert math.isfinite(one) and one < two


def test_unknown_names_are_refused():
    with pytest.raises(PaperError, match=r"machine 'x' is not known, only 8xb200"):
        machine("x")
    with pytest.raises(PaperError, match="allreduce 'x' is not known"):
        machine(B200, "x")
    with pytest.raises(PaperError, match="drafter 'x' is not known"):
        paper_costs(machine(B200), target(KIMI), "x", (1,), (1,), 1.0)


def test_every_constant_has_its_source():
    for kind in ("gpus", "allreduces", "models", "drafters"):
        for name, entry in data()[kind].items():
            assert entry["source"], f"{kind}.{name}"
