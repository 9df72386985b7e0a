"""What a decode step and a speculative cycle cost on paper, kernel by kernel, for a machine that we do not have.

A kernel takes the longest of its least time, its bytes over the memory's rate and its operations over the tensor
cores'; the kernels of a step run one after another, and so do its all-reduces. Tokens choose their experts evenly and
independently; host work is hidden behind the GPU's. So a time on paper is a lower bound. Constants: roofline.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from drafter.speedup import Costs

DATA = Path(__file__).with_name("roofline.toml")
GLUE_AFTER_HEAD = 3  # embedding lookup, last norm, sampling or verification
ACTIVATION_BYTES = 2  # bf16, all-reduces included


class PaperError(ValueError):
    """A machine, model or drafter that the table does not have."""


@dataclass(frozen=True)
class StepTime:
    """Where the time of a step goes, in milliseconds."""

    experts: float = 0.0
    weights: float = 0.0
    attention: float = 0.0
    glue: float = 0.0
    allreduce: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))

    def __add__(self, other: StepTime) -> StepTime:
        return StepTime(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __mul__(self, count: int) -> StepTime:
        return StepTime(**{f.name: getattr(self, f.name) * count for f in fields(self)})


@dataclass(frozen=True)
class Kernel:
    """One kernel on one GPU: `part` is the field of StepTime that it counts towards."""

    part: str
    bytes: float = 0.0
    operations: float = 0.0
    math: str = "bf16"


GLUE = Kernel("glue")  # a norm, a rotation, an activation, a choice of experts: nothing to speak of but a launch


@dataclass(frozen=True)
class AllReduce:
    """Time of an all-reduce by message size. See roofline.toml."""

    name: str
    points: tuple[tuple[float, float], ...]
    gb_s: float | None
    fused: bool
    source: str

    def microseconds(self, size: float, gpus: int) -> float:
        """size: bytes that every GPU contributes."""
        if gpus == 1:
            return 0.0
        first, last = self.points[0], self.points[-1]
        if size <= first[0]:
            return first[1]
        if size >= last[0]:
            beyond = size - last[0]
            if self.gb_s is not None:
                return last[1] + 2 * (gpus - 1) / gpus * beyond / (self.gb_s * 1e3)
            before = self.points[-2]
            return last[1] + beyond * (last[1] - before[1]) / (last[0] - before[0])
        for left, right in zip(self.points, self.points[1:], strict=False):
            if size <= right[0]:
                return left[1] + (size - left[0]) * (right[1] - left[1]) / (right[0] - left[0])
        raise AssertionError("unreachable")


@dataclass(frozen=True)
class Machine:
    """Some GPUs, tensor-parallel, and what joins them."""

    name: str
    gpus: int
    bytes_s: float
    operations_s: Mapping[str, float]
    allreduce: AllReduce
    floor_s: float
    source: str

    def seconds(self, kernel: Kernel) -> float:
        slowest = max(kernel.bytes / self.bytes_s, kernel.operations / self.operations_s.get(kernel.math, 1e30))
        return max(self.floor_s, slowest)


@dataclass(frozen=True)
class Target:
    """The target's shape. `table` is its entry in roofline.toml."""

    name: str
    table: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.table[name]
        except KeyError:
            raise AttributeError(name) from None


@cache
def data() -> dict[str, Any]:
    """roofline.toml."""
    return tomllib.loads(DATA.read_text("utf-8"))


def fits(model: Target, drafter: str) -> None:
    """Raise PaperError where a drafter was not made for such a target: it takes the shape of its layers."""
    entry = _entry("drafters", drafter)
    needed = "moe" if entry["kind"] == "mtp" else {"mla": "mla", "gqa": "gqa"}.get(entry["attention"])
    if needed is not None and needed not in model.table:
        able = ", ".join(name for name, table in data()["models"].items() if needed in table)
        raise PaperError(f"drafter {drafter!r} does not fit {model.name}: it is for {able}.")


def _entry(kind: str, name: str) -> dict[str, Any]:
    table = data()[kind]
    if name not in table:
        raise PaperError(f"{kind.removesuffix('s')} {name!r} is not known, only {', '.join(table)}: see {DATA.name}.")
    entry: dict[str, Any] = table[name]
    return entry


def machine(name: str, allreduce: str | None = None) -> Machine:
    """A machine of the table, with its own all-reduce or another. Raises PaperError."""
    entry = _entry("machines", name)
    gpu = _entry("gpus", entry["gpu"])
    named = allreduce or entry["allreduce"]
    reduce = _entry("allreduces", named)
    return Machine(
        name=name,
        gpus=entry["gpus"],
        bytes_s=gpu["memory_tb_s"] * 1e12,
        operations_s={kind: rate * 1e12 for kind, rate in gpu["tflops"].items()},
        allreduce=AllReduce(
            named,
            tuple((float(size), float(time)) for size, time in reduce["points"]),
            reduce.get("gb_s"),
            reduce["fused"],
            reduce["source"],
        ),
        floor_s=data()["kernel_floor_us"] * 1e-6,
        source=gpu["source"],
    )


