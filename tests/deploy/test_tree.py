"""Building, verifying and recovering draft trees, against versions that follow one path at a time."""

import random

import pytest
import torch
from sgl_kernel import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu
from sgl_kernel.speculative import reconstruct_indices_from_tree_mask

FULL_MASK, QLEN_ONLY, BITPACKED = 0, 1, 2


class Beam:
    """A beam as EAGLE grows it: every step extends the topk best of the last step's candidates by topk each.

    Candidate numbers run on from step to step. `parents` holds, for each group of topk candidates, the candidate that
    the group extends; `path[c]` all candidates from the root to c, itself included.
    """

    def __init__(self, topk, depth, rng):
        self.parents, self.path = [-1], {c: (c,) for c in range(topk)}
        level = list(range(topk))
        for _ in range(depth - 1):
            kept = level if len(level) == topk else rng.sample(level, topk)
            level = []
            for parent in kept:
                first = len(self.path)
                self.parents.append(parent)
                for child in range(first, first + topk):
                    self.path[child] = (*self.path[parent], child)
                    level.append(child)
        self.size = len(self.path)

    def choose(self, count, rng):
        """`count` candidates such that the path of each is chosen too, as scores that only fall ensure."""
        chosen = set()
        while len(chosen) < count:
            free = [c for c, path in self.path.items() if c not in chosen and set(path[:-1]) <= chosen]
            chosen.add(rng.choice(free))
        return sorted(chosen)


def children(next_token, next_sibling, node):
    """The children of a node by its links, in order."""
    found, child = [], next_token[node]
    while child != -1:
        found.append(child)
        child = next_sibling[child]
    return found


def build(topk, depth, size, lengths, mode, seed):
    """Build trees from random beams. Returns them with their beams and chosen candidates."""
    rng = random.Random(seed)
    beams = [Beam(topk, depth, rng) for _ in lengths]
    chosen = [beam.choose(size - 1, rng) for beam in beams]
    batch = len(lengths)
    cells = sum(size * (size if mode == QLEN_ONLY else length + size) for length in lengths)
    mask = torch.ones(cells, dtype=torch.bool)
    positions = torch.full((batch * size,), -7)
    links = torch.full((3, batch, size), -1)
    build_tree_kernel_efficient_cpu(
        torch.tensor([beam.parents for beam in beams]), torch.tensor(chosen), torch.tensor(lengths), mask, positions,
        links[0], links[1], links[2], topk, depth, size, mode,
    )  # fmt: skip
    return beams, chosen, mask, positions, links


@pytest.mark.parametrize("mode", [FULL_MASK, QLEN_ONLY])
@pytest.mark.parametrize(
    ("topk", "depth", "size"), [(1, 1, 2), (1, 3, 4), (2, 3, 6), (4, 3, 8), (4, 5, 32), (3, 2, 12)]
)
@pytest.mark.parametrize("seed", range(3))
def test_build(topk, depth, size, mode, seed):
    lengths = [5, 11, 8]
    beams, chosen, mask, positions, links = build(topk, depth, size, lengths, mode, seed)
    at = 0
    for b, length in enumerate(lengths):
        width = size if mode == QLEN_ONLY else length + size
        view = mask[at : at + size * width].view(size, width)
        at += size * width
        assert view[:, : width - size].all(), "the columns of the context stay as they were"
        paths = [(), *(beams[b].path[c] for c in chosen[b])]
        node = {path: number for number, path in enumerate(paths)}
        for number, path in enumerate(paths):
            above = {node[path[:end]] for end in range(len(path) + 1)}
            assert set(view[number, width - size :].nonzero().flatten().tolist()) == above
            assert positions[b * size + number] == length + len(path)
            expected = [n for other, n in node.items() if len(other) == len(path) + 1 and other[: len(path)] == path]
            assert children(links[1, b].tolist(), links[2, b].tolist(), number) == sorted(expected)
        assert links[0, b].tolist() == list(range(b * size, (b + 1) * size))


def test_a_bit_packed_mask_is_refused():
    with pytest.raises(NotImplementedError, match="bit-packed"):
        build(2, 2, 4, [3], BITPACKED, 0)


