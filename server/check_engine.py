"""Whether an installed SGLang still has what Eyas hooks, patches, asks and reads: run it before an engine upgrade.

SGLang's source is read, never imported: it needs no GPU, no torch, and a second or two. What is not found is a reason
to stay; what is found may still behave differently, which is for the tests and the bench to say.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from drafter.data.capture_plugin import LOGITS, SETTER
from server.capture import CAPTURE_FLAGS
from server.enginetable import OWNED_FLAGS
from server.launch import CPU_FLAGS, NGRAM_FLAGS, SGLANG_VERSION

PROTOCOL = "srt/entrypoints/openai/protocol.py"
SERVER = "srt/entrypoints/http_server.py"
EAGLE = "srt/speculative/eagle_utils.py"
UPDATER = "srt/model_executor/model_runner_components/weight_updater.py"


class CheckError(ValueError):
    """There is no SGLang to check."""


@dataclass(frozen=True)
class Need:
    """Something of SGLang that Eyas relies on.

    file: in the package. what: a function's path, a name that the file binds, a field, or a text in it.
    parameters: of a function, by name. calls: names that the function's body uses. used: for what.
    """

    file: str
    what: str
    used: str
    parameters: str | None = None
    calls: tuple[str, ...] = ()
    text: bool = False


@dataclass(frozen=True)
class Missing:
    """A need that is not met: `reason` is one phrase."""

    file: str
    what: str
    used: str
    reason: str


def _hook(module: str) -> str:
    return module.removeprefix("sglang.").replace(".", "/") + ".py"


CAPTURE = (
    Need(_hook(LOGITS.module), LOGITS.path, "capture's hook", LOGITS.parameters),
    Need(_hook(SETTER.module), SETTER.path, "capture's hook", SETTER.parameters),
    Need("srt/plugins/hook_registry.py", "HookRegistry.register", "capture's hook"),
    Need("srt/plugins/hook_registry.py", "HookType", "capture's hook"),
    Need("srt/runtime_context.py", "get_parallel", "capture's rank"),
)
# The same names and parameters as deploy/cpu/sgl_kernel/plugin.py gives SGLang's functions (a test compares them).
CPU_ENGINE = (
    Need(
        EAGLE,
        "eagle_sample",
        "sampling in verify on a CPU",
        calls=(
            "_verify_uses_greedy",
            "_verify_coins",
            "top_k_renorm_prob",
            "top_p_renorm_prob",
            "tree_speculative_sampling_target_only",
        ),
    ),
    Need(
        EAGLE,
        "_verify_coins",
        "sampling in verify on a CPU",
        "sampling_info seq_lens draft_token_num candidates device",
    ),
    Need(
        EAGLE,
        "_verify_uses_greedy",
        "sampling in verify on a CPU",
        "is_all_greedy is_cpu is_hip is_xpu use_rejection_sampling",
    ),
    Need(EAGLE, "top_k_renorm_prob", "sampling in verify on a CPU"),
    Need(EAGLE, "top_p_renorm_prob", "sampling in verify on a CPU"),
    Need(EAGLE, "tree_speculative_sampling_target_only", "sampling in verify on a CPU"),
    Need(
        "srt/layers/sampler.py",
        "top_k_top_p_min_p_sampling_from_probs_torch",
        "sampling on a CPU",
        "probs top_ks top_ps min_ps need_min_p_sampling sampling_seed positions return_filtered_probs max_top_k",
    ),
    Need(
        "srt/layers/quantization/unquant.py", "UnquantizedLinearMethod.apply", "matrices on a CPU", "self layer x bias"
    ),
    Need(
        "srt/layers/logits_processor.py",
        "LogitsProcessor._compute_lm_head",
        "matrices on a CPU",
        "self hidden_states lm_head embedding_bias out",
    ),
    Need(
        UPDATER,
        "WeightUpdater.update_weights_from_disk",
        "matrices on a CPU",
        "self model_path load_format weight_name_filter recapture_cuda_graph",
    ),
    Need(UPDATER, "WeightUpdater.update_weights_from_tensor", "matrices on a CPU", "self named_tensors load_format"),
    Need(UPDATER, "WeightUpdater.update_weights_from_ipc", "matrices on a CPU", "self recv_req"),
    Need(UPDATER, "WeightUpdater.load_weights_from_distributed", "matrices on a CPU", "self named_tensors"),
    Need(UPDATER, "WeightUpdater.end_weight_update", "matrices on a CPU", "self run_post_load"),
    Need(
        "srt/layers/rotary_embedding/base.py",
        "RotaryEmbedding.forward_native",
        "rotation on a CPU",
        "self positions query key offsets fused_set_kv_buffer_arg",
    ),
    Need("srt/utils/common.py", "SGLANG_USE_CPU_ENGINE", "the CPU engine's switch", text=True),
)
ROUTES = tuple(
    Need(SERVER, route, used, text=True)
    for route, used in (
        ("/ready", "waiting for a start, health of an arm"),
        ("/server_info", "what an engine resolved"),
        ("/health_generate", "the last word before an engine is called hung"),
        ("/abort_request", "stopping what a client left"),
        ("/flush_cache", "emptying caches between measurements"),
        ("/v1/chat/completions", "the relay"),
        ("/v1/completions", "the relay"),
    )
)
ANSWERS = (
    Need(PROTOCOL, "ChatCompletionRequest.return_spec_tokens_details", "acceptance of a request"),
    Need(PROTOCOL, "CompletionRequest.return_spec_tokens_details", "acceptance of a request"),
    Need(PROTOCOL, "ChatCompletionRequest.rid", "stopping a request"),
    Need(PROTOCOL, "CompletionRequest.rid", "stopping a request"),
    Need(PROTOCOL, "SpecTokensDetails.spec_correct_drafts_histogram", "acceptance of a request"),
    Need(PROTOCOL, "SpecTokensDetails.spec_num_proposed_drafts", "acceptance of a request"),
    Need(PROTOCOL, "SpecTokensDetails.spec_verify_ct", "acceptance of a request"),
)
METRICS = tuple(
    Need("srt/observability/metrics_collector.py", f"sglang:{name}", used, text=True)
    for name, used in (
        ("num_running_reqs", "the watch for a hang; alerts"),
        ("realtime_tokens_total", "the watch for a hang; alerts"),
        ("num_queue_reqs", "alerts and the dashboard"),
        ("token_usage", "alerts and the dashboard"),
        ("num_retracted_requests_total", "alerts and the dashboard"),
        ("gen_throughput", "the dashboard"),
        ("cache_hit_rate", "the dashboard"),
        ("generation_tokens_total", "the dashboard"),
        ("spec_verify_calls_total", "the dashboard"),
    )
)
FAKES = (Need("srt/environ.py", "SGLANG_SIMULATE_ACC_LEN", "the cost of a step; removed elsewhere", text=True),)
# Flags of the command that no table of server/ names.
OTHER_FLAGS = (
    "--node-rank",
    "--dist-init-addr",
    "--sleep-on-idle",
    "--decode-log-interval",
    "--json-model-override-args",
)


def needs() -> tuple[Need, ...]:
    """Everything but the flags, which have no file of their own."""
    return (*CAPTURE, *CPU_ENGINE, *ROUTES, *ANSWERS, *METRICS, *FAKES)


def flags() -> list[str]:
    """Every flag of SGLang's server that Eyas sets."""
    ngram = [f"--speculative-ngram-{name.replace('_', '-')}" for name in NGRAM_FLAGS]
    return sorted({*OWNED_FLAGS, *(flag for flag, _ in (*CPU_FLAGS, *CAPTURE_FLAGS)), *ngram, *OTHER_FLAGS})


