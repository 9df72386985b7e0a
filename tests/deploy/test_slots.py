"""Cache-slot bookkeeping, against loops over single integers."""

import pytest
import torch
from sgl_kernel import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)

ROWS, WIDTH = 6, 40
REQUESTS = torch.tensor([4, 0, 3])


@pytest.fixture(name="table")
def _table():
    return torch.arange(ROWS * WIDTH, dtype=torch.int32).view(ROWS, WIDTH).flip(1).contiguous() + 1000


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("starts", "ends"), [([3, 0, 7], [5, 4, 7]), ([0, 0, 0], [40, 1, 12])])
def test_new_slots_enter_the_table(table, dtype, starts, ends):
    slots, expected = torch.arange(100, 200, dtype=dtype), table.clone()
    fresh = iter(slots.tolist())
    for request, start, end in zip(REQUESTS.tolist(), starts, ends, strict=True):
        for place in range(start, end):
            expected[request, place] = next(fresh)
    assign_req_to_token_pool_cpu(REQUESTS, table, torch.tensor(starts), torch.tensor(ends), slots, WIDTH)
    assert torch.equal(table, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_are_listed(table, dtype):
    starts, ends = [3, 0, 7], [5, 4, 8]
    out = torch.full((9,), -1, dtype=dtype)
    assign_extend_cache_locs_cpu(REQUESTS, table, torch.tensor(starts), torch.tensor(ends), out, WIDTH)
    spans = zip(REQUESTS.tolist(), starts, ends, strict=True)
    expected = [int(table[request, place]) for request, start, end in spans for place in range(start, end)]
    assert out.tolist() == [*expected, -1, -1]


def test_slots_of_drafts_follow_the_context(table):
    out = torch.full((3 * 6,), -1)
    assign_draft_cache_locs_contiguous_cpu(REQUESTS, table, torch.tensor([5, 0, 30]), out, WIDTH, 2, 3)
    spans = zip(REQUESTS.tolist(), [5, 0, 30], strict=True)
    assert out.tolist() == [int(table[request, start + step]) for request, start in spans for step in range(6)]


@pytest.mark.parametrize(("topk", "steps"), [(1, 4), (3, 2), (4, 5)])
def test_every_branch_sees_the_context_and_itself(table, topk, steps):
    lengths = [5, 0, 19]
    out = build_draft_decode_metadata_cpu(table, REQUESTS, torch.tensor(lengths), topk, steps, WIDTH)
    assert out.shape == (len(lengths) * topk, WIDTH)
    assert out.dtype == table.dtype
    for b, (request, length) in enumerate(zip(REQUESTS.tolist(), lengths, strict=True)):
        for branch in range(topk):
            for place in range(length + steps):
                own = length + branch * steps + place - length
                expected = table[request, place if place < length else own]
                assert out[b * topk + branch, place] == expected


def test_bonus_tokens():
    tokens, lengths = torch.arange(12, dtype=torch.int32).view(3, 4), torch.tensor([1, 4, 2], dtype=torch.int32)
    out = torch.full((3,), -1)
    fill_bonus_tokens_cpu(tokens, lengths, out, 4)
    assert out.tolist() == [int(tokens[b, n - 1]) for b, n in enumerate(lengths.tolist())]


def test_slots_of_accepted_nodes():
    index = torch.tensor([[0, 2, -1], [4, -1, -1], [8, 9, 11]], dtype=torch.int32)
    slots, out = torch.arange(500, 512), torch.full((9,), -1)
    fill_accept_out_cache_loc_cpu(index, slots, out)
    assert out.tolist() == [500, 502, 504, 508, 509, 511, -1, -1, -1]


@pytest.mark.parametrize("selected", [None, [2, 2, 6]])
def test_rotation(selected):
    ids, starts, lengths, new = torch.arange(10, 18), [0, 3, 3], [3, 0, 5], [[71], [72], [73]]
    expected = ids.tolist()
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length:
            before = expected[start : start + length]
            expected[start : start + length - 1] = before[1:]
            expected[start + length - 1 if selected is None else selected[b]] = new[b][0]
    rotate_input_ids_cpu(
        ids, torch.tensor(starts), torch.tensor(lengths), torch.tensor(new),
        None if selected is None else torch.tensor(selected),
    )  # fmt: skip
    assert ids.tolist() == expected


@pytest.mark.parametrize(
    ("target", "source"),
    [([5, 6, 7], [6, 7, 9]), ([7, 6, 5], [5, 7, 6]), ([3, 4], [3, 4]), ([3, 4, 5], [3, 8, 9]), ([], [])],
    ids=["downwards", "in a circle", "not at all", "in part", "nothing"],
)
def test_rows_of_the_cache_move_in_every_layer(target, source):
    buffers = [torch.randn(12, 3, 8), torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 2, 7).bfloat16()]
    expected = []
    for buffer in buffers:
        moved = buffer.clone()
        for to, place in zip(target, source, strict=True):
            moved[to] = buffer[place]
        expected.append(moved)
    copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers]),
        torch.tensor([buffer[0].numel() * buffer.itemsize for buffer in buffers]),
        torch.tensor(target, dtype=torch.int64), torch.tensor(source, dtype=torch.int64),
    )  # fmt: skip
    for buffer, moved in zip(buffers, expected, strict=True):
        assert torch.equal(buffer, moved)
