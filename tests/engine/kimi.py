"""The Kimi-K2.5 profiles as a CPU can run them: what is written in them, less what needs a GPU, on the tiny Kimi."""

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

from server.config import Profile
from server.drafters import resolve_drafter
from server.launch import build_launch
from tests.server import resolution
from tests.tiny import TinyPair

# Those that serve: the two that make a drafter's data have none, and are run by the recipe's test in their tiny form.
PROFILES = [file for file in resolution.PROFILES if file not in resolution.DATA]
# Keys that speak of GPUs, their memory and the links between them; [engine.env] has nothing else in these profiles.
OF_A_GPU = (
    *("quantization", "kv_cache_dtype", "page_size", "mem_fraction", "attention_backend", "env", "nodes", "tp"),
    *("max_running_requests", "context_length", "start_timeout_s"),
)
FLAGS_OF_A_GPU = {"--moe-runner-backend": 2, "--disable-custom-all-reduce": 1, "--pre-warm-nccl": 1}  # words of each
# The tiny Kimi has 5 layers. Its drafters were trained on the inputs of layers 2, 3 and 4.
LAYERS = {(2, 30, 58): [2, 3, 4], (3, 31, 59): [0, 3, 4]}


def on_cpu(file: Path, pair: TinyPair, **engine: Any) -> Profile:
    """A profile with its GPU keys overridden, the tiny Kimi as its target, and the tiny drafters in its blocks."""
    raw = file.read_bytes()
    tables = tomllib.loads(raw.decode())
    tables.pop("machine")
    tables["target"]["path"] = str(pair.target)
    tables["engine"] = {key: value for key, value in tables["engine"].items() if key not in OF_A_GPU} | {
        "device": "cpu",
        "dtype": "float32",
        "context_length": 1024,
        "max_running_requests": 8,
        "max_total_tokens": 65536,
        "env": {"OMP_NUM_THREADS": "1"},
        "extra_args": _without_gpu_flags(tables["engine"]["extra_args"]),
        **engine,
    }
    for name, table in tables["drafters"].items():
        if "path" in table:
            table["path"] = str(pair.drafters[f"{'mla' if name.endswith('mla') else 'mha'}_noised_a"])
            table.pop("attention_backend", None)
            for key in ("layer_ids", "override_layer_ids"):
                if key in table:
                    table[key] = LAYERS[tuple(table[key])]
    tables["capture"]["layer_ids"] = LAYERS[tuple(tables["capture"]["layer_ids"])]
    return Profile(source=file, sha256=hashlib.sha256(raw).hexdigest(), **tables)


def _without_gpu_flags(words: list[str]) -> list[str]:
    kept, at = [], 0
    while at < len(words):
        skipped = FLAGS_OF_A_GPU.get(words[at], 0)
        if not skipped:
            kept.append(words[at])
        at += skipped or 1
    return kept


def start_of(profile: Profile, drafter: str) -> str:
    """What would be started, in full: two profiles with the same start need one engine."""
    launch = build_launch(profile, resolve_drafter(profile, drafter), port=1, config_file="k.yaml")
    return json.dumps([launch.argv, launch.environment])
