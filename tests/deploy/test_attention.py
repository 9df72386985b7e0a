"""The stand-in's attention against a loop over rows and heads in float64, for every shape that SGLang asks of it."""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import sgl_kernel  # noqa: F401  registers torch.ops.sgl_kernel
import torch
from sgl_kernel import native

PROCESSOR = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Heads:
    """Query heads, KV heads, head width, width of a value, and whether values are the keys' first columns (MLA)."""

    query: int
    kv: int
    width: int
    value: int
    latent: bool = False


LAYOUTS = {
    "mha": Heads(4, 4, 16, 16),
    "gqa": Heads(6, 2, 16, 16),
    "mqa": Heads(4, 1, 8, 8),
    "mla": Heads(4, 1, 24, 16, latent=True),
    "narrow": Heads(4, 2, 16, 8),
}


@pytest.fixture(params=["native", "torch"], autouse=True, name="through")
def _through(request, monkeypatch):
    """Each test runs through the compiled attention, and through torch as where there is no compiler."""
    if request.param == "torch":
        monkeypatch.setattr(native, "_attention", None)
    else:
        assert native._attention is not None, "install a C++ compiler, then the engine again: make install"
    return request.param


@pytest.fixture(params=LAYOUTS, name="heads")
def _heads(request):
    return LAYOUTS[request.param]


@pytest.fixture(params=TOLERANCE, ids=["fp32", "bf16"], name="dtype")
def _dtype(request):
    return request.param


class Pool:
    """A cache with every slot filled, and a table that gives each request slots in no order."""

    def __init__(self, heads, dtype, requests, length=64):
        self.heads, self.dtype = heads, dtype
        self.random = torch.Generator().manual_seed(0)
        slots = requests * length + 8
        self.keys = self.noise(slots, heads.kv, heads.width)
        self.values = self.keys[..., : heads.value] if heads.latent else self.noise(slots, heads.kv, heads.value)
        order = torch.randperm(slots, generator=self.random).int()
        self.table = torch.zeros((requests + 2, length + 7), dtype=torch.int32)
        self.rows = torch.randperm(requests + 2, generator=self.random)[:requests]
        for number, row in enumerate(self.rows.tolist()):
            self.table[row, :length] = order[number * length : (number + 1) * length]

    def noise(self, *shape):
        return torch.randn(shape, generator=self.random).to(self.dtype)

    def slots(self, request, start, end):
        return self.table[self.rows[request], start:end].long()


