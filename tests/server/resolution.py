"""What SGLang's own argument code makes of a GPU profile, on a machine without a GPU. No weights, no tokenizer.

`python -m tests.server.resolution` writes the golden files of test_kimi_profiles.py anew, and shows what changed: run
it after a change of a profile or of SGLang's version, read the difference, and commit it.
"""

import difflib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from drafter.roofline import gpu_of
from server.capture import plan_capture
from server.config import Profile, load_profile
from server.drafters import ActiveDrafter, resolve_drafter
from server.known import find
from server.launch import Launch, Node, build_launch

REPO = Path(__file__).parents[2]
PROFILES = sorted((REPO / "deploy/profiles").glob("kimi-*.toml"))
DATA = [file for file in PROFILES if "-generate-" in file.name or "-capture-" in file.name]  # these serve no drafter
GOLDEN = Path(__file__).with_name("golden")
RENEW = "python -m tests.server.resolution"
# The flags of runtime_context.override_platform that make SGLang choose as on such a GPU.
PLATFORMS = {
    90: {"is_cuda": True, "is_sm90": True, "is_hopper_with_cuda_12_3": True},
    100: {"is_cuda": True, "is_sm100": True, "is_blackwell": True},
    120: {"is_cuda": True, "is_sm120": True, "is_blackwell": True},
}
# Nothing in here depends on the machine that resolves: no path, no port, nothing sized by a GPU's memory.
NAMES = [
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "moe_runner_backend",
    "quantization",
    "dtype",
    "kv_cache_dtype",
    "page_size",
    "tp_size",
    "nnodes",
    "node_rank",
    "context_length",
    "max_running_requests",
    "mem_fraction_static",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_adaptive",
    "speculative_draft_attention_backend",
    "speculative_draft_model_quantization",
    "speculative_attention_mode",
    "speculative_use_rejection_sampling",
    "speculative_accept_threshold_single",
    "speculative_ngram_max_bfs_breadth",
    "json_model_override_args",
    "flashinfer_allreduce_fusion_backend",
    "disable_custom_all_reduce",
    "enable_mixed_chunk",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "aux_hidden_state_capture",
    "return_aux_hidden_state_layer_ids",
    "cuda_graph_backend_prefill",
    "served_model_name",
    "reasoning_parser",
    "tool_call_parser",
    "trust_remote_code",
    "enable_metrics",
]
# Runs in a process of its own: SGLang's platform and plugins are process-wide. Reads {case: {argv, platform}}.
RESOLVE = """
import json, sys
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import prepare_server_args
names = sys.argv[1].split()
found = {}
for case, asked in json.load(sys.stdin).items():
    with override_platform(**asked["platform"]):
        try:
            args = prepare_server_args(asked["argv"])
            args.resolve_once()
            view = resolved_view(args)
            found[case] = {name: getattr(view, name) for name in names}
        except (ValueError, AssertionError) as error:
            found[case] = {"refused": str(error)}
        except SystemExit as error:
            found[case] = {"refused": f"exit {error.code}"}
print("RESOLVED " + json.dumps(found))
"""


def write_configs(folder: Path, profile: Profile, drafter: ActiveDrafter) -> tuple[Path, Path]:
    """Folders with nothing but the public config.json of the target and of the drafter."""
    target = folder / Path(profile.model_path).name
    _write(target, profile.model_path)
    draft = folder / Path(drafter.path or "none").name
    if drafter.path:
        _write(draft, drafter.path)
    return target, draft


def _write(folder: Path, path: str) -> None:
    known = find(path)
    assert known, f"server/models has no {path}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(known.config))


def argv_of(folder: Path, profile: Profile, drafter: ActiveDrafter, launch: Launch) -> list[str]:
    """The engine's arguments with the models' folders in the place of hub ids, and without the file of keys."""
    target, draft = write_configs(folder, profile, drafter)
    argv = launch.argv[launch.argv.index("--model-path") :]
    argv[1] = str(target)
    if "--speculative-draft-model-path" in argv:
        argv[argv.index("--speculative-draft-model-path") + 1] = str(draft)
    return [*argv, "--skip-tokenizer-init"]


