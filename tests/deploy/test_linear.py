"""Linear layers of the stand-in against float64, by each of their ways."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from sgl_kernel import linear, native

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


@pytest.fixture(params=["native", "torch"], name="without_instructions")
def _without_instructions(request, monkeypatch):
    """As on a processor without bfloat16 instructions, with and without a compiler there."""
    monkeypatch.setattr(linear, "SUPPORTED", False)
    if request.param == "torch":
        monkeypatch.setattr(native, "_linear", None)
    else:
        assert native._linear is not None, "install a C++ compiler, then the engine again: make install"
    return request.param


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("out", "width"), [(1, 8), (3, 5), (33, 577), (960, 576), (64, 1536)])
@pytest.mark.parametrize("bias", [False, True])
def test_every_number_of_rows_is_as_exact_as_its_type(without_instructions, dtype, out, width, bias, monkeypatch):
    monkeypatch.setattr(linear, "WIDE_WEIGHTS", 7 * width)  # in parts, the last of them smaller
    torch.manual_seed(out)
    layer, _ = layer_of(out, width, dtype, bias)
    for rows in (0, 1, 2, 3, 4, 5, 7, 8, linear.MAX_NATIVE_ROWS, linear.MAX_NATIVE_ROWS + 1, 40):
        x = torch.randn(rows, width).to(dtype)
        exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
        found = linear.linear(layer, x, layer.bias)
        assert found.dtype is dtype and found.shape == exact.shape
        torch.testing.assert_close(found.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
def test_a_row_is_the_same_to_the_bit_whatever_goes_with_it(dtype):
    """Verifying is as decoding: the greedy answers of both must not part at a tie."""
    layer, _ = layer_of(101, 579, dtype)
    x = torch.randn(linear.MAX_NATIVE_ROWS, 579).to(dtype)
    alone = torch.cat([native.multiply(row[None], layer.weight) for row in x])
    for rows in range(1, len(x) + 1):
        assert torch.equal(native.multiply(x[:rows], layer.weight), alone[:rows])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(native.multiply(x, layer.weight), alone)
    finally:
        torch.set_num_threads(threads)


def test_rows_may_lie_anyhow(without_instructions):
    layer, _ = layer_of(64, 48)
    x = torch.randn(2, 96).bfloat16()
    for given in (x[:, ::2], x[:, :48], x.view(2, 2, 48)):
        exact = F.linear(given.double(), layer.weight.double())
        torch.testing.assert_close(linear.linear(layer, given).double(), exact, rtol=8e-3, atol=8e-3)
    assert torch.isnan(linear.linear(layer, torch.full((1, 48), torch.nan).bfloat16())).all()


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
def test_small_and_float32_layers_are_left_alone_where_there_are_instructions(out, width, dtype, monkeypatch):
    monkeypatch.setattr(linear, "SUPPORTED", True)
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
    if case == "plain" or (case == "fp32" and not linear.SUPPORTED):
        torch.testing.assert_close(found, x @ head.weight.T)
    else:
        assert found == "original"
