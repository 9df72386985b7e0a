"""What a profile would start, for a person to read before it does: argv, environment, warnings. Needs no GPU."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from typing import Any

from drafter.checkpoint.findings import Finding, as_json
from server.config import Profile
from server.launch import SGLANG_VERSION, ActiveDrafter, build_launch, is_local, ngram_obstacle

ENGINE_PORT = 30000  # shown in a plan only: a started engine takes a free port


def make_plan(
    profile: Profile, drafter: ActiveDrafter, findings: list[Finding], forced: Collection[str] = ()
) -> dict[str, Any]:
    """The plan as JSON-able data: profile, engine, drafter, argv, environment, config_file, expected, warnings.

    `findings` are the preflight's, with the checks that were forced.
    """
    launch = build_launch(profile, drafter, port=ENGINE_PORT, config_file="engine.yaml")
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
        "preflight": [as_json(finding, forced) for finding in findings],
        "warnings": [*warnings_of(profile, drafter), *warned(findings)],
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
    lines += [f"# warning: {warning}" for warning in plan["warnings"]]
    return "\n".join(lines)


def warnings_of(profile: Profile, drafter: ActiveDrafter) -> list[str]:
    engine, warnings = profile.engine, []
    on_gpu = engine.device == "cuda"
    if not is_local(profile.model_path) and not profile.target.revision:
        warnings.append(f"target {profile.model_path} is a hub id without a revision: what it serves can change.")
    if drafter.algorithm == "EAGLE3":
        assert drafter.table and drafter.path
        if drafter.folder is None:
            warnings.append(
                f"drafter {drafter.path} is not on this disk: it was not checked. Download it and name its folder."
            )
            if not drafter.table.revision:
                warnings.append(f"drafter {drafter.path} has no revision: what it drafts can change.")
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


def warned(findings: list[Finding]) -> list[str]:
    """What the preflight warns of, and the errors that were forced past, each with its check's name."""
    return [
        f"{'forced past: ' if finding.severity == 'error' else ''}{finding.check}: {finding.sentence}"
        for finding in findings
        if finding.severity != "info"
    ]