def gpu_of(machine: str) -> Mapping[str, Any]:
    """The entry of a machine's GPU: memory_gb, compute and the rest. Raises PaperError."""
    return _entry("gpus", _entry("machines", machine)["gpu"])


def target(name: str) -> Target:
    """A model of the table. Raises PaperError."""
    return Target(name, _entry("models", name))


def distinct_experts(experts: int, chosen: int, tokens: float) -> float:
    """Expected number of experts touched by `tokens` tokens, each of which chooses `chosen` evenly, independently."""
    return float(experts * (1 - (1 - chosen / experts) ** tokens))


def decode_step(on: Machine, model: Target, batch: int, context: float) -> StepTime:
    """One token for each of `batch` requests that hold `context` tokens."""
    return _forward(on, model, batch, batch, context)


def cycle(on: Machine, model: Target, drafter: str, batch: int, steps: int, context: float) -> StepTime:
    """`steps` draft passes, then the target over steps + 1 tokens of each request."""
    drafting = StepTime()
    for place in range(steps):
        # The first pass reads what the last verification accepted, padded to all it could have.
        tokens = batch * (steps + 1) if place == 0 else batch
        drafting += _draft_pass(on, model, drafter, batch, tokens, context, joins=place == 0)
    return _forward(on, model, batch, batch * (steps + 1), context) + drafting


def paper_costs(
    on: Machine, model: Target, drafter: str, batches: Sequence[int], steps: Sequence[int], context: float
) -> Costs:
    """The costs of every batch size and number of draft steps."""
    _entry("drafters", drafter)
    return Costs(
        decode_ms={batch: decode_step(on, model, batch, context).total for batch in batches},
        step_ms={batch: {k: cycle(on, model, drafter, batch, k, context).total for k in steps} for batch in batches},
        source=f"on paper: {model.name} on {on.name}, {on.allreduce.name}, {drafter}, {context:g} tokens of context",
    )


def _forward(on: Machine, model: Target, batch: int, tokens: int, context: float) -> StepTime:
    """The target over `tokens` tokens of `batch` requests, logits of them all."""
    time: StepTime = _layer(on, model, batch, tokens, context, dense=True) * model.dense_layers
    if model.layers > model.dense_layers:
        time += _layer(on, model, batch, tokens, context, dense=False) * (model.layers - model.dense_layers)
    time += _times(on, [GLUE] * GLUE_AFTER_HEAD)
    time += _head(on, model.hidden, model.vocab, tokens, model.bytes["head"], model.math["head"])
    time += _reduced(on, tokens * model.hidden)  # the embedding is spread over the GPUs as well
    return time


def _layer(on: Machine, model: Target, batch: int, tokens: int, context: float, dense: bool) -> StepTime:
    attention = _mla if "mla" in model.table else _gqa
    stored, math = model.bytes["attention"], model.math["attention"]
    kernels = attention(on, model, batch, tokens, context, model.hidden, stored, math)
    if dense:
        kernels += _mlp(on, "dense", "weights", model, model.dense_inner, tokens)
    else:
        kernels += _experts(on, model, tokens)
    time = _times(on, kernels)
    for _ in range(2):
        time += _reduced(on, tokens * model.hidden)
        if on.gpus == 1 or not on.allreduce.fused:
            time += _times(on, [GLUE])  # residual and norm
    return time


def _draft_pass(
    on: Machine, model: Target, drafter: str, batch: int, tokens: int, context: float, joins: bool
) -> StepTime:
    """One pass of the drafter; `joins`: it takes up the target's hidden states first."""
    entry = _entry("drafters", drafter)
    if entry["kind"] == "mtp":
        join = Kernel("weights", 2 * model.hidden**2 * 2, 2 * tokens * 2 * model.hidden**2)
        time = _layer(on, model, batch, tokens, context, dense=False) + _times(on, [GLUE, GLUE, join])
        return time + _head(on, model.hidden, model.vocab, batch, model.bytes["head"], "bf16")
    hidden, gpus = model.hidden, on.gpus
    kernels = [GLUE, GLUE]  # the norms of the embedding and of the hidden state
    if joins:
        size = entry["aux"] * hidden * hidden
        kernels.append(Kernel("weights", size * 2, 2 * tokens * size))
    if entry["attention"] == "mla":
        kernels += _mla(on, model, batch, tokens, context, 2 * hidden, 2, "bf16")
    else:
        heads = entry.get("heads", model.heads)
        shape = {"kv_heads": heads, "head": entry["head"]} if entry["attention"] == "mha" else model.gqa
        like = Target(drafter, {**model.table, "heads": heads, "gqa": shape})
        kernels += _gqa(on, like, batch, tokens, context, 2 * hidden, 2, "bf16")
    inner = entry["inner"]
    kernels += [_matrix("weights", tokens, hidden, 2 * inner / gpus, 2, "bf16"), GLUE]
    kernels.append(_matrix("weights", tokens, inner / gpus, hidden, 2, "bf16"))
    kernels += [GLUE] * 3  # two norms with their residuals, the choice of a token
    time = _times(on, kernels)
    for _ in range(3):  # embedding, attention, MLP
        time += _reduced(on, tokens * hidden)
    return time + _head(on, hidden, entry["vocab"], batch, 2, "bf16")


