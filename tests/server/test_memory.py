"""Memory arithmetic, against figures worked out by hand from Kimi-K2.5's published sizes."""

import json

import pytest

from server.known import DATA, entries, find
from server.memory import (
    budget,
    cache_bytes_per_token,
    drafter_weights,
    stored_bytes,
    target_weights,
    vision_parameters,
)

INT4, NVFP4 = (find(name) for name in ("moonshotai/Kimi-K2.5", "nvidia/Kimi-K2.5-NVFP4"))
K2, LIGHTSEEK_MLA = (find(name) for name in ("AQ-MedAI/Kimi-K2-Instruct-eagle3", "lightseekorg/kimi-k2.5-eagle3-mla"))
assert INT4 and NVFP4 and K2 and LIGHTSEEK_MLA


def test_the_cache_of_a_token():
    """(512 + 64) x 61 = 35,136 numbers, on every GPU alike; a byte each in fp8, two in bf16."""
    assert cache_bytes_per_token(NVFP4.config, "fp8_e4m3", 8) == 35_136
    assert cache_bytes_per_token(INT4.config, None, 8) == cache_bytes_per_token(INT4.config, "bf16", 16) == 70_272
    # One layer of 64 heads of 128, key and value, in bf16: 32,768 over 8 GPUs.
    assert cache_bytes_per_token(K2.config, "bf16", 8) == 4_096
    assert cache_bytes_per_token(LIGHTSEEK_MLA.config, "fp8_e4m3", 8) == 576
    # Llama-3.1-8B: 8 heads of 128, key and value, 32 layers, bf16. On 16 GPUs each keeps a head of its own.
    llama = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    assert cache_bytes_per_token(llama, "bf16", 1) == 131_072
    assert cache_bytes_per_token(llama, "bf16", 16) == cache_bytes_per_token(llama, "bf16", 8) == 16_384


def test_bytes_of_a_parameter():
    layer = "model.layers.1"
    experts, shared = f"{layer}.mlp.experts.0.down_proj", f"{layer}.mlp.shared_experts.down_proj"
    output = f"{layer}.self_attn.o_proj"
    assert stored_bytes(INT4.config, experts) == 4 / 8 + 2 / 32
    assert stored_bytes(NVFP4.config, experts) == stored_bytes(NVFP4.config, shared) == 4 / 8 + 1 / 16
    assert stored_bytes(INT4.config, shared) == stored_bytes(INT4.config, output) == 2
    assert stored_bytes(NVFP4.config, output) == 2
    assert stored_bytes({"quantization_config": {"quant_method": "fp8"}}, output) == 1
    assert stored_bytes({}, output) == 2


def test_the_weights_of_the_target():
    """By hand, in parameters: 60 layers of 384 experts of 3 x 7168 x 2048; attention's cut and whole parts; the "
    "rest."""
    experts = 60 * 384 * 3 * 7168 * 2048
    assert experts == 1_014_686_023_680
    whole = 61 * 7168 * (1536 + 512 + 64)
    cut = 61 * (1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * 7168)
    found = target_weights(INT4.config, 8)
    assert found["routed experts"] == experts * 0.5625 / 8
    assert found["attention"] == pytest.approx(2 * (whole + cut / 8))
    assert found["shared experts"] == 60 * 3 * 7168 * 2048 * 2 / 8
    assert found["dense MLPs"] == 3 * 7168 * 18432 * 2 / 8
    assert found["embedding and head"] == 2 * 163_840 * 7168 * 2 / 8
    assert found["routers"] == 60 * 7168 * 384 * 2
    assert found["absorbed"] == 61 * 512 * 64 * 256 * 2 / 8
    assert found["vision"] == 2 * (27 * (4 * 1152**2 + 2 * 1152 * 4304) + 4608**2 + 4608 * 7168)
    assert sum(found.values()) / 1e9 == pytest.approx(77.24, abs=0.01)
    alone = target_weights(INT4.config, 1)
    assert (sum(alone.values()) - alone["absorbed"]) / 1e9 == pytest.approx(595, abs=0.5)
    assert vision_parameters(INT4.config["vision_config"]) == found["vision"] / 2


def test_the_weights_of_a_drafter():
    """The K2 drafter: 1.19 thousand million parameters; over 8 GPUs fc stays whole, and so do the three norms."""
    fc, qkv, out = 3 * 7168 * 7168, 3 * 8192 * 2 * 7168, 8192 * 7168
    mlp, head, norms = 3 * 7168 * 18432, 32_000 * 7168, 4 * 7168
    assert drafter_weights(K2.config, 1) == 2 * (fc + qkv + out + mlp + head + norms)
    assert drafter_weights(K2.config, 8) == pytest.approx(2 * (fc + norms + (qkv + out + mlp + head) / 8))
    assert drafter_weights(K2.config, 1) / 1e9 == pytest.approx(2.38, abs=0.01)
    # In the DeepSeek style fc is cut, and the two projections into the ranks are not.
    whole = 2 * 7168 * (1536 + 512 + 64) + 1536 + 512 + 4 * 7168
    cut = fc + 1536 * 64 * 192 + 512 * 64 * 256 + out + 3 * 7168 * 12_288 + 163_840 * 7168
    assert drafter_weights(LIGHTSEEK_MLA.config, 8) == pytest.approx(2 * (whole + cut / 8))


def make(target, drafter, **changes):
    given = {"tp": 8, "gpu_bytes": 141e9, "mem_fraction": 0.85, "cache_dtype": None, "context": 131_072, "requests": 16}
    return budget(target.config, drafter.config if drafter else None, **(given | changes))


def test_the_room_for_tokens():
    plain = make(INT4, None)
    assert plain.cache_tokens == int((141e9 * 0.85 - sum(target_weights(INT4.config, 8).values())) / 70_272)
    assert plain.asked_tokens == 16 * 131_072 and plain.beyond == 0
    like_the_target = make(INT4, LIGHTSEEK_MLA)
    assert like_the_target.counted_per_token == 70_272 * 62 / 61 and like_the_target.beyond == 0
    other = make(INT4, K2)
    # SGLang reserves a layer of the target's, 1,152 bytes; the drafter takes 4,096.
    assert other.beyond == pytest.approx(other.cache_tokens * (4_096 - 1_152))
    assert make(INT4, None, limit_tokens=1000).cache_tokens == 1000
    assert make(INT4, None, mem_fraction=0.3).cache_tokens == 0
    assert make(INT4, None, gpu_bytes=None).cache_tokens is None


def test_a_folder_on_this_disk_counts_before_what_is_known(tmp_path):
    folder = tmp_path / "Kimi-K2.5"
    folder.mkdir()
    config = json.loads(json.dumps(INT4.config))
    (folder / "config.json").write_text(json.dumps(config))
    found = find(str(folder))
    assert found.source == str(folder / "config.json") and found.paper == "kimi-k2.5-int4"
    config["text_config"]["num_hidden_layers"] = 30
    (folder / "config.json").write_text(json.dumps(config))
    assert find(str(folder)).paper is None
    assert cache_bytes_per_token(find(str(folder)).config, "bf16", 8) == 576 * 2 * 30
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no model's configuration"):
        find(str(folder))
    assert find("org/unknown") is None


def test_what_is_known_says_where_it_is_from():
    names = [name for entry in entries() for name in entry["names"]]
    assert len(names) == len(set(names)) and len(entries()) == len(list(DATA.glob("*.json")))
    assert all(entry["source"] for entry in entries())
