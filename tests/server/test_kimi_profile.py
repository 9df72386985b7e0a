"""The Kimi-K2.5 profile, read by SGLang's own argument code with the platform set to Blackwell. No GPU, no weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from server.config import load_profile
from server.launch import build_launch, plan_capture, resolve_drafter

REPO = Path(__file__).parents[2]
PROFILE = REPO / "deploy/profiles/kimi-k2.5-nvfp4-8xb200.toml"
# From Kimi-K2.5's public config.json, with NVIDIA's NVFP4 quantisation in place of the INT4 block.
TARGET = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "dtype": "bfloat16",
    "media_placeholder_token_id": 163605,
    "pad_token_id": 163839,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "model_type": "kimi_k25_vision",
        "vt_hidden_size": 1152,
        "vt_num_hidden_layers": 27,
        "vt_num_attention_heads": 16,
        "vt_intermediate_size": 4304,
        "patch_size": 14,
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "init_pos_emb_time": 4,
        "merge_kernel_size": [2, 2],
        "text_hidden_size": 7168,
        "mm_hidden_size": 1152,
    },
}
MHA_DRAFTER = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "vocab_size": 163840,
    "draft_vocab_size": 32000,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
}
# Runs in a process of its own: SGLang's platform and plugins are process-wide. Reads a JSON object of argv lists.
RESOLVE = """
import json, sys
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import prepare_server_args
names = (
    "speculative_draft_attention_backend", "page_size", "kv_cache_dtype", "speculative_algorithm",
    "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_adaptive",
    "max_running_requests", "context_length", "tp_size", "served_model_name", "disable_radix_cache",
    "aux_hidden_state_capture", "return_aux_hidden_state_layer_ids", "cuda_graph_backend_prefill",
)
found = {}
for case, argv in json.load(sys.stdin).items():
    with override_platform(is_cuda=True, is_sm100=True, is_blackwell=True):
        try:
            args = prepare_server_args(argv)
            args.resolve_once()
            view = resolved_view(args)
            found[case] = {name: getattr(view, name) for name in names}
        except (ValueError, AssertionError) as error:
            found[case] = {"refused": str(error)}
print("RESOLVED " + json.dumps(found))
"""
ACCEPTED = ("lightseek-mha", "k2-direct", "ngram", "none")
REFUSED = {
    "ngram as a tree": ("ngram", ("max_bfs_breadth = 1", "max_bfs_breadth = 10"), "page_size"),
    "an EAGLE3 tree": ("lightseek-mha", ("topk = 1", "topk = 4\ndraft_tokens = 8"), "topk"),
}


@pytest.fixture(scope="module")
def resolved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kimi")
    for name, config in (("target", TARGET), ("drafter", MHA_DRAFTER)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))

    def argv_and_expected(name, edit=("", ""), captures=False):
        assert edit[0] in PROFILE.read_text()
        (folder / "profile.toml").write_text(PROFILE.read_text().replace(*edit))
        profile = load_profile(folder / "profile.toml")
        drafter = resolve_drafter(profile, name)
        capture = plan_capture(profile, drafter, folder / "captured") if captures else None
        launch = build_launch(profile, drafter, port=30000, config_file="k.yaml", capture=capture)
        argv = launch.argv[launch.argv.index("--model-path") :]
        argv[argv.index("--model-path") + 1] = str(folder / "target")
        if "--speculative-draft-model-path" in argv:
            argv[argv.index("--speculative-draft-model-path") + 1] = str(folder / "drafter")
        return [*argv, "--skip-tokenizer-init"], launch.expected

    cases = {name: argv_and_expected(name) for name in ACCEPTED}
    cases["capture"] = argv_and_expected("none", captures=True)
    cases |= {case: argv_and_expected(name, edit) for case, (name, edit, _) in REFUSED.items()}
    shown = subprocess.run(
        [sys.executable, "-c", RESOLVE],
        input=json.dumps({case: argv for case, (argv, _) in cases.items()}),
        capture_output=True,
        text=True,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"},
    )
    lines = [line for line in shown.stdout.splitlines() if line.startswith("RESOLVED ")]
    assert lines, shown.stderr[-3000:]
    found = json.loads(lines[0].removeprefix("RESOLVED "))
    return {case: (found[case], cases[case][1]) for case in cases}


@pytest.mark.engine
@pytest.mark.parametrize("name", ACCEPTED)
def test_sglang_accepts_the_profile_on_blackwell(resolved, name):
    found, expected = resolved[name]
    assert "refused" not in found
    assert (found["tp_size"], found["page_size"], found["kv_cache_dtype"]) == (8, 64, "fp8_e4m3")
    compared = set(expected) & set(found)
    assert len(compared) >= 4
    for key in compared - {"speculative_draft_model_path"}:
        assert found[key] == expected[key], key
    if expected["speculative_algorithm"] == "EAGLE3":
        assert found["speculative_draft_attention_backend"] == "flashinfer"


@pytest.mark.engine
def test_sglang_accepts_a_capture_on_blackwell(resolved):
    found, expected = resolved["capture"]
    assert found["return_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert found["cuda_graph_backend_prefill"] == "disabled"
    for key in set(expected) & set(found):
        assert found[key] == expected[key], key


@pytest.mark.engine
@pytest.mark.parametrize("case", REFUSED)
def test_sglang_refuses_what_the_profile_avoids(resolved, case):
    found, _ = resolved[case]
    assert REFUSED[case][2] in found["refused"]
