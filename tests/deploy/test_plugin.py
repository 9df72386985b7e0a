"""What the plugin replaces in SGLang: equal to the original, and loud where SGLang has changed."""

import re
import subprocess
import sys

import pytest
import torch
from sgl_kernel import plugin, rotary

BASE = "sglang.srt.layers.rotary_embedding.base"


@pytest.fixture(name="rope", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def _rope(sglang, request):
    return sglang(BASE).RotaryEmbedding(64, 64, 300, 10000, True, request.param)


@pytest.mark.parametrize("rows", [1, 4, 33])
def test_rotation_equals_the_original_to_the_bit(sglang, rope, rows):
    positions = torch.randperm(300)[:rows]
    qkv = torch.randn(rows, 9 * 64 + 2 * 3 * 64).to(rope.dtype)
    query, key, _ = qkv.split([9 * 64, 3 * 64, 3 * 64], dim=-1)
    forward = rotary.forward_of(type(rope), forbidden)
    for _ in range(2):  # the second time with tables that are there already
        found = forward(rope, positions, query, key)
        expected = rope.forward_native(positions, query, key)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        assert found[0].is_contiguous()
        assert found[1].is_contiguous()


def test_rotation_follows_a_cache_that_grew(rope):
    query, key, forward = torch.randn(1, 64).to(rope.dtype), torch.randn(1, 64).to(rope.dtype), rotary.forward_of
    forward(type(rope), forbidden)(rope, torch.tensor([299]), query, key)
    rope._ensure_cos_sin_cache_length(1000)
    found = forward(type(rope), forbidden)(rope, torch.tensor([900]), query, key)
    assert torch.equal(found[0], rope.forward_native(torch.tensor([900]), query, key)[0])


def forbidden(*args):
    raise AssertionError("the original must not run")


@pytest.mark.parametrize("case", ["gptj", "partial", "offsets", "subclass"])
def test_unusual_rotations_are_left_to_the_original(sglang, case):
    base = sglang(BASE).RotaryEmbedding

    class Other(base):
        def forward_native(self, *args):
            return "other"

    made = Other if case == "subclass" else base
    rope = made(64, 32 if case == "partial" else 64, 300, 10000, case != "gptj", torch.float32)
    offsets = torch.tensor([3]) if case == "offsets" else None
    forward = rotary.forward_of(base, lambda *args: ("original", args[-2] is offsets))
    query = torch.randn(1, 128)
    assert forward(rope, torch.tensor([5]), query, query, offsets) == ("original", True)


def run(code):
    """Run Python as one of the engine's processes would be run."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_PLUGINS": "eyas_cpu_engine"},
    )


LOAD = "from sglang.srt.plugins import load_plugins; load_plugins(); load_plugins(); print('went on')"


def test_sglang_loads_the_plugin_and_it_says_so_once():
    shown = run(
        f"{LOAD}\n"
        "import sglang.srt.speculative.eagle_utils as eagle, sglang.srt.layers.quantization.unquant as unquant\n"
        "from sgl_kernel import linear, sampling\n"
        "assert eagle.tree_speculative_sampling_target_only.__func__ is sampling.Verifier.accept\n"
        "assert not eagle._verify_uses_greedy(\n"
        "    is_all_greedy=False, is_cpu=True, is_hip=False, is_xpu=False, use_rejection_sampling=False)\n"
        "assert eagle._verify_uses_greedy(\n"
        "    is_all_greedy=True, is_cpu=True, is_hip=False, is_xpu=False, use_rejection_sampling=False)\n"
        "assert unquant.UnquantizedLinearMethod.apply is linear.apply\n"
        "import torch\n"
        "from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding\n"
        "rope = RotaryEmbedding(64, 64, 300, 10000, True, torch.float32)\n"
        "rope(torch.tensor([5]), torch.randn(1, 64), torch.randn(1, 64))\n"
        "assert '_eyas_tables' in rope.__dict__, 'SGLang dispatches past the replacement'\n"
        "print('patched')"
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.split("\n")[-3:] == ["went on", "patched", ""]
    assert shown.stderr.count("eyas CPU stand-in for sgl_kernel 0.1.0: ") == 1


BREAKAGES = {
    "gone": ("del eagle._verify_coins", "has no _verify_coins"),
    "other parameters": (
        "eagle._verify_coins = lambda sampling_info, seq_lens: None",
        "_verify_coins takes (sampling_info seq_lens), expected (sampling_info seq_lens draft_token_num",
    ),
    "not called any more": (
        "eagle.eagle_sample = lambda verify_input, batch: eagle._verify_coins",
        "no longer calls _verify_uses_greedy, top_k_renorm_prob",
    ),
    "implemented by SGLang": (
        "eagle.top_p_renorm_prob = lambda probs, top_ps: probs",
        "top_p_renorm_prob has an implementation on this CPU",
    ),
}


@pytest.fixture(name="pristine")
def _pristine(sglang, monkeypatch):
    """SGLang's modules, with whatever a test and the plugin do to them undone afterwards."""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    eagle = sglang(plugin.EAGLE)
    for name in (*plugin.VERIFY_CALLS, "eagle_sample"):
        monkeypatch.setattr(eagle, name, getattr(eagle, name))
    return eagle


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_changed_sglang_is_told_apart(pristine, breakage):
    change, reason = BREAKAGES[breakage]
    exec(change, {"eagle": pristine})
    with pytest.raises(SystemExit) as stopped:
        plugin.register()
    assert reason in stopped.value.code
    assert stopped.value.code.startswith("eyas-cpu-engine 0.1.0 does not fit this SGLang: ")
    assert stopped.value.code.endswith("install sglang==0.5.23")


@pytest.mark.parametrize(
    ("module", "path", "reason"),
    [
        ("sglang.nothing", "f", "sglang.nothing cannot be imported"),
        (BASE, "Rotation.forward", "base has no Rotation.forward"),
        (BASE, "RotaryEmbedding.turn", "base has no RotaryEmbedding.turn"),
    ],
)
def test_a_missing_module_class_or_method_is_told_apart(sglang, module, path, reason):
    with pytest.raises(plugin.Changed, match=re.escape(reason)):
        plugin.owner_of(module, path)
    assert plugin.owner_of(BASE, "RotaryEmbedding.forward_native")[0] is sglang(BASE).RotaryEmbedding


def test_the_process_ends_although_sglang_swallows_exceptions():
    shown = run(f"import sglang.srt.speculative.eagle_utils as eagle; {BREAKAGES['gone'][0]}; {LOAD}")
    assert shown.returncode == 1
    assert "went on" not in shown.stdout
    assert shown.stderr.splitlines()[-1].startswith("eyas-cpu-engine 0.1.0 does not fit this SGLang: ")


def test_without_the_cpu_engine_the_plugin_does_nothing(monkeypatch):
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(plugin, "patch_sampling", forbidden)
    plugin.register()
