"""What a profile would start, for a person to read before it does: argv, environment, memory, break-even, warnings.

Needs no GPU, and no model's files: what is publicly known stands in for them (server/models/).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from typing import Any

from drafter.checkpoint.findings import Finding, as_json
from drafter.speedup_cli import DEFAULT_ACCEPTANCE, parse_acceptance
from server.breakeven import ALLREDUCES, IPC, break_even
from server.config import Profile
from server.deployment import Deployment, deployment
from server.drafters import ActiveDrafter, is_local
from server.launch import ALONE, SGLANG_VERSION, Node, build_launch, ngram_obstacle
from server.obstacles import refuse

ENGINE_PORT = 30000  # shown in a plan only: a started engine takes a free port
FIRST_NODE = "FIRST-NODE:20000"  # shown where the command line names none


def make_plan(
    profile: Profile,
    drafter: ActiveDrafter,
    findings: list[Finding],
    forced: Collection[str] = (),
    *,
    node: Node = ALONE,
    context: int | None = None,
    requests: int | None = None,
) -> dict[str, Any]:
    """The plan as JSON-able data: profile, engine, drafter, argv, environment, config_file, expected, memory,
    break_even, warnings.

    `findings` are the preflight's, with the checks that were forced. `context` and `requests` are what to plan for,
    where not the profile's own. Raises LaunchError for what SGLang would refuse, crash on or change without a word.
    """
    known = deployment(profile, drafter, context, requests)
    refuse(known)
    if profile.engine.nodes > 1 and node.first is None:
        node = Node(node.rank, FIRST_NODE)
    launch = build_launch(profile, drafter, port=ENGINE_PORT, config_file="engine.yaml", node=node)
    even = break_even(known)
    return {
        "profile": str(profile.source),
        "profile_sha256": profile.sha256,
        "engine": f"sglang {SGLANG_VERSION}",
        "drafter": {
            "name": drafter.name,
            "algorithm": drafter.algorithm,
            "path": drafter.path,
            "sha256": drafter.sha256,
            "num_steps": drafter.num_steps,
            "topk": drafter.topk,
            "draft_tokens": drafter.draft_tokens,
        },
        "argv": launch.argv,
        "environment": launch.environment,
        "config_file": {"name": "engine.yaml", "mode": "0600", "holds": ["api-key", "admin-api-key"]},
        "expected": launch.expected,
        "memory": memory_of(known),
        "break_even": even,
        "preflight": [as_json(finding, forced) for finding in findings],
        "warnings": [*warnings_of(profile, drafter), *deployment_warnings(known, even), *warned(findings)],
    }


def memory_of(known: Deployment) -> dict[str, Any] | None:
    """One GPU's memory, in bytes and tokens, with the source of what is known; None where the target is not."""
    found = known.budget
    if found is None or known.target is None:
        return None
    return {
        "gpus": known.profile.engine.tp,
        "gpu": found.gpu,
        "mem_fraction": found.static,
        "weights": found.weights,
        "drafter": found.drafter,
        "cache_bytes_per_token": found.cache_per_token,
        "drafter_cache_bytes_per_token": found.drafter_cache_per_token,
        "cache_tokens": found.cache_tokens,
        "asked": {"context": known.context, "requests": known.requests, "tokens": found.asked_tokens},
        "beyond_mem_fraction": found.beyond,
        "sources": {"target": known.target.source, "drafter": known.draft.source if known.draft else None},
    }


def render_plan(plan: dict[str, Any]) -> str:
    """The plan as text: the environment and the command can be pasted into a shell."""
    drafter = plan["drafter"]
    shape = (
        "" if drafter["num_steps"] is None else f" ({drafter['num_steps']}/{drafter['topk']}/{drafter['draft_tokens']})"
    )
    lines = [f"# {plan['profile']}: {plan['engine']}, speculation {drafter['name']}{shape}", ""]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in plan["environment"].items()]
    argv = ["python", *plan["argv"][1:]]
    pairs, at = [" ".join(argv[:3])], 3
    while at < len(argv):
        width = 2 if at + 1 < len(argv) and not argv[at + 1].startswith("--") else 1
        pairs.append(shlex.join(argv[at : at + width]))
        at += width
    lines.append(" \\\n  ".join(pairs))
    lines += ["", "# engine.yaml (0600) holds the api key and the admin key; no key is in argv."]
    lines += [f"# {line}" for line in (*_memory_lines(plan["memory"]), *_break_even_lines(plan["break_even"]))]
    lines += [f"# warning: {warning}" for warning in plan["warnings"]]
    return "\n".join(lines)