def platform_of(profile: Profile) -> dict[str, bool]:
    assert profile.machine
    return PLATFORMS[int(gpu_of(profile.machine)["compute"])]


def cases_of(folder: Path, file: Path) -> dict[str, dict[str, Any]]:
    """Every way to start a profile: each drafter, none, a capture; and the second of two nodes."""
    profile = load_profile(file)
    first = "10.0.0.1:20000" if profile.engine.nodes > 1 else None
    ways = [(name, Node(0, first), False) for name in ("none", *profile.drafters)]
    if profile.capture:
        ways += [("none", Node(0, first), True)]
    ways += [(profile.default_drafter, Node(rank, first), False) for rank in range(1, profile.engine.nodes)]
    found = {}
    for name, node, captures in ways:
        drafter = resolve_drafter(profile, name, here=False)
        capture = plan_capture(profile, drafter, folder) if captures else None
        launch = build_launch(profile, drafter, port=30000, config_file="k.yaml", capture=capture, node=node)
        case = "capture" if captures else f"{name} on node {node.rank}" if node.rank else name
        found[case] = {
            "argv": argv_of(folder, profile, drafter, launch),
            "platform": platform_of(profile),
            "expected": launch.expected,
        }
    return found


def resolve(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """`{case: {name: value}}`, or `{case: {"refused": why}}`, by SGLang itself."""
    shown = subprocess.run(
        [sys.executable, "-c", RESOLVE, " ".join(NAMES)],
        input=json.dumps({case: {key: asked[key] for key in ("argv", "platform")} for case, asked in cases.items()}),
        capture_output=True,
        text=True,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"},
    )
    lines = [line for line in shown.stdout.splitlines() if line.startswith("RESOLVED ")]
    assert lines, shown.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(lines[0].removeprefix("RESOLVED "))
    return found


def resolve_all(folder: Path) -> dict[Path, tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]]:
    """For each profile: its cases, and what SGLang makes of them."""
    cases = {file: cases_of(folder, file) for file in PROFILES}
    flat = {f"{file.stem}/{name}": case for file, own in cases.items() for name, case in own.items()}
    found = resolve(flat)
    return {file: (own, {name: found[f"{file.stem}/{name}"] for name in own}) for file, own in cases.items()}


def text_of(resolved: dict[str, dict[str, Any]]) -> str:
    """A golden file: what is the same in every case once, then what differs."""
    first = next(iter(resolved.values()))
    same = {name: value for name, value in first.items() if all(own.get(name) == value for own in resolved.values())}
    rest = {case: {k: v for k, v in own.items() if k not in same} for case, own in resolved.items()}
    return json.dumps({"every case": same, **rest}, indent=1, sort_keys=True) + "\n"


def read_golden(file: Path) -> dict[str, dict[str, Any]]:
    golden = GOLDEN / f"{file.stem}.json"
    if not golden.is_file():
        return {}
    found: dict[str, dict[str, Any]] = json.loads(golden.read_text())
    same = found.pop("every case", {})
    return {case: {**same, **own} for case, own in found.items()}


def difference(file: Path, resolved: dict[str, dict[str, Any]]) -> str:
    """What changed against the golden file, each line with the case that it belongs to; empty where nothing did."""
    before, after = _flat(read_golden(file)), _flat(resolved)
    return "\n".join(difflib.unified_diff(before, after, "golden", "SGLang now", lineterm="", n=0))


def _flat(resolved: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"{case}: {name} = {value!r}" for case, own in sorted(resolved.items()) for name, value in sorted(own.items())
    ]


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        for file, (_, resolved) in resolve_all(Path(name)).items():
            print(difference(file, resolved) or f"{file.stem}: no change")
            (GOLDEN / f"{file.stem}.json").write_text(text_of(resolved))
    return 0


if __name__ == "__main__":
    sys.exit(main())
