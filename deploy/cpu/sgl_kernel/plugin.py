"""The SGLang plugin: every function of SGLang that the CPU engine replaces, each checked before it is touched.

SGLang swallows what a plugin raises and would go on unpatched, verifying greedily whatever the temperature. So a
function that has gone, or takes other parameters than expected, ends the process with the reason.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys

import torch

import sgl_kernel
from sgl_kernel import linear, plain, rotary, sampling

EAGLE = "sglang.srt.speculative.eagle_utils"
LINEAR = "sglang.srt.layers.quantization.unquant"
LOGITS = "sglang.srt.layers.logits_processor"
SAMPLER = "sglang.srt.layers.sampler"
ROTARY = "sglang.srt.layers.rotary_embedding.base"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
# What SGLang's verification (EAGLE's and NGRAM's) must call by name for the sampling to be ours.
VERIFY_CALLS = (
    "_verify_uses_greedy",
    "_verify_coins",
    "top_k_renorm_prob",
    "top_p_renorm_prob",
    "tree_speculative_sampling_target_only",
)
WEIGHT_UPDATES = {
    "update_weights_from_disk": "model_path load_format weight_name_filter recapture_cuda_graph",
    "update_weights_from_tensor": "named_tensors load_format",
    "update_weights_from_ipc": "recv_req",
    "load_weights_from_distributed": "named_tensors",
    "end_weight_update": "run_post_load",
}


class Changed(RuntimeError):
    """This SGLang is not the one that the plugin was written against."""


def owner_of(module: str, path: str):
    """The module or class that holds the last name of `path` ("function" or "Class.method"), and that name."""
    try:
        owner = importlib.import_module(module)
    except ImportError as error:
        raise Changed(f"{module} cannot be imported ({error})") from error
    *classes, name = path.split(".")
    for part in classes:
        owner = vars(owner).get(part)
    if owner is None or name not in vars(owner):
        raise Changed(f"{module} has no {path}")
    return owner, name


def replace(module: str, path: str, parameters: str, make) -> None:
    """Put make(original) in place of a function that takes these parameters (by name, separated by spaces)."""
    owner, name = owner_of(module, path)
    original = vars(owner)[name]
    taken = " ".join(inspect.signature(original).parameters)
    if taken != parameters:
        raise Changed(f"{module}.{path} takes ({taken}), expected ({parameters})")
    setattr(owner, name, make(original))


def patch_sampling() -> None:
    """Verify by sampling, as plain decoding samples, where SGLang on a CPU always takes the most likely token."""
    owner, name = owner_of(EAGLE, "eagle_sample")
    missing = [call for call in VERIFY_CALLS if call not in vars(owner)[name].__code__.co_names]
    if missing:
        raise Changed(f"{EAGLE}.eagle_sample no longer calls {', '.join(missing)}")
    verifier = sampling.Verifier()
    replace(EAGLE, "_verify_coins", "sampling_info seq_lens draft_token_num candidates device", verifier.remembering)
    replace(
        EAGLE,
        "_verify_uses_greedy",
        "is_all_greedy is_cpu is_hip is_xpu use_rejection_sampling",
        lambda original: lambda *, is_all_greedy, **platform: is_all_greedy,
    )
    for path, ours in (
        ("top_k_renorm_prob", sampling.unchanged),
        ("top_p_renorm_prob", sampling.unchanged),
        ("tree_speculative_sampling_target_only", verifier.accept),
    ):
        owner, name = owner_of(EAGLE, path)
        if vars(owner)[name] is not None:
            raise Changed(f"{EAGLE}.{path} has an implementation on this CPU, expected none")
        setattr(owner, name, ours)


def patch_plain() -> None:
    """Sample without a sort where a request asks for none."""
    replace(SAMPLER, "top_k_top_p_min_p_sampling_from_probs_torch", plain.PARAMETERS, plain.sampler_of)


def patch_linear() -> None:
    """Multiply by weights that lie in oneDNN's own layout."""
    replace(LINEAR, "UnquantizedLinearMethod.apply", "self layer x bias", lambda original: linear.apply)
    replace(LOGITS, "LogitsProcessor._compute_lm_head", "self hidden_states lm_head embedding_bias out", linear.head_of)
    for method, parameters in WEIGHT_UPDATES.items():
        replace(UPDATER, f"WeightUpdater.{method}", f"self {parameters}", linear.invalidating)


def patch_rotary() -> None:
    """Rotate queries and keys in a few operations."""
    owner, _ = owner_of(ROTARY, "RotaryEmbedding.forward_native")
    replace(
        ROTARY,
        "RotaryEmbedding.forward_native",
        "self positions query key offsets fused_set_kv_buffer_arg",
        lambda original: rotary.forward_of(owner, original),
    )


def register() -> None:
    """The entry point in sglang.srt.plugins: SGLang calls it once in every process of the engine."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    try:
        patch_sampling()
        patch_plain()
        patch_linear()
        patch_rotary()
    except Changed as reason:
        # SystemExit, since SGLang catches every Exception of a plugin.
        sys.exit(f"eyas-cpu-engine {sgl_kernel.__version__} does not fit this SGLang: {reason}: install sglang==0.5.23")
    # The MLA drafter waits for the GPU after it has shared an embedding; here there is none to wait for.
    torch.cuda.synchronize = lambda device=None: None
    print(
        f"eyas CPU stand-in for sgl_kernel {sgl_kernel.__version__}: attention, speculation and sampling in plain "
        "PyTorch: correctness, not Blackwell speed",
        file=sys.stderr,
        flush=True,
    )