def _memory_lines(memory: dict[str, Any] | None) -> list[str]:
    if memory is None:
        return ["memory: nothing is known of the target; name its folder for the arithmetic."]
    gb = 1e9
    parts = ", ".join(f"{name} {size / gb:.2f}" for name, size in memory["weights"].items())
    total, drafter = sum(memory["weights"].values()), memory["drafter"]
    lines = [
        f"memory of each of {memory['gpus']} GPUs, GB of 10^9 bytes:" if memory["gpu"] else "memory, GB of 10^9 bytes:"
    ]
    lines.append(f"  weights  {total / gb:7.2f}   {parts}")
    if drafter is not None:
        lines.append(f"  drafter  {drafter / gb:7.2f}   bf16; its embedding is the target's own")
    each, own = memory["cache_bytes_per_token"], memory["drafter_cache_bytes_per_token"]
    if memory["gpu"] and memory["mem_fraction"]:
        left = memory["mem_fraction"] - total - (drafter or 0)
        lines.append(
            f"  cache    {left / gb:7.2f}   of {memory['mem_fraction'] / gb:.1f} that mem_fraction leaves of "
            f"{memory['gpu'] / gb:.0f}"
        )
    asked, tokens = memory["asked"], memory["cache_tokens"]
    lines.append(f"  a token takes {each:,} bytes of cache on each GPU, and {own:,} for the drafter")
    if tokens is not None:
        lines.append(
            f"  room for {tokens:,} tokens; {asked['requests']} requests of {asked['context']:,} tokens are "
            f"{asked['tokens']:,}"
        )
    lines += [f"  {name}: {source}" for name, source in memory["sources"].items() if source]
    return lines


def _break_even_lines(even: dict[str, Any]) -> list[str]:
    if "unknown" in even:
        return [f"break-even: not predicted, {even['unknown']}."]
    lines = [
        f"break-even acceptance length of {even['steps']} draft steps, on paper (lower bounds of times; `python -m "
        "drafter speedup` holds them against what others measured):"
    ]
    for each in even["allreduces"]:
        lines.append(f"  all-reduce {each['name']}{', as this profile sets it' if each['set'] else ', without that'}")
        lines += [
            f"    {row['requests']:4.0f} at a time of {row['context']:7,.0f} tokens: {row['break_even']:.2f}  (a step "
            f"takes {row['decode_ms']:.1f} ms plain, {row['cycle_ms']:.1f} ms speculating)"
            for row in each["rows"]
        ]
    return lines


def warnings_of(profile: Profile, drafter: ActiveDrafter) -> list[str]:
    engine, warnings = profile.engine, []
    on_gpu = engine.device == "cuda"
    if not is_local(profile.model_path) and not profile.target.revision:
        warnings.append(f"target {profile.model_path} is a hub id without a revision: what it serves can change.")
    if drafter.algorithm == "EAGLE3":
        assert drafter.table and drafter.path
        if drafter.folder is None:
            warnings.append(
                f"drafter {drafter.path} is not on this disk: it was not checked. Download or make it, and name its "
                "folder."
            )
            if "/" in drafter.path and not drafter.table.revision:
                warnings.append(f"drafter {drafter.path} has no revision: what it drafts can change.")
        if not drafter.table.sha256:
            warnings.append(
                f"drafter {drafter.name} is not pinned by its hash: `python -m server plan --profile {profile.source} "
                f"--pin {drafter.name}=DIR` writes it into the profile."
            )
        if on_gpu and drafter.topk and drafter.topk > 1:
            warnings.append(
                "topk above 1 is refused by the default attention backend of B200 (trtllm_mla, page size 32 or 64)."
            )
    if drafter.algorithm == "NGRAM" and on_gpu and drafter.table and drafter.table.ngram.max_bfs_breadth != 1:
        warnings.append(
            "NGRAM drafts a tree by default, which page sizes above 1 refuse: set ngram.max_bfs_breadth = 1 on B200."
        )
    if on_gpu and engine.mem_fraction is None:
        warnings.append(
            "mem_fraction is not set: the drafter's weights and cache count against it (0.85 is used on 8xB200)."
        )
    if not on_gpu:
        warnings.append("device cpu: correctness and acceptance are real, speed says nothing about a GPU.")
    if drafter.algorithm == "NGRAM" and (obstacle := ngram_obstacle(os.environ)):
        warnings.append(f"{obstacle}.")
    inherited = sorted(name for name in os.environ if name.startswith("SGLANG_") and name not in engine.env)
    if inherited:
        warnings.append(
            f"the engine inherits {', '.join(inherited)} from this environment (what fakes acceptance is removed)."
        )
    return warnings


