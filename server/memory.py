"""What each GPU of a deployment holds: weights, drafter, and how many tokens of KV cache are left. Plain arithmetic.

Cut as SGLang 0.5.23 cuts a DeepSeek-V3, a Kimi-K2.5 or a Llama over tensor-parallel ranks. Bytes are bytes, GB are
10^9.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from math import prod
from typing import Any

from drafter.checkpoint import shapes
from server.known import quantization, text_config

PLAIN = 2.0  # bytes of a bf16 parameter
CACHE_BYTES = {"auto": 2, "bf16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
# Left whole on every rank: ReplicatedLinear in models/deepseek_v2.py, and torch.nn.Linear in models/llama_eagle3.py.
REPLICATED = ("q_a_proj", "kv_a_proj", "norm", "gate.weight")


@dataclass(frozen=True)
class Budget:
    """One GPU's memory in bytes. `weights` by part; `cache_tokens` fit into what mem_fraction leaves for the cache.

    `asked_tokens` is context times requests: the cache that no request ever waits for. `beyond` is what the drafter's
    cache takes over what SGLang reserves for it, outside mem_fraction.
    """

    gpu: float | None
    static: float | None
    weights: dict[str, float]
    drafter: float | None
    cache_per_token: int
    drafter_cache_per_token: int
    counted_per_token: float
    asked_tokens: int
    limit_tokens: int | None

    @property
    def loaded(self) -> float:
        """Target and drafter."""
        return sum(self.weights.values()) + (self.drafter or 0.0)

    @property
    def cache_tokens(self) -> int | None:
        """Tokens that the cache holds; None where the GPU is not known and the profile sets no limit."""
        if self.static is None:
            return self.limit_tokens
        found = max(0, int((self.static - self.loaded) / self.counted_per_token))
        return min(found, self.limit_tokens or found)

    @property
    def beyond(self) -> float:
        """Bytes of the drafter's cache that SGLang does not count."""
        return (self.cache_tokens or 0) * max(
            0.0, self.cache_per_token + self.drafter_cache_per_token - self.counted_per_token
        )


