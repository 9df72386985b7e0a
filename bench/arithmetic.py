"""The arithmetic that one step of EAGLE-3's training-time test needs, counted, and how fast this machine multiplies.

Counted are the products of matrices of the leanest formulation known here; norms, softmax, the optimiser and whatever
is computed twice are not. Against the rate that plain products of those very shapes reach, the count says what share
of the machine a trainer uses, and one that computes less than another profits nowhere from what it wastes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """A drafter's sizes. aux: hidden states that the target hands over at each position."""

    hidden: int
    intermediate: int
    heads: int
    head_dim: int
    draft_vocab: int
    target_vocab: int
    aux: int = 3


@dataclass(frozen=True)
class Product:
    """`rows` inputs times a weight of [out, inner]: 2 rows inner out floating point operations."""

    rows: int
    inner: int
    out: int
    kind: str  # "forward"; "input", its gradient to the inputs; "weight", its gradient to the weight

    @property
    def operations(self) -> int:
        return 2 * self.rows * self.inner * self.out


def needed_products(shape: Shape, ends: list[int], steps: int, scored: list[int], labels: int) -> list[Product]:
    """The products with weights of one step over documents whose last generated token is at `ends`.

    Row i predicts the token at i + 2 + k in step k, so a document whose last generated token is at e has
    n_k = max(0, e - 1 - k) rows in step k. N_k is their sum, U the draft vocabulary, H hidden, A = aux H, D = heads
    times head_dim, I the MLP's width, and all three directions are forward, to the inputs and to the weight:

        fc                N_0 rows, A to H            forward, weight (the target's features are not trained)
        q k v of tokens   N_0 rows, H to 3 D          forward, weight: a row's token in step k is the one that the row
                                                      k further on had in step 0. The gradient of the norm before it
                                                      follows from the weight's: dL/dg_h = sum_y W_yh dL/dW_yh / g_h
        q k v of states   N_k rows, H to 3 D          all three, in each step
        o                 N_k rows, D to H            all three, in each step
        gate, up          N_k rows, H to I            all three, in each step; down: I to H
        head              `scored[k]` rows, H to U    forward, input (frozen), in each step
        teacher           `labels` rows, H to U       forward, once for all steps
    """
    rows = [sum(max(0, end - 1 - k) for end in ends) for k in range(steps)]
    h, d, i, u = shape.hidden, shape.heads * shape.head_dim, shape.intermediate, shape.draft_vocab
    found = [Product(rows[0], shape.aux * h, h, kind) for kind in ("forward", "weight")]
    found += [Product(rows[0], h, 3 * d, kind) for kind in ("forward", "weight")]
    for n, m in zip(rows, scored, strict=True):
        for inner, out in ((h, 3 * d), (d, h), (h, i), (h, i), (i, h)):
            found += [Product(n, inner, out, kind) for kind in ("forward", "input", "weight")]
        found += [Product(m, h, u, kind) for kind in ("forward", "input")]
    return [*found, Product(labels, h, u, "forward")]


def needed_attention(shape: Shape, ends: list[int], steps: int) -> int:
    """Operations of attention: row i of step k sees i + 1 rows of its document and k of its own.

    Scores and the sum of values forwards; backwards the gradients of values, of chances, of queries and of keys: six
    products of 2 head_dim operations for each head and pair.
    """
    pairs = 0
    for end in ends:
        for k in range(steps):
            n = max(0, end - 1 - k)
            pairs += n * (n + 1) // 2 + k * n
    return 6 * 2 * shape.head_dim * shape.heads * pairs


def needed_operations(shape: Shape, ends: list[int], steps: int, scored: list[int], labels: int) -> int:
    """All of it."""
    products = needed_products(shape, ends, steps, scored, labels)
    return sum(product.operations for product in products) + needed_attention(shape, ends, steps)


def clock(device: torch.device) -> float:
    """Seconds: of this process's CPU, which other processes do not take from; on a GPU of the wall, when it is done."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def matrix_rate(products: list[Product], dtype: torch.dtype, device: torch.device, repeats: int = 3) -> float:
    """Operations a second of these products, each shape at the best of its repeats, weighted by how often it comes."""
    seconds = 0.0
    for product, count in Counter(products).items():
        multiply = _multiply(product, dtype, device)
        multiply()
        best = float("inf")
        for _ in range(repeats):
            begun = clock(device)
            multiply()
            best = min(best, clock(device) - begun)
        seconds += count * best
    return sum(product.operations for product in products) / seconds


def _multiply(product: Product, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    x = torch.randn(product.rows, product.inner, device=device).to(dtype)
    weight = torch.randn(product.out, product.inner, device=device).to(dtype)
    gradient = torch.randn(product.rows, product.out, device=device).to(dtype)
    return {
        "forward": lambda: F.linear(x, weight),
        "input": lambda: gradient @ weight,
        "weight": lambda: gradient.T @ x,
    }[product.kind]
