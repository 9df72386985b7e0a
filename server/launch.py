"""What an engine is started with: a profile and a drafter become argv, environment and a private config file.

Also what to expect afterwards: SGLang changes arguments silently, so the resolved ones are compared with these.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter.costs import CostsError, adaptive_steps
from server.capture import CAPTURE_ALGORITHM, CapturePlan, capture_flags
from server.config import Profile, resolve_path
from server.drafters import ActiveDrafter, LaunchError, is_local
from server.enginetable import FAKING_ENVIRONMENT

SGLANG_VERSION = "0.5.23"
# SGLang rewrites --attention-backend to torch_native on a CPU without AMX, which has no EAGLE draft backend; the
# per-phase flags are left alone. CUDA graphs do not exist here. An idle scheduler would spin on one of the few cores.
CPU_FLAGS: tuple[tuple[str, object], ...] = (
    ("--sleep-on-idle", True),
    ("--prefill-attention-backend", "intel_amx"),
    ("--decode-attention-backend", "intel_amx"),
    ("--cuda-graph-backend-decode", "disabled"),
    ("--cuda-graph-backend-prefill", "disabled"),
)
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCH_COMPILE_DISABLE": "1",  # else the first speculative request spends 17 s in inductor
}
CPU_MEM_FRACTION = 0.8
NGRAM_FLAGS = (
    "min_bfs_breadth",
    "max_bfs_breadth",
    "match_type",
    "max_trie_depth",
    "capacity",
    "external_corpus_path",
    "external_sam_budget",
    "external_corpus_max_tokens",
)


@dataclass(frozen=True)
class Node:
    """Which of the profile's nodes this is, from 0, and where the first one listens for the others (HOST:PORT)."""

    rank: int = 0
    first: str | None = None


ALONE = Node()


@dataclass(frozen=True)
class Launch:
    """One engine process. `argv` holds no key; `environment` is what is added to the inherited one.

    `expected` maps names of `/server_info` to the values that the engine must report after its start.
    """

    argv: list[str]
    environment: dict[str, str]
    expected: dict[str, Any]


def build_launch(
    profile: Profile,
    drafter: ActiveDrafter,
    *,
    port: int,
    config_file: str,
    capture: CapturePlan | None = None,
    host: str = "127.0.0.1",
    node: Node = ALONE,
) -> Launch:
    """The engine's command, environment and expectations. Starts nothing, needs no GPU.

    `config_file` will hold the keys; its name must end in `.yaml`. Raises LaunchError for a node that is none of the
    profile's.
    """
    engine, target = profile.engine, profile.target
    on_cpu = engine.device == "cpu"
    local = is_local(profile.model_path)
    check_node(profile, node)
    flags: list[tuple[str, object]] = [
        ("--config", config_file),
        ("--model-path", profile.model_path),
        ("--revision", target.revision),
        ("--served-model-name", target.served_name),
        ("--trust-remote-code", target.trust_remote_code),
        ("--host", host),
        ("--port", port),
        ("--device", engine.device),
        ("--tp", engine.tp if engine.tp > 1 else None),
        ("--nnodes", engine.nodes if engine.nodes > 1 else None),
        ("--node-rank", str(node.rank) if engine.nodes > 1 else None),
        ("--dist-init-addr", node.first),
        ("--dtype", engine.dtype),
        ("--quantization", engine.quantization),
        ("--kv-cache-dtype", engine.kv_cache_dtype),
        ("--context-length", engine.context_length),
        ("--max-running-requests", engine.max_running_requests),
        ("--max-total-tokens", engine.max_total_tokens),
        ("--mem-fraction-static", engine.mem_fraction or (CPU_MEM_FRACTION if on_cpu else None)),
        ("--page-size", engine.page_size),
        ("--attention-backend", engine.attention_backend),
        ("--prefill-attention-backend", engine.prefill_attention_backend),
        ("--decode-attention-backend", engine.decode_attention_backend),
        ("--reasoning-parser", engine.reasoning_parser),
        ("--tool-call-parser", engine.tool_call_parser),
        ("--enable-metrics", True),
    ]
    if on_cpu:
        given = {flag for flag, value in flags if value is not None}
        flags += [(flag, value) for flag, value in CPU_FLAGS if flag not in given]
    flags += _speculation_flags(profile, drafter)
    argv = [sys.executable, "-m", "sglang.launch_server", *_words(flags), *engine.extra_args]
    environment = {**(CPU_ENVIRONMENT if on_cpu else {}), **({"HF_HUB_OFFLINE": "1"} if local else {}), **engine.env}
    expected = _expected(profile, drafter)
    if capture:
        argv += _words(capture_flags(capture))  # last, so that extra_args cannot undo them
        environment["EYAS_CAPTURE_DIR"] = str(capture.folder)
        expected["disable_radix_cache"] = True
        if capture.convention:
            expected["return_aux_hidden_state_layer_ids"] = capture.layer_ids
            expected["aux_hidden_state_capture"] = CAPTURE_ALGORITHM.lower()
    return Launch(argv, environment, expected)


def check_node(profile: Profile, node: Node) -> None:
    """Raises LaunchError where a node is none of the profile's, or does not know where the first one is."""
    nodes = profile.engine.nodes
    if nodes == 1 and (node.rank or node.first):
        raise LaunchError(
            f"profile {profile.source} has one node: leave --node-rank and --dist-init-addr out, or set nodes."
        )
    if nodes > 1 and node.first is None:
        raise LaunchError(
            f"profile {profile.source} has nodes = {nodes}: give --dist-init-addr HOST:PORT, an address of the first "
            f"node that the others reach, and --node-rank 0 to {nodes - 1}, another on each."
        )
    if not 0 <= node.rank < nodes:
        raise LaunchError(f"--node-rank is {node.rank}, but the profile has nodes = {nodes}: 0 to {nodes - 1}.")