def _mla(
    on: Machine, model: Target, batch: int, tokens: int, context: float, width: int, stored: float, math: str
) -> list[Kernel]:
    """Multi-head latent attention, weights absorbed; its input projections and its cache are whole on every GPU."""
    shape, heads = model.mla, model.heads / on.gpus
    latent = shape["kv_rank"] + shape["rope"]
    return [
        _matrix("weights", tokens, width, shape["q_rank"] + latent, stored, math),
        GLUE,  # norms of the two ranks
        _matrix("weights", tokens, shape["q_rank"], heads * (shape["nope"] + shape["rope"]), stored, math),
        _matrix("weights", tokens, shape["nope"], heads * shape["kv_rank"], stored, math),
        GLUE,  # rotation, and writing the cache
        Kernel(
            "attention",
            batch * context * latent * model.bytes["kv"],
            2 * tokens * context * heads * (latent + shape["kv_rank"]),
        ),
        _matrix("weights", tokens, shape["kv_rank"], heads * shape["value"], stored, math),
        _matrix("weights", tokens, heads * shape["value"], model.hidden, stored, math),
    ]


def _gqa(
    on: Machine, model: Target, batch: int, tokens: int, context: float, width: int, stored: float, math: str
) -> list[Kernel]:
    """Grouped-query attention, heads and cache spread over the GPUs."""
    shape, heads = model.gqa, model.heads / on.gpus
    size, kv_heads = shape["head"], max(1.0, shape["kv_heads"] / on.gpus)
    return [
        _matrix("weights", tokens, width, (heads + 2 * kv_heads) * size, stored, math),
        GLUE,  # rotation, and writing the cache
        Kernel(
            "attention", batch * context * 2 * kv_heads * size * model.bytes["kv"], 4 * tokens * context * heads * size
        ),
        _matrix("weights", tokens, heads * size, model.hidden, stored, math),
    ]


def _experts(on: Machine, model: Target, tokens: int) -> list[Kernel]:
    """Router, routed experts (each cut over all GPUs) and the shared expert."""
    moe, hidden = model.moe, model.hidden
    touched = distinct_experts(moe["experts"], moe["chosen"], tokens)
    inner = moe["inner"] / on.gpus

    def grouped(rows: float, columns: float) -> Kernel:
        size = rows * columns
        return Kernel(
            "experts",
            touched * size * model.bytes["experts"],
            2 * tokens * moe["chosen"] * size,
            model.math["experts"],
        )

    return [
        _matrix("weights", tokens, hidden, moe["experts"], ACTIVATION_BYTES, "bf16"),
        GLUE,  # the choice of experts
        grouped(hidden, 2 * inner),
        GLUE,  # activation
        grouped(inner, hidden),
        GLUE,  # weighted sum
        *_mlp(on, "shared", "weights", model, moe["shared"] * moe["inner"], tokens),
    ]


def _mlp(on: Machine, kind: str, part: str, model: Target, inner: int, tokens: int) -> list[Kernel]:
    stored, math = model.bytes[kind], model.math[kind]
    cut = inner / on.gpus
    return [
        _matrix(part, tokens, model.hidden, 2 * cut, stored, math),
        GLUE,  # activation
        _matrix(part, tokens, cut, model.hidden, stored, math),
    ]


def _head(on: Machine, hidden: int, vocab: int, tokens: int, stored: float, math: str) -> StepTime:
    """The output matrix, cut by vocabulary, and the gathering of the logits: half an all-reduce of them."""
    time = _times(on, [_matrix("weights", tokens, hidden, vocab / on.gpus, stored, math)])
    gathered = on.allreduce.microseconds(tokens * vocab * ACTIVATION_BYTES / 2, on.gpus) / 1e3
    return time + StepTime(allreduce=gathered)


def _matrix(part: str, tokens: int, rows: float, columns: float, stored: float, math: str) -> Kernel:
    return Kernel(part, rows * columns * stored, 2 * tokens * rows * columns, math)


def _reduced(on: Machine, numbers: int) -> StepTime:
    return StepTime(allreduce=on.allreduce.microseconds(numbers * ACTIVATION_BYTES, on.gpus) / 1e3)


def _times(on: Machine, kernels: Iterable[Kernel]) -> StepTime:
    spent: dict[str, float] = {}
    for kernel in kernels:
        spent[kernel.part] = spent.get(kernel.part, 0.0) + 1e3 * on.seconds(kernel)
    return StepTime(**spent)