def deployment_warnings(known: Deployment, even: dict[str, Any]) -> list[str]:
    """What would run, and disappoint: memory, the link between the GPUs, load, and what is not known."""
    engine, drafter, found, warnings = known.profile.engine, known.drafter, known.budget, []
    if engine.device == "cuda" and known.profile.machine is None:
        warnings.append('the profile names no machine (machine = "8xb200"): memory and break-even are not told.')
    if found and found.cache_tokens is not None and found.cache_tokens < found.asked_tokens:
        warnings.append(
            f"the cache holds {found.cache_tokens // known.context} of {known.requests} requests of {known.context:,} "
            "tokens: the others wait, or are put back and computed again."
        )
    if found and found.beyond > 1e9:
        warnings.append(
            f"drafter {drafter.name} takes {found.drafter_cache_per_token:,} bytes of cache a token, but SGLang "
            "reserves one "
            f"layer of the target's, {found.counted_per_token - found.cache_per_token:,.0f}: {found.beyond / 1e9:.1f} "
            "GB more than mem_fraction, out of what activations need. Lower mem_fraction, or set max_total_tokens."
        )
    table = drafter.table if drafter.algorithm == "EAGLE3" and drafter.folder is None else None
    if engine.quantization and table and table.quantization is None:
        warnings.append(
            f"drafter {drafter.name} inherits quantization {engine.quantization!r} from the target: set "
            "quantization = "
            '"unquant" in its table for a bf16 drafter.'
        )
    if table and table.override_layer_ids:
        warnings.append(
            f"override_layer_ids replaces the whole eagle_config of drafter {drafter.name}: with its folder on this "
            "disk the rest of it is kept."
        )
    if known.profile.machine and ALLREDUCES.get(known.profile.machine, ("",))[0] == "pcie-ipc":
        if engine.env.get(IPC, "").lower() not in ("1", "true"):
            warnings.append(
                f'without {IPC} = "1" in [engine] env every all-reduce on this PCIe machine goes through NCCL, at 30 '
                "times "
                "the time for a decode step's."
            )
        if (engine.kv_cache_dtype or "auto").startswith("fp8"):
            warnings.append(
                "an fp8 cache was measured slow on RTX PRO 6000 by others (16 against 73 to 90 tokens a second)."
            )
    warnings += _load_warnings(even)
    return warnings


def _load_warnings(even: dict[str, Any]) -> list[str]:
    """Where a drafter that is as good as SGLang's own nightly test asks would lose, on paper."""
    usual = next((each for each in even.get("allreduces", []) if each["set"]), None)
    length, _, steps = DEFAULT_ACCEPTANCE.partition("@")
    reached = 1 + sum(parse_acceptance(DEFAULT_ACCEPTANCE)[: even.get("steps", int(steps))])
    losing = [row for row in usual["rows"] if row["break_even"] > reached] if usual else []
    return [
        f"at {row['requests']:.0f} requests of {row['context']:,.0f} tokens speculation needs an acceptance length of "
        f"{row['break_even']:.2f} on paper, and a drafter with {length} at {steps} steps reaches {reached:.2f}: it "
        "loses there."
        for row in losing[:1]
    ]


def warned(findings: list[Finding]) -> list[str]:
    """What the preflight warns of, and the errors that were forced past, each with its check's name."""
    return [
        f"{'forced past: ' if finding.severity == 'error' else ''}{finding.check}: {finding.sentence}"
        for finding in findings
        if finding.severity != "info"
    ]
