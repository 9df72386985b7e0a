"""What SGLang would refuse, crash on or change without a word, told from the profile alone, each with the fix.

Rules are SGLang 0.5.23's own; the file that each comes from is named. A rule that needs to know a model or a machine is
silent where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from drafter.checkpoint.fit import MLA_BACKENDS, NEEDS_FULL_VOCABULARY
from server.breakeven import IPC
from server.deployment import Deployment
from server.drafters import LaunchError

# The compute capabilities that a backend was written for: arg_groups/overrides.py, layers/attention/.
BACKENDS = {
    "trtllm_mla": (100, 120),
    "cutedsl_mla": (100,),
    "tokenspeed_mla": (100,),
    "cutlass_mla": (100,),
    "fa3": (90,),
    "flashmla": (90,),
}
TREE_BACKENDS = ("flashinfer", "fa3", "triton")  # with pages of more than one token: arg_groups/speculative_hook.py
FITS_ALL = 0.95  # of a GPU's memory: what is left runs the CUDA context, graphs and activations
GPU = {90: "Hopper", 100: "B200", 120: "RTX PRO 6000"}

Rule = Callable[[Deployment], Iterator[str]]


def find_obstacles(deployment: Deployment) -> list[str]:
    """One sentence with the fix for each obstacle; none on a CPU, where the engine itself says enough."""
    if deployment.profile.engine.device != "cuda":
        return []
    return [sentence for rule in RULES for sentence in rule(deployment)]


def refuse(deployment: Deployment) -> None:
    """Raises LaunchError for the first obstacle, and says how many more there are."""
    found = find_obstacles(deployment)
    if found:
        more = f" And {len(found) - 1} more: {' '.join(found[1:])}" if len(found) > 1 else ""
        raise LaunchError(f"profile {deployment.profile.source}: {found[0]}{more}")


def shares(deployment: Deployment) -> Iterator[str]:
    """Ranks must share heads and experts evenly, and there must be a GPU for each."""
    engine, gpus = deployment.profile.engine, deployment.gpus
    if gpus is not None and engine.tp // engine.nodes > gpus:
        yield (
            f"tp = {engine.tp} over nodes = {engine.nodes} needs {engine.tp // engine.nodes} GPUs a node, "
            f"{deployment.profile.machine} has {gpus}: set tp = {gpus * engine.nodes}, or more nodes."
        )
    heads = deployment.target.text.get("num_attention_heads") if deployment.target else None
    if heads and heads % engine.tp:
        fit = max(tp for tp in range(1, engine.tp) if heads % tp == 0)
        yield f"tp = {engine.tp} cannot share the target's {heads} attention heads evenly: set tp = {fit}."


def memory(deployment: Deployment) -> Iterator[str]:
    """Weights must fit into mem_fraction, and one request of the full context into what is left."""
    found, engine = deployment.budget, deployment.profile.engine
    if found is None or found.static is None or found.gpu is None or found.cache_tokens is None:
        return
    loaded, gpu = found.loaded / 1e9, found.gpu / 1e9
    if found.loaded >= found.static:
        least = found.loaded / found.gpu
        fix = f"set mem_fraction above {least:.2f}" if least < FITS_ALL else "spread them over more GPUs (tp, nodes)"
        yield (
            f"the weights take {loaded:.1f} GB of each GPU, and mem_fraction = {engine.mem_fraction:g} of {gpu:.0f} GB "
            f"is {found.static / 1e9:.1f}: {fix}."
        )
    elif found.cache_tokens < engine.context_length:
        yield (
            f"the cache has room for {found.cache_tokens:,} tokens, fewer than one request's context_length = "
            f"{engine.context_length:,}: set context_length = {found.cache_tokens // 1024 * 1024} or less, a larger "
            'mem_fraction, or kv_cache_dtype = "fp8_e4m3".'
        )


def attention(deployment: Deployment) -> Iterator[str]:
    """A backend runs on the GPUs that it was written for."""
    engine, compute = deployment.profile.engine, deployment.compute
    if compute is None:
        return
    for key in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        chosen = getattr(engine, key)
        made_for = BACKENDS.get(chosen, (compute,))
        if compute not in made_for:
            fix = f'set {key} = "triton"' if compute == 120 else f"leave {key} out, and SGLang takes what is best"
            names = " and ".join(GPU[each] for each in made_for)
            yield f"{key} = {chosen!r} is for {names} GPUs, the machine's are {GPU[compute]}: {fix}."


def trees(deployment: Deployment) -> Iterator[str]:
    """A tree of drafts needs pages of one token, or a backend that can read a part of a page."""
    engine, drafter = deployment.profile.engine, deployment.drafter
    chosen = engine.attention_backend or engine.decode_attention_backend
    paged = engine.page_size not in (None, 1) or (deployment.compute == 100 and deployment.mla and chosen is None)
    if chosen in TREE_BACKENDS or not (paged or chosen in MLA_BACKENDS):
        return
    if drafter.algorithm == "EAGLE3" and drafter.topk and drafter.topk > 1:
        yield (
            f"topk = {drafter.topk} drafts a tree, which the attention backend here refuses at its page size: set topk "
            "= 1 and leave draft_tokens out."
        )
    if drafter.algorithm == "NGRAM" and drafter.table and drafter.table.ngram.max_bfs_breadth != 1:
        yield (
            "NGRAM drafts a tree by default, which the attention backend here refuses at its page size: set "
            f"max_bfs_breadth = 1 in [drafters.{drafter.name}.ngram]."
        )


def draft_attention(deployment: Deployment) -> Iterator[str]:
    """An MHA drafter dies on a backend for latent attention, and on Blackwell it inherits one from an MLA target."""
    drafter, engine = deployment.drafter, deployment.profile.engine
    if not deployment.mha_drafter or not deployment.mla or drafter.table is None or drafter.folder is not None:
        return  # of a folder on this disk the preflight says it
    own = drafter.table.attention_backend
    inherited = engine.attention_backend or engine.decode_attention_backend
    if own in MLA_BACKENDS or (
        own is None and (inherited in MLA_BACKENDS or (deployment.compute == 100 and not inherited))
    ):
        yield (
            f"drafter {drafter.name} has MHA attention and would run on {own or inherited or 'trtllm_mla'}, which "
            "takes "
            f'latent attention alone: set attention_backend = "flashinfer" in [drafters.{drafter.name}].'
        )


def draft_context(deployment: Deployment) -> Iterator[str]:
    """The drafter is built with the target's context (configs/model_config.py)."""
    drafter, engine = deployment.drafter, deployment.profile.engine
    longest = deployment.draft.config.get("max_position_embeddings") if deployment.draft else None
    if drafter.folder is None and longest is not None and longest < engine.context_length:
        yield (
            f"drafter {drafter.name} was made for {longest:,} positions, context_length is {engine.context_length:,}, "
            f"and the engine would refuse to start: set context_length = {longest} or less."
        )