def installed() -> Path:
    """The folder of the sglang package in this environment. Raises CheckError."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        raise CheckError("no sglang is installed here: run this in the engine's environment, or name --sglang DIR.")
    return Path(found.submodule_search_locations[0])


def version_of(package: Path) -> str:
    """What the package beside it says it is, `unknown` where nothing does."""
    for metadata in sorted(package.parent.glob("sglang-*.dist-info/METADATA")):
        for line in metadata.read_text("utf-8").splitlines():
            if line.startswith("Version: "):
                return line.removeprefix("Version: ")
    return "unknown"


def check(package: Path) -> list[Missing]:
    """What of the needs `package` does not meet. Raises CheckError where it is no SGLang."""
    if not (package / SERVER).is_file():
        raise CheckError(f"{package} is not the folder of an sglang package ({SERVER} is not in it): correct --sglang.")
    missing = []
    for need in needs():
        reason = _unmet(package, need)
        if reason:
            missing.append(Missing(need.file, need.what, need.used, reason))
    known = _known_flags(package)
    missing += [
        Missing("srt/server_args.py", flag, "the engine's command", "no such argument")
        for flag in flags()
        if flag not in known and not _begins_one(flag, known)
    ]
    return missing


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    command.add_argument(
        "--sglang", type=Path, metavar="DIR", help="the package's folder (default: the one of this environment)"
    )
    command.add_argument("--json", action="store_true", help="one JSON object on stdout, and nothing else")


def run(package: Path | None, *, as_json: bool) -> int:
    """The command. Returns 0, or 1 where something is missing."""
    folder = (package or installed()).resolve()
    missing = check(folder)
    version, count = version_of(folder), len(needs()) + len(flags())
    if as_json:
        found = {"sglang": version, "tested": SGLANG_VERSION, "folder": str(folder), "checked": count}
        print(json.dumps(found | {"missing": [asdict(each) for each in missing]}))
        return 1 if missing else 0
    for each in missing:
        print(f"eyas: sglang/{each.file}: {each.what}: {each.reason} (used for {each.used})", file=sys.stderr)
    if missing:
        print(
            f"eyas: {len(missing)} of {count} things that Eyas needs are not in sglang {version}: stay on "
            f"{SGLANG_VERSION}, or carry Eyas over to it.",
            file=sys.stderr,
        )
        return 1
    print(f"sglang {version} has all {count} things that Eyas needs (tested with {SGLANG_VERSION}).")
    return 0


def _unmet(package: Path, need: Need) -> str:
    """Why a need is not met, or nothing."""
    file = package / need.file
    if not file.is_file():
        return "the file has gone"
    if need.text:
        return "" if need.what in _strings(file) or _binds(_tree(file), need.what) else "not in it"
    found = _find(_tree(file), need.what)
    if found is None:
        return "not in it"
    if need.parameters is None and not need.calls:
        return ""
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return "no function"
    if need.parameters is not None and (taken := _parameters(found)) != need.parameters:
        return f"takes ({taken}), expected ({need.parameters})"
    used = {node.id for node in ast.walk(found) if isinstance(node, ast.Name)}
    gone = [name for name in need.calls if name not in used]
    return f"no longer calls {', '.join(gone)}" if gone else ""


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


@cache
def _strings(file: Path) -> frozenset[str]:
    return frozenset(
        node.value for node in ast.walk(_tree(file)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _find(tree: ast.AST, path: str) -> ast.AST | None:
    """What binds the last name of "function", "Class.method" or "Class.field"."""
    *classes, name = path.split(".")
    owner: ast.AST = tree
    for part in classes:
        found = next((node for node in ast.walk(owner) if isinstance(node, ast.ClassDef) and node.name == part), None)
        if found is None:
            return None
        owner = found
    return next((node for node in _bindings(owner, inside=bool(classes)) if name in _names_of(node)), None)


def _binds(tree: ast.AST, name: str) -> bool:
    return any(name in _names_of(node) for node in ast.walk(tree))


def _bindings(owner: ast.AST, *, inside: bool) -> Iterator[ast.AST]:
    """What a class binds, or a module at its top and under its `if` and `try`."""
    for node in ast.iter_child_nodes(owner):
        yield node
        if not inside and isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            yield from _bindings(node, inside=inside)


def _names_of(node: ast.AST) -> set[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.AnnAssign(target=ast.Name() as target):
            return {target.id}
        case ast.Assign():
            return {target.id for target in node.targets if isinstance(target, ast.Name)}
        case ast.Import() | ast.ImportFrom():
            return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return set()


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    taken = function.args
    names = [*taken.posonlyargs, *taken.args, taken.vararg, *taken.kwonlyargs, taken.kwarg]
    return " ".join(each.arg for each in names if each)


def _begins_one(flag: str, known: set[str]) -> bool:
    """Whether argparse would take it for a longer argument: --tp for --tp-size."""
    return sum(longer.startswith(flag) for longer in known) == 1


def _known_flags(package: Path) -> set[str]:
    """Every argument of the server: a field's name with dashes, and the other names that a field lists."""
    files = [package / "srt/server_args.py", *sorted((package / "srt/arg_groups").rglob("*.py"))]
    known: set[str] = set()
    for file in filter(Path.is_file, files):
        for node in ast.walk(_tree(file)):
            known |= _other_names(node)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                known.add("--" + node.target.id.replace("_", "-"))
    return known


def _other_names(node: ast.AST) -> set[str]:
    """The names that `Arg(aliases=[...])` and `add_argument("--name", ...)` give."""
    if not isinstance(node, ast.Call):
        return set()
    given: list[ast.AST] = [keyword.value for keyword in node.keywords if keyword.arg == "aliases"]
    if isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
        given += node.args
    constants = [each.value for value in given for each in ast.walk(value) if isinstance(each, ast.Constant)]
    return {text for text in constants if isinstance(text, str) and text.startswith("--")}