def reference(q, keys, values, seen, scale, cap=0.0, sinks=None):
    """q [T, H, D]; keys [N, K, D]; values [N, K, V]; seen [T, N]. One row and head at a time."""
    q, keys, values = q.double(), keys.double(), values.double()
    out = torch.zeros(q.shape[0], q.shape[1], values.shape[2], dtype=torch.float64)
    group = q.shape[1] // keys.shape[1]
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            scores = keys[:, head // group] @ q[row, head] * scale
            if cap:
                scores = cap * torch.tanh(scores / cap)
            weights = [math.exp(score) if visible else 0.0 for score, visible in zip(scores, seen[row], strict=True)]
            total = sum(weights) + (math.exp(sinks[head]) if sinks is not None else 0.0)
            for place, weight in enumerate(weights):
                out[row, head] += weight / total * values[place, head // group]
    return out


def decode(pool, lengths, window=0, cap=0.0, sinks=None, store=True):
    """Run the op on one new token a request; returns what it wrote, and what it should have."""
    heads, batch = pool.heads, len(lengths)
    q, key = pool.noise(batch, heads.query, heads.width), pool.noise(batch, heads.kv * heads.width)
    latent = key.view(batch, heads.kv, heads.width)[..., : heads.value].reshape(batch, -1)
    value = latent if heads.latent else pool.noise(batch, heads.kv * heads.value)
    loc = torch.cat([pool.slots(b, n - 1, n) for b, n in enumerate(lengths)])
    keys, values = pool.keys.clone(), pool.values.clone()
    if store:
        keys[loc] = key.view(batch, heads.kv, heads.width)
        values[loc] = value.view(batch, heads.kv, heads.value)
    out = torch.full((batch, heads.query, heads.value), math.nan, dtype=pool.dtype)
    torch.ops.sgl_kernel.decode_attention_cpu(
        q, pool.keys, pool.values, 1.0, 1.0, out, key if store else None, value if store else None, loc,
        torch.empty(0), pool.table, pool.rows, torch.tensor(lengths), 0.3, cap, False, window, None, sinks,
    )  # fmt: skip
    assert torch.equal(pool.keys, keys)
    assert torch.equal(pool.values, values)
    expected = []
    for b, length in enumerate(lengths):
        slots = pool.slots(b, 0, length)
        seen = torch.ones((1, length), dtype=torch.bool)
        if window > 0:
            seen[:, : max(0, length - window)] = False
        expected.append(reference(q[b : b + 1], keys[slots], values[slots], seen, 0.3, cap, sinks))
    return out, torch.cat(expected)


def extend(pool, prefixes, lengths, trees=None, window=0, cap=0.0, sinks=None, causal=True, given=True, gap=0):
    """Run the op on `lengths` new tokens after `prefixes` cached ones; returns what it wrote, and should have."""
    heads = pool.heads
    ends = [p + n for p, n in zip(prefixes, lengths, strict=True)]
    starts = [sum(lengths[:b]) + b * gap for b in range(len(lengths))]
    total = starts[-1] + lengths[-1]
    q, key = pool.noise(total, heads.query, heads.width), pool.noise(total, heads.kv, heads.width)
    value = key[..., : heads.value].contiguous() if heads.latent else pool.noise(total, heads.kv, heads.value)
    keys, values = pool.keys.clone(), pool.values.clone()
    for b, (prefix, end, start) in enumerate(zip(prefixes, ends, starts, strict=True)):
        keys[pool.slots(b, prefix, end)] = key[start : start + end - prefix]
        values[pool.slots(b, prefix, end)] = value[start : start + end - prefix]
    if not given:
        pool.keys.copy_(keys)
        if not heads.latent:
            pool.values.copy_(values)
    out = torch.full((total, heads.query, heads.value), math.nan, dtype=pool.dtype)
    mask = None if trees is None else torch.cat([tree.reshape(-1) for tree in trees])
    torch.ops.sgl_kernel.extend_attention_cpu(
        q, key.view(total, -1) if given else None, value.view(total, -1) if given else None, out, pool.keys,
        pool.values, 1.0, 1.0, pool.table, pool.rows, torch.tensor(ends), torch.tensor(lengths), torch.tensor(starts),
        max(lengths), 0.3, cap, False, window, None, sinks, mask, causal,
    )  # fmt: skip
    expected = torch.full((total, heads.query, heads.value), math.nan, dtype=torch.float64)
    for b, (prefix, length, start) in enumerate(zip(prefixes, lengths, starts, strict=True)):
        slots = pool.slots(b, 0, prefix + length)
        seen = torch.zeros((length, prefix + length), dtype=torch.bool)
        for row in range(length):
            for place in range(prefix + length):
                if place < prefix:
                    visible = True
                elif trees is not None:
                    visible = bool(trees[b][row, place - prefix])
                else:
                    visible = place <= prefix + row or not causal
                seen[row, place] = visible and (window <= 0 or place > prefix + row - window)
        own = slice(start, start + length)
        expected[own] = reference(q[own], keys[slots], values[slots], seen, 0.3, cap, sinks)
    return out, expected


def random_tree(size, seed):
    """A visibility mask: each node sees itself, its parent's ancestors and its parent."""
    random = torch.Generator().manual_seed(seed)
    mask = torch.eye(size, dtype=torch.bool)
    for node in range(1, size):
        mask[node] |= mask[int(torch.randint(node, (1,), generator=random))]
    return mask


def check(found, dtype):
    out, expected = found
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True)


@pytest.mark.parametrize("lengths", [[1], [40], [3, 3], [17, 12, 20], [1, 60, 2]], ids=str)
def test_decode(heads, dtype, lengths):
    check(decode(Pool(heads, dtype, len(lengths)), lengths), dtype)


def test_decode_with_the_key_stored_already(heads, dtype):
    check(decode(Pool(heads, dtype, 2), [9, 30], store=False), dtype)


@pytest.mark.parametrize("window", [1, 5, 100])
@pytest.mark.parametrize("lengths", [[30], [30, 4, 25]], ids=str)
def test_decode_in_a_sliding_window(heads, dtype, window, lengths):
    check(decode(Pool(heads, dtype, len(lengths)), lengths, window=window), dtype)


def test_decode_with_logit_cap_and_sinks(heads, dtype):
    sinks = torch.linspace(-1, 2, heads.query)
    check(decode(Pool(heads, dtype, 2), [20, 7], cap=1.5), dtype)
    check(decode(Pool(heads, dtype, 2), [20, 7], cap=1.5, sinks=sinks), dtype)


def test_decode_of_an_empty_batch():
    pool = Pool(LAYOUTS["gqa"], torch.float32, 1)
    pool.rows = pool.rows[:0]
    empty, none = torch.empty((0, 6, 16)), torch.empty(0, dtype=torch.int64)
    torch.ops.sgl_kernel.decode_attention_cpu(
        empty, pool.keys, pool.values, 1.0, 1.0, empty, None, None, none, torch.empty(0), pool.table, pool.rows, none,
        1.0, 0.0, False, 0, None, None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("prefixes", "lengths"),
    [([0], [1]), ([0], [20]), ([0], [50]), ([13], [1]), ([13], [6]), ([5], [45]), ([0, 0], [8, 8]), ([0, 9], [7, 3]),
     ([0, 0], [40, 40]), ([5, 9], [40, 40]), ([8, 11, 9], [4, 4, 4]), ([50, 1], [4, 4]), ([3, 0, 7], [1, 1, 1])],
    ids=str,
)  # fmt: skip
def test_extend(heads, dtype, prefixes, lengths):
    check(extend(Pool(heads, dtype, len(lengths)), prefixes, lengths), dtype)


def test_extend_leaves_rows_between_requests_alone(heads, dtype):
    check(extend(Pool(heads, dtype, 2), [8, 11], [4, 4], gap=3), dtype)


def test_extend_that_sees_everything(heads, dtype):
    check(extend(Pool(heads, dtype, 2), [4, 9], [5, 5], causal=False), dtype)


def test_extend_from_the_cache_alone(heads, dtype):
    check(extend(Pool(heads, dtype, 2), [4, 9], [5, 3], given=False), dtype)


@pytest.mark.parametrize("prefixes", [[0], [30], [11, 9, 14], [50, 0]], ids=str)
def test_extend_along_a_tree(heads, dtype, prefixes):
    trees = [random_tree(8, seed) for seed in range(len(prefixes))]
    check(extend(Pool(heads, dtype, len(prefixes)), prefixes, [8] * len(prefixes), trees), dtype)


@pytest.mark.parametrize("window", [1, 6, 100])
def test_extend_in_a_sliding_window(heads, dtype, window):
    check(extend(Pool(heads, dtype, 2), [10, 12], [5, 5], window=window), dtype)
    check(extend(Pool(heads, dtype, 1), [0], [40], window=window), dtype)


def test_extend_with_logit_cap_and_sinks(heads, dtype):
    sinks = torch.linspace(-1, 2, heads.query)
    trees = [random_tree(6, seed) for seed in range(2)]
    check(extend(Pool(heads, dtype, 2), [10, 12], [6, 6], trees, cap=1.5), dtype)
    check(extend(Pool(heads, dtype, 2), [0, 12], [6, 4], cap=1.5, sinks=sinks), dtype)


def test_mla_heads_that_are_not_absorbed(dtype):
    """Without a cached prefix, MLA may attend with ordinary heads while its cache holds latent rows."""
    pool, absorbed = Pool(LAYOUTS["mla"], dtype, 1), Heads(4, 4, 12, 8)
    q, k = pool.noise(9, 4, absorbed.width), pool.noise(9, 4, absorbed.width)
    v, out = pool.noise(9, 4, absorbed.value), torch.zeros((9, 4, absorbed.value), dtype=dtype)
    torch.ops.sgl_kernel.extend_attention_cpu(
        q, k, v, out, pool.keys, pool.values, 1.0, 1.0, pool.table, pool.rows, torch.tensor([9]), torch.tensor([9]),
        torch.tensor([0]), 9, 0.3, 0.0, False, 0, None, None, None, True,
    )  # fmt: skip
    check((out, reference(q, k, v, torch.ones((9, 9), dtype=torch.bool).tril(), 0.3)), dtype)


def verified_and_decoded(heads, dtype, prefix, rows, trees=None):
    """What rows verified at once give, and what they give decoded one by one."""
    pool = Pool(heads, dtype, 1, length=prefix + rows)
    q, key = pool.noise(rows, heads.query, heads.width), pool.noise(rows, heads.kv * heads.width)
    value = key if heads.latent else pool.noise(rows, heads.kv * heads.value)
    value = value.view(rows, heads.kv, -1)[..., : heads.value].reshape(rows, -1)
    one_by_one = torch.zeros((rows, heads.query, heads.value), dtype=dtype)
    at_once = torch.zeros_like(one_by_one)
    for row in range(rows):
        here, end = slice(row, row + 1), prefix + row + 1
        torch.ops.sgl_kernel.decode_attention_cpu(
            q[here], pool.keys, pool.values, 1.0, 1.0, one_by_one[here], key[here], value[here],
            pool.slots(0, end - 1, end), torch.empty(0), pool.table, pool.rows, torch.tensor([end]), 0.3, 0.0, False,
            0, None, None,
        )  # fmt: skip
    torch.ops.sgl_kernel.extend_attention_cpu(
        q, key, value, at_once, pool.keys, pool.values, 1.0, 1.0, pool.table, pool.rows, torch.tensor([prefix + rows]),
        torch.tensor([rows]), torch.tensor([0]), rows, 0.3, 0.0, False, 0, None, None, None, True,
    )  # fmt: skip
    return at_once, one_by_one


@pytest.mark.parametrize("rows", [2, 4, 8])
@pytest.mark.parametrize("prefix", [3, 30, 700])
def test_verification_sees_what_decoding_sees(heads, prefix, rows):
    """In fp32 both then choose the same tokens, near ties apart."""
    at_once, one_by_one = verified_and_decoded(heads, torch.float32, prefix, rows)
    torch.testing.assert_close(at_once, one_by_one, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [2, 4, 8, 13])
@pytest.mark.parametrize("prefix", [3, 20, 24, 30, 63, 505, 511, 700, 1020])
@pytest.mark.parametrize(
    "heads", [Heads(9, 3, 64, 64), Heads(8, 1, 64, 64), Heads(40, 1, 64, 64), Heads(8, 1, 96, 64, latent=True)], ids=str
)
def test_verification_equals_decoding_to_the_bit(heads, dtype, prefix, rows, through):
    if through == "torch" and not (dtype == torch.bfloat16 and "amx_bf16" in PROCESSOR):
        return  # torch's own kernels hold it for bfloat16 with AMX alone
    assert torch.equal(*verified_and_decoded(heads, dtype, prefix, rows))


def test_what_the_stand_in_cannot_do_is_refused():
    pool = Pool(LAYOUTS["gqa"], torch.float32, 1)
    arguments = [
        pool.noise(1, 6, 16), pool.keys, pool.values, 1.0, 1.0, torch.zeros(1, 6, 16), None, None, torch.tensor([0]),
        torch.empty(0), pool.table, pool.rows, torch.tensor([3]), 0.3, 0.0, True, 0, None, None,
    ]  # fmt: skip
    with pytest.raises(NotImplementedError, match="no cross attention"):
        torch.ops.sgl_kernel.decode_attention_cpu(*arguments)
    arguments[15], arguments[1] = False, pool.keys.half()
    with pytest.raises(NotImplementedError, match="leave out --kv-cache-dtype"):
        torch.ops.sgl_kernel.decode_attention_cpu(*arguments)