def weight_format(deployment: Deployment) -> Iterator[str]:
    """--quantization must be the checkpoint's own, and the GPU must multiply it."""
    engine, own = deployment.profile.engine, deployment.weight_format
    if deployment.target is None or engine.quantization is None:
        return
    if engine.quantization.startswith("modelopt") and own != "modelopt":
        yield (
            f"quantization = {engine.quantization!r}, but {deployment.profile.model_path} holds {own or 'plain'} "
            "weights: remove "
            'the key, or set target.path = "nvidia/Kimi-K2.5-NVFP4".'
        )
    elif engine.quantization == "modelopt_fp4" and deployment.compute is not None and deployment.compute < 100:
        yield (
            f"NVFP4 weights need Blackwell, the machine's GPUs are {GPU[deployment.compute]}: serve INT4, target.path "
            "= "
            '"moonshotai/Kimi-K2.5", without quantization.'
        )


def flags(deployment: Deployment) -> Iterator[str]:
    """Flags that speculation does not live with."""
    drafter, given = deployment.drafter, deployment.profile.engine.extra_args
    words = [word.split("=", 1)[0] for word in given]
    if drafter.algorithm == "NONE":
        return
    for flag in ("--enable-dp-attention", "--attn-dp-size"):
        if flag in words:
            yield f"extra_args has {flag}, under which EAGLE and NGRAM deadlock or are refused: remove it."
    if "--weight-cache-mode" in words:
        yield "extra_args has --weight-cache-mode, which SGLang refuses under speculation: remove it."
    if drafter.algorithm != "EAGLE3" or drafter.folder is not None:
        return  # of a folder on this disk the preflight says the rest
    rows = deployment.draft.config.get("draft_vocab_size") if deployment.draft else None
    vocab = deployment.target.text.get("vocab_size") if deployment.target else None
    for flag in NEEDS_FULL_VOCABULARY:
        if flag in words and rows is not None and rows != vocab:
            yield f"extra_args has {flag}, which SGLang refuses with a draft vocabulary of {rows:,}: remove it."
    if "--speculative-token-map" in words:
        yield "extra_args has --speculative-token-map, which SGLang ignores under EAGLE3: remove it."


def allreduce(deployment: Deployment) -> Iterator[str]:
    """The PCIe all-reduce stays off, with a warning at most, where it cannot run (distributed/.../pcie_ipc_ar.py)."""
    engine = deployment.profile.engine
    if engine.env.get(IPC, "").lower() not in ("1", "true"):
        return
    if "--enable-deterministic-inference" in engine.extra_args:
        yield f"{IPC} is off under --enable-deterministic-inference, and NCCL is slower by far: remove one of the two."
    if engine.tp not in (2, 4, 8) or engine.nodes > 1:
        yield (
            f"{IPC} works over 2, 4 or 8 GPUs of one machine, not tp = {engine.tp} over nodes = {engine.nodes}: "
            "remove it."
        )


def layers(deployment: Deployment) -> Iterator[str]:
    """Layer ids must exist, and mean what the profile says that they mean (models/deepseek_v2.py)."""
    table, target = deployment.drafter.table, deployment.target
    if table is None or target is None:
        return
    ids, count = table.override_layer_ids or table.layer_ids, target.text.get("num_hidden_layers")
    if not ids or not count or not deployment.mla:
        return
    name = deployment.drafter.name
    convention = "output_of_layer" if ids[0] == 1 else "input_to_layer"
    if table.convention not in (None, convention):
        moved = f", or override_layer_ids = {[layer + 1 for layer in ids]}" if ids[0] > 1 else ""
        yield (
            f"drafter {name} has layer ids {ids} as {table.convention}, but a DeepSeek or Kimi target takes them as "
            f'{convention}: set convention = "{convention}" if that is how it was trained{moved}.'
        )
    last = count - 1 - (convention == "output_of_layer")
    if max(ids) > last:
        yield f"drafter {name} has layer ids {ids}, but the target's end at {last}: name three of 0 to {last}."
    if table.override_layer_ids and any(
        word.startswith("--json-model") for word in deployment.profile.engine.extra_args
    ):
        yield (
            "override_layer_ids is passed as --json-model-override-args, which extra_args has too: remove one of the "
            "two."
        )


RULES: tuple[Rule, ...] = (
    shares,
    weight_format,
    attention,
    memory,
    trees,
    draft_attention,
    draft_context,
    layers,
    flags,
    allreduce,
)
