"""What the plugin replaces in SGLang: equal to the original, and loud where SGLang has changed."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from sgl_kernel import linear, plugin, rotary

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


def layer_of(out, width, dtype=torch.bfloat16, bias=False):
    layer = torch.nn.Linear(width, out, bias=bias).to(dtype).requires_grad_(False)
    return layer, torch.randn(4, width).to(dtype)


@pytest.mark.parametrize("rows", [1, 4, linear.MAX_ROWS, linear.MAX_ROWS + 1])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_product_is_as_exact_as_torchs_own(rows, bias):
    layer, _ = layer_of(960, 576, bias=bias)
    x = torch.randn(rows, 576).bfloat16()
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    ours = (linear.linear(layer, x, layer.bias).double() - exact).abs().max()
    theirs = (F.linear(x, layer.weight, layer.bias).double() - exact).abs().max()
    assert ours <= 1.1 * theirs + 1e-3
    assert ("_eyas_packed" in layer.__dict__) == (linear.SUPPORTED and rows <= linear.MAX_ROWS)


@pytest.mark.parametrize(("out", "width", "dtype"), [(64, 64, torch.bfloat16), (960, 576, torch.float32)])
def test_small_and_float32_layers_are_left_alone(out, width, dtype):
    layer, x = layer_of(out, width, dtype)
    assert torch.equal(linear.linear(layer, x), F.linear(x, layer.weight))
    assert "_eyas_packed" not in layer.__dict__


def test_new_weights_are_packed_anew():
    layer, x = layer_of(960, 576)
    before = linear.linear(layer, x)

    def load():  # as weight loaders do, which leaves no trace on the parameter
        layer.weight.data.copy_(layer.weight.data * 2)

    linear.invalidating(load)()
    torch.testing.assert_close(linear.linear(layer, x), before * 2)

    def fail():
        load()
        raise OSError("half way")

    with pytest.raises(OSError, match="half way"):
        linear.invalidating(fail)()
    torch.testing.assert_close(linear.linear(layer, x), before * 4)
    layer.weight = torch.nn.Parameter(layer.weight.data / 4, requires_grad=False)
    torch.testing.assert_close(linear.linear(layer, x), before)


@pytest.mark.parametrize("case", ["plain", "fp32 head", "on policy", "bias", "fp32", "no weight"])
def test_the_head_is_packed_only_where_the_original_multiplies_plainly(case):
    head, x = layer_of(960, 576, torch.float32 if case == "fp32" else torch.bfloat16)
    processor = SimpleNamespace(
        use_fp32_lm_head=case == "fp32 head", rl_on_policy_target="x" if case == "on policy" else None
    )
    compute = linear.head_of(lambda self, hidden, lm_head, bias, out: "original")
    asked = SimpleNamespace() if case == "no weight" else head
    found = compute(processor, x, asked, torch.zeros(960) if case == "bias" else None)
    if case == "plain":
        torch.testing.assert_close(found, x @ head.weight.T)
    else:
        assert found == "original"


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