def child_environment(
    launch: Launch, inherited: Mapping[str, str], simulate_accept_len: float | None = None
) -> dict[str, str]:
    """The engine's whole environment: inherited, less what fakes acceptance or is ours, plus the launch's.

    `simulate_accept_len` is the only way to a simulated acceptance length (cost measurement: every step accepts that
    many tokens, whatever the drafter says).
    """
    environment = {
        name: value
        for name, value in inherited.items()
        if not FAKING_ENVIRONMENT.match(name) and not name.startswith("EYAS_")
    }
    # The engine's helpers (ninja) live beside its interpreter.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{inherited.get('PATH', os.defpath)}"
    environment.update(launch.environment)
    if simulate_accept_len is not None:
        environment["SGLANG_SIMULATE_ACC_LEN"] = str(simulate_accept_len)
    return environment


def ngram_obstacle(environ: Mapping[str, str]) -> str | None:
    """Why NGRAM cannot start here, or None: SGLang compiles its C++ helper at the first start."""
    compiler = environ.get("CXX", "c++")
    if shutil.which(compiler, path=environ.get("PATH")):
        return None
    return f"NGRAM needs a C++ compiler ({compiler} was not found; Debian: apt-get install g++)"


def _words(flags: list[tuple[str, object]]) -> list[str]:
    words: list[str] = []
    for flag, value in flags:
        if value is True:
            words.append(flag)
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif value not in (None, False):
            words += [flag, str(value)]
    return words


def _speculation_flags(profile: Profile, drafter: ActiveDrafter) -> list[tuple[str, object]]:
    if drafter.algorithm == "NONE":
        return []
    table = drafter.table
    assert table
    flags: list[tuple[str, object]] = [
        ("--speculative-algorithm", drafter.algorithm),
        ("--speculative-num-draft-tokens", drafter.draft_tokens),
    ]
    if drafter.algorithm == "NGRAM":
        return flags + [
            (f"--speculative-ngram-{name.replace('_', '-')}", getattr(table.ngram, name)) for name in NGRAM_FLAGS
        ]
    draft_backend = table.attention_backend or ("intel_amx" if profile.engine.device == "cpu" else None)
    return [
        *flags,
        ("--speculative-draft-model-path", drafter.path),
        ("--speculative-draft-model-revision", table.revision),
        ("--speculative-num-steps", drafter.num_steps),
        ("--speculative-eagle-topk", drafter.topk),
        ("--speculative-draft-attention-backend", draft_backend),
        ("--speculative-draft-model-quantization", table.quantization),
        ("--speculative-adaptive", bool(_adaptive(profile, drafter))),
        ("--speculative-adaptive-config", _adaptive_file(profile, drafter)),
        ("--json-model-override-args", _override(drafter)),
    ]


def _override(drafter: ActiveDrafter) -> str | None:
    """The drafter's `eagle_config` with other layers, for SGLang to put over its config.json.

    SGLang sets the same on the target's config, which has no such key and reads none (utils/hf_transformers/config.py).
    """
    assert drafter.table
    if drafter.table.override_layer_ids is None:
        return None
    own = drafter.folder.config.get("eagle_config") if drafter.folder else None
    ids = {"eagle_aux_hidden_state_layer_ids": drafter.table.override_layer_ids}
    return json.dumps({"eagle_config": {**(own or {"use_aux_hidden_state": True}), **ids}})


def _adaptive(profile: Profile, drafter: ActiveDrafter) -> bool | str:
    """Whether the number of draft steps adapts, or the file by which it does."""
    assert drafter.table
    own = drafter.table.adaptive
    return profile.speculation.adaptive if own is None else own


def _adaptive_file(profile: Profile, drafter: ActiveDrafter) -> str | None:
    """The file of an adaptive drafter that has one. Raises LaunchError where SGLang would refuse it at its start."""
    chosen = _adaptive(profile, drafter)
    if not isinstance(chosen, str):
        return None
    file = resolve_path(chosen, profile.source.parent)
    try:
        steps = adaptive_steps(Path(file))
    except CostsError as error:
        raise LaunchError(f"drafter {drafter.name!r}: {error}") from None
    if drafter.num_steps not in steps:
        raise LaunchError(
            f"drafter {drafter.name!r} has num_steps {drafter.num_steps}, but {file} knows only {steps}: set num_steps "
            "to one of those."
        )
    return file


def _expected(profile: Profile, drafter: ActiveDrafter) -> dict[str, Any]:
    expected: dict[str, Any] = {
        "model_path": profile.model_path,
        "served_model_name": profile.target.served_name,
        "context_length": profile.engine.context_length,
        "max_running_requests": profile.engine.max_running_requests,
        "speculative_algorithm": None if drafter.algorithm == "NONE" else drafter.algorithm,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
    }
    if profile.engine.dtype != "auto":
        expected["dtype"] = profile.engine.dtype
    if drafter.algorithm == "EAGLE3":
        expected |= {
            "speculative_draft_model_path": drafter.path,
            "speculative_num_steps": drafter.num_steps,
            "speculative_eagle_topk": drafter.topk,
            "speculative_num_draft_tokens": drafter.draft_tokens,
            "speculative_adaptive": bool(_adaptive(profile, drafter)),
        }
    elif drafter.algorithm == "NGRAM":
        assert drafter.table
        ngram = drafter.table.ngram
        named = {f"speculative_ngram_{name}": getattr(ngram, name) for name in NGRAM_FLAGS}
        named["speculative_num_draft_tokens"] = drafter.draft_tokens
        expected |= {name: value for name, value in named.items() if value is not None}
    return expected
