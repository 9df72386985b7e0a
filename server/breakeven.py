"""The acceptance length at which speculation pays on a profile's machine, on paper, by the all-reduce that it gets.

Verification reduces num_draft_tokens rows a request where decoding reduces one, so the all-reduce decides on PCIe.
"""

from __future__ import annotations

from typing import Any

from drafter.public_points import CONTEXT
from drafter.roofline import Target, machine, paper_costs, target
from drafter.speedup import Costs
from server.deployment import Deployment
from server.memory import CACHE_BYTES

# Machine: the all-reduce of SGLang's best path there, and the one that is left without it.
ALLREDUCES = {
    "8xb200": ("nvlink5-fused", "nvlink5"),
    "4xgb200": ("nvlink5-fused", "nvlink5"),
    "8xh200": ("nvlink4", "nvlink4-nccl"),
    "8xh100": ("nvlink4", "nvlink4-nccl"),
    "8xrtx-pro-6000": ("pcie-ipc", "pcie-nccl"),
}
IPC = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"
# What turns the best path off (srt/arg_groups/overrides.py, srt/distributed/parallel_state.py of SGLang 0.5.23).
FUSION_OFF = "--enforce-disable-flashinfer-allreduce-fusion"
TURNS_OFF = {"nvlink5-fused": {FUSION_OFF}, "nvlink4": {FUSION_OFF, "--disable-custom-all-reduce"}}


def break_even(deployment: Deployment) -> dict[str, Any]:
    """`{allreduces: [{name, set, source, rows: [{context, requests, break_even, decode_ms, cycle_ms}]}]}`, the
    profile's own all-reduce marked `set`; or `{unknown: REASON}`. Rows are for short requests and for the context
    asked.

    Times are lower bounds and their ratios better than they (`python -m drafter speedup` says how much).
    """
    reason = _unknown(deployment)
    if reason:
        return {"unknown": reason}
    drafter, name = deployment.drafter, deployment.profile.machine
    assert name and drafter.num_steps and deployment.target and deployment.draft
    assert deployment.target.paper and deployment.draft.paper
    model, found = _with_cache(target(deployment.target.paper), deployment.profile.engine.kv_cache_dtype), []
    batches = sorted({1, max(1, deployment.requests // 4), deployment.requests})
    for allreduce in ALLREDUCES[name]:
        on = machine(name, allreduce)
        rows = []
        for context in sorted({CONTEXT, float(deployment.context)}):
            costs = paper_costs(on, model, deployment.draft.paper, batches, [drafter.num_steps], context)
            rows += [_row(costs, context, batch, drafter.num_steps) for batch in batches]
        found.append(
            {
                "name": allreduce,
                "set": allreduce == allreduce_set(deployment),
                "source": on.allreduce.source,
                "rows": rows,
            }
        )
    return {"allreduces": found, "steps": drafter.num_steps}


def allreduce_set(deployment: Deployment) -> str:
    """The all-reduce that the profile's flags and environment get on its machine."""
    name, engine = deployment.profile.machine, deployment.profile.engine
    assert name
    best, plain = ALLREDUCES[name]
    if best == "pcie-ipc":
        return best if engine.env.get(IPC, "").lower() in ("1", "true") else plain
    return plain if TURNS_OFF[best] <= set(engine.extra_args) else best


def _unknown(deployment: Deployment) -> str | None:
    profile, drafter = deployment.profile, deployment.drafter
    if drafter.algorithm == "NONE":
        return "nothing speculates"
    if drafter.algorithm == "NGRAM":
        return "NGRAM drafts on the host, which is not on paper"
    if profile.machine is None:
        return "the profile names no machine"
    if profile.engine.nodes > 1:
        return "nobody's all-reduce between machines was found at these sizes: measure it (bench/accept_len.py)"
    if profile.machine not in ALLREDUCES:
        return f"no all-reduces are known for {profile.machine}"
    if deployment.target is None or deployment.target.paper is None:
        return f"target {profile.model_path} is not on paper (drafter/roofline.toml)"
    if deployment.draft is None or deployment.draft.paper is None:
        return f"drafter {drafter.name} is not on paper (drafter/roofline.toml)"
    if drafter.topk != 1:
        return "a tree is not on paper, only a chain (topk 1)"
    if profile.engine.tp != deployment.gpus:
        return (
            f"{profile.machine} is on paper with all its {deployment.gpus} GPUs, the profile has tp = "
            f"{profile.engine.tp}"
        )
    return None


def _with_cache(model: Target, dtype: str | None) -> Target:
    """The model with a cache number of the profile's own size."""
    return Target(model.name, {**model.table, "bytes": {**model.bytes, "kv": CACHE_BYTES[dtype or "auto"]}})


def _row(costs: Costs, context: float, batch: int, steps: int) -> dict[str, float]:
    return {
        "context": context,
        "requests": batch,
        "break_even": costs.ratio(batch, steps),
        "decode_ms": costs.decode_ms[batch],
        "cycle_ms": costs.step_ms[batch][steps],
    }