def greedy_path(tokens, kids, chosen, most):
    """The longest path of nodes from the root whose tokens the target chose: all paths are tried."""
    best, open_paths = [0], [[0]]
    while open_paths:
        path = open_paths.pop()
        if len(path) > len(best):
            best = path
        if len(path) < most:
            open_paths += [[*path, kid] for kid in kids[path[-1]] if tokens[kid] == chosen[path[-1]]]
    return best


@pytest.mark.parametrize(("topk", "depth", "size"), [(1, 3, 4), (2, 3, 6), (4, 3, 8), (4, 5, 32)])
@pytest.mark.parametrize("seed", range(5))
def test_verify(topk, depth, size, seed):
    rng, lengths = random.Random(seed), [5, 11, 8, 2]
    *_, links = build(topk, depth, size, lengths, QLEN_ONLY, seed)
    candidates = torch.zeros((len(lengths), size), dtype=torch.int64)
    for b in range(len(lengths)):  # children of one node differ in their tokens
        candidates[b, 0] = 99
        for node in range(size):
            kids = children(links[1, b].tolist(), links[2, b].tolist(), node)
            candidates[b, kids] = torch.tensor(rng.sample(range(topk + 1), len(kids)), dtype=torch.int64)
    target = torch.tensor([[rng.randrange(topk + 1) for _ in range(size)] for _ in lengths])
    predicts = torch.zeros(len(lengths) * size, dtype=torch.int32)
    accept_index = torch.full((len(lengths), depth + 1), -1, dtype=torch.int32)
    accepted = torch.full((len(lengths),), -7, dtype=torch.int32)
    verify_tree_greedy_cpu(
        predicts=predicts, accept_index=accept_index, accept_token_num=accepted, candidates=candidates,
        retrive_index=links[0], retrive_next_token=links[1], retrive_next_sibling=links[2], target_predict=target,
    )  # fmt: skip
    for b in range(len(lengths)):
        kids = [children(links[1, b].tolist(), links[2, b].tolist(), node) for node in range(size)]
        path = greedy_path(candidates[b].tolist(), kids, target[b].tolist(), depth + 1)
        assert accepted[b] == len(path) - 1
        assert accept_index[b].tolist() == [b * size + node for node in path] + [-1] * (depth + 1 - len(path))
        assert [predicts[b * size + node] for node in path] == [target[b, node] for node in path]


def recovered(mask, length):
    """Positions and links of one tree by the definitions: a node's parent is the last earlier node that it sees."""
    size = len(mask)
    parent = [max((j for j in range(i) if mask[i][j]), default=-1) for i in range(size)]
    positions = [length + sum(mask[i][:i]) for i in range(size)]
    first = [next((k for k in range(size) if parent[k] == i), -1) for i in range(size)]
    sibling = [
        next((k for k in range(i + 1, size) if parent[k] == parent[i] >= 0), -1) for i in range(size)
    ]  # fmt: skip
    return positions, first, sibling


@pytest.mark.parametrize("size", [1, 2, 8, 16])
@pytest.mark.parametrize("orphans", [False, True], ids=["tree", "with orphans"])
def test_recover_from_the_mask(size, orphans):
    rng, lengths, masks = random.Random(size), [4, 9, 23], []
    for _ in lengths:
        mask = [[i == j for j in range(size)] for i in range(size)]
        for node in range(1, size):
            if orphans and rng.random() < 0.3:
                continue
            for seen, visible in enumerate(mask[rng.randrange(node)]):
                mask[node][seen] |= visible
        masks.append(mask)
    positions = torch.full((len(lengths) * size,), -7)
    links = [torch.full((len(lengths), size), -7) for _ in range(3)]
    reconstruct_indices_from_tree_mask(
        torch.tensor(masks).view(-1), torch.tensor(lengths), positions, *links, len(lengths), size
    )
    for b, length in enumerate(lengths):
        expected = recovered(masks[b], length)
        assert positions.view(-1, size)[b].tolist() == expected[0]
        assert (links[1][b].tolist(), links[2][b].tolist()) == expected[1:]
        assert links[0][b].tolist() == list(range(b * size, (b + 1) * size))