def cache_bytes_per_token(config: dict[str, Any], dtype: str | None, tp: int) -> int:
    """Bytes of KV cache that one token takes on each GPU.

    Latent attention (MLA) caches, for each layer, one compressed vector of `kv_lora_rank` numbers, from which the keys
    and values of all heads are computed, and one rotary key of `qk_rope_head_dim` numbers that all heads share. Nothing
    in it belongs to a head, so tensor parallelism cannot cut it: every rank holds all of it.
        Kimi-K2.5: (512 + 64) numbers * 61 layers = 35,136; in fp8 as many bytes, in bf16 70,272.
    Other attention caches a key and a value of `head_dim` numbers for each of `num_key_value_heads` heads, which are
    cut over the ranks; with fewer heads than ranks, each rank holds one.
    Sources: DeepSeek-V2, arXiv:2405.04434, section 2.1; SGLang 0.5.23, mem_cache/kv_cache_configurator.py
    (calculate_mla_kv_cache_dim). Without a dtype the cache is bf16.
    """
    text = text_config(config)
    size, layers = CACHE_BYTES[dtype or "auto"], text["num_hidden_layers"]
    if text.get("kv_lora_rank"):
        return int((text["kv_lora_rank"] + text["qk_rope_head_dim"]) * layers * size)
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    width = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return int(2 * max(1, heads // tp) * width * layers * size)


def stored_bytes(config: dict[str, Any], module: str) -> float:
    """Bytes of one parameter of a module, scales included, by the config's quantisation block.

    INT4 in groups of 32 with a bf16 scale: 0.5 + 2/32 = 0.5625. NVFP4 in groups of 16 with an fp8 scale: 0.5 + 1/16 =
    0.5625. A module on the block's list of exceptions is bf16, and so is every one where there is no block.
    """
    block = quantization(config)
    if block is None:
        return PLAIN
    spared = [
        *(block.get("ignore") or []),
        *(block.get("exclude_modules") or []),
        *(block.get("modules_to_not_convert") or []),
    ]
    if any(_names(pattern, module) for pattern in spared):
        return PLAIN
    method = block.get("quant_method")
    if method == "fp8" or "FP8" in str(block.get("quant_algo", "")).upper():
        return 1.0
    if method == "modelopt":
        return 0.5 + 1 / int(block.get("group_size", 16))
    groups: list[dict[str, Any]] = list((block.get("config_groups") or {}).values())
    weights = (groups[0].get("weights") or {}) if groups else {}
    bits, group = weights.get("num_bits", block.get("bits", 16)), weights.get("group_size", block.get("group_size"))
    return float(bits) / 8 + (2 / group if group else 0.0)


def _names(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return fnmatch.fnmatch(module, pattern) or module == pattern or module.startswith(f"{pattern}.")


def target_weights(config: dict[str, Any], tp: int) -> dict[str, float]:
    """Bytes of the target on each of `tp` GPUs, by part; they add up to the checkpoint where `tp` is 1, but for
    `absorbed`: SGLang keeps kv_b_proj a second time, laid out for decoding (models/deepseek_common/
    deepseek_weight_loader.py), and for norms, which are nothing.
    """
    text = text_config(config)
    hidden, vocab, layers = text["hidden_size"], text["vocab_size"], text["num_hidden_layers"]
    whole, cut = attention_parameters(text)
    stored = stored_bytes(config, "model.layers.1.self_attn.o_proj")
    found = {"attention": layers * stored * (whole + cut / tp)}
    if text.get("kv_lora_rank"):
        found["absorbed"] = layers * stored * text["kv_lora_rank"] * _heads(text) / tp
    experts = text.get("n_routed_experts") or 0
    dense = text.get("first_k_dense_replace", 0) if experts else layers
    if dense:
        mlp = stored_bytes(config, "model.layers.0.mlp.down_proj")
        found["dense MLPs"] = dense * 3 * hidden * text["intermediate_size"] * mlp / tp
    if experts:
        inner, sparse = text["moe_intermediate_size"], layers - dense
        routed = stored_bytes(config, "model.layers.1.mlp.experts.0.down_proj")
        shared = stored_bytes(config, "model.layers.1.mlp.shared_experts.down_proj")
        found["routed experts"] = sparse * experts * 3 * hidden * inner * routed / tp
        found["shared experts"] = sparse * (text.get("n_shared_experts") or 0) * 3 * hidden * inner * shared / tp
        found["routers"] = sparse * hidden * experts * PLAIN
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings")) is True
    found["embedding and head"] = (1 if tied else 2) * vocab * hidden * PLAIN / tp
    if config.get("vision_config"):
        found["vision"] = vision_parameters(config["vision_config"]) * PLAIN
    return found


def attention_parameters(text: dict[str, Any]) -> tuple[int, int]:
    """Parameters of one layer's attention that every rank holds whole, and those that are cut over the ranks."""
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    if not text.get("kv_lora_rank"):
        groups = text.get("num_key_value_heads") or heads
        width = text.get("head_dim") or hidden // heads
        return 0, hidden * width * (2 * heads + 2 * groups)
    query, latent, rope = text["q_lora_rank"], text["kv_lora_rank"], text["qk_rope_head_dim"]
    whole = hidden * (query + latent + rope)
    cut = (
        query * heads * (text["qk_nope_head_dim"] + rope) + latent * _heads(text) + heads * text["v_head_dim"] * hidden
    )
    return whole, cut


def _heads(text: dict[str, Any]) -> int:
    """Columns of kv_b_proj."""
    return int(text["num_attention_heads"] * (text["qk_nope_head_dim"] + text["v_head_dim"]))


def vision_parameters(vision: dict[str, Any]) -> int:
    """MoonViT and its projector (SGLang's models/kimi_k25.py); counted whole on every rank, so that it is a bound."""
    width, inner = vision["vt_hidden_size"], vision["vt_intermediate_size"]
    merged = width * prod(vision["merge_kernel_size"])
    tower = vision["vt_num_hidden_layers"] * (4 * width**2 + 2 * width * inner)
    return int(tower + merged**2 + merged * vision["text_hidden_size"])


def drafter_weights(config: dict[str, Any], tp: int) -> float:
    """Bytes of a bf16 EAGLE-3 drafter on each of `tp` GPUs; its embedding is the target's own and costs nothing.

    In the Llama style fc is whole on every rank (torch.nn.Linear), in the DeepSeek style it is cut.
    """
    whole = (*REPLICATED, "fc.") if config["architectures"][0] == shapes.LLAMA else REPLICATED
    total = 0.0
    for name, shape in shapes.expected_shapes(config).items():
        known = [size for size in shape if size is not None]
        total += prod(known) * PLAIN / (1 if any(part in name for part in whole) else tp)
    return total


def budget(
    target: dict[str, Any],
    drafter: dict[str, Any] | None,
    *,
    tp: int,
    gpu_bytes: float | None,
    mem_fraction: float | None,
    cache_dtype: str | None,
    context: int,
    requests: int,
    limit_tokens: int | None = None,
) -> Budget:
    """The memory of one of `tp` GPUs that serve `requests` at a time of `context` tokens each.

    SGLang counts an EAGLE drafter's cache as one more layer of the target's for each of its own (model_executor/
    pool_configurator.py), whatever its attention; an MHA drafter behind an MLA target takes more than that.
    """
    own = cache_bytes_per_token(target, cache_dtype, tp)
    draft = cache_bytes_per_token(drafter, cache_dtype, tp) if drafter else 0
    layers = drafter["num_hidden_layers"] if drafter else 0
    return Budget(
        gpu=gpu_bytes,
        static=gpu_bytes * mem_fraction if gpu_bytes and mem_fraction else None,
        weights=target_weights(target, tp),
        drafter=drafter_weights(drafter, tp) if drafter else None,
        cache_per_token=own,
        drafter_cache_per_token=draft,
        counted_per_token=own * (1 + layers / text_config(target)["num_hidden_layers"]),
        asked_tokens=context * requests,
        limit_tokens=limit_tokens,
    )
