"""The loss of training-time test and its metrics: soft cross-entropy with the target over the draft vocabulary.

M rows that are scored, J label positions in use, U draft vocabulary, H hidden, T packed tokens, R query rows, K steps.
batch.py draws which row predicts what. Logits exist for a chunk of rows at a time, and only for rows that count.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafter.training.batch import Batch, Shift
from drafter.training.model import Eagle3

CHUNK_ELEMENTS = 8 * 1024 * 1024  # logits held at once: rows enough for a product to reach its rate
CACHED_ELEMENTS = 64 * 1024  # of those a CPU works on at once, so that each pass after the first finds its cache


@dataclass(frozen=True)
class Counts:
    """Sums over rows for each step, float64 [K]; add batches up, then divide.

    loss: weighted cross-entropy; weight: its weights. valid: rows that count; right: those whose guesses up to this
    step are all the target's greedy choice; reached: those for which that held up to the step before; oov: those whose
    greedy choice is outside the draft vocabulary, a miss whatever is guessed.
    """

    loss: Tensor
    weight: Tensor
    valid: Tensor
    right: Tensor
    reached: Tensor
    oov: Tensor

    @classmethod
    def none(cls, steps: int) -> Counts:
        """Of no rows."""
        return cls(*torch.zeros(len(fields(cls)), steps, dtype=torch.float64))

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def rates(self, decay: float) -> dict[str, float]:
        """`loss`; each step's `loss_k`, `full_acc_k`, `cond_acc_k`; `accept_len_positions`, `oov_rate`, `flatness`.

        full_acc_k and cond_acc_k share one set of rows, those that count at step k. These are means over positions: an
        engine takes more steps through hard text and accepts less (evaluate.py walks as it does).
        """
        loss_K = self.loss / self.weight.clamp(min=1e-9)
        full_K, cond_K = self.right / self.valid.clamp(min=1), self.right / self.reached.clamp(min=1)
        decay_K = decay ** torch.arange(len(loss_K), dtype=torch.float64)
        found = {"loss": float((decay_K * loss_K).sum() / decay_K.sum())}
        for k in range(len(loss_K)):
            found |= {
                f"loss_{k}": float(loss_K[k]),
                f"full_acc_{k}": float(full_K[k]),
                f"cond_acc_{k}": float(cond_K[k]),
            }
        found["accept_len_positions"] = 1 + float(full_K.sum())
        found["oov_rate"] = float(self.oov[0] / self.valid[0].clamp(min=1))
        if len(cond_K) > 1 and cond_K[0] > 0:
            found["flatness"] = float(cond_K[1] / cond_K[0])
        return found


class _SoftCrossEntropy(torch.autograd.Function):
    """sum_m weight_m (logsumexp z_m - p_m . z_m), z = x head^T; gradients are made on the way, so no logits are kept.

    x_MH and head_UH share a dtype; the loss is fp32. Returns (loss, best draft id [M]).
    """

    @staticmethod
    def forward(
        ctx: Any, x_MH: Tensor, head_UH: Tensor, teacher_JU: Tensor, slot_M: Tensor, weight_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        d_x = torch.empty_like(x_MH) if x_MH.requires_grad else None
        d_head = torch.zeros_like(head_UH, dtype=torch.float32) if head_UH.requires_grad else None
        loss, guesses = torch.zeros((), device=x_MH.device), []
        rows = max(1, CHUNK_ELEMENTS // len(head_UH))
        for start in range(0, len(x_MH), rows):
            part = slice(start, start + rows)
            d_logits, weight = (
                F.linear(x_MH[part], head_UH),
                weight_M[part],
            )  # logits, until a gradient takes their place
            for few in _pieces(d_logits):
                logits, teacher = d_logits[few].float(), teacher_JU.index_select(0, slot_M[part][few])
                top, guess = logits.max(-1)
                guesses.append(guess)
                expected = (teacher * logits).sum(-1)
                chance = logits.softmax(-1)
                total = top - chance.gather(-1, guess[:, None])[:, 0].log()  # logsumexp, since chance = exp(logit - it)
                loss += ((total - expected) * weight[few]).sum()
                d_logits[few] = chance.sub_(teacher)
            if d_x is not None:  # weights join after the product, where rows are short
                d_x[part] = d_logits @ head_UH * weight[:, None]
            if d_head is not None:
                d_head += d_logits.T @ (x_MH[part] * weight[:, None]).to(head_UH.dtype)
        ctx.save_for_backward(d_x, d_head)
        guess_M = torch.cat(guesses) if guesses else slot_M
        ctx.mark_non_differentiable(guess_M)
        return loss, guess_M

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_x, d_head = ctx.saved_tensors
        scale = gradients[0]
        return None if d_x is None else d_x * scale, None if d_head is None else d_head * scale, None, None, None


def _pieces(logits_MU: Tensor) -> list[slice]:
    """Rows to be worked on at once: what fits a processor's cache; on a GPU all of them."""
    count, width = logits_MU.shape
    few = max(1, CACHED_ELEMENTS // width) if logits_MU.device.type == "cpu" else max(count, 1)
    return [slice(start, start + few) for start in range(0, count, few)]


class Lesson(nn.Module):
    """`ttt_loss` as a module over a drafter, which FSDP gathers for it."""

    def __init__(self, model: Eagle3) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, teacher_UH: Tensor, steps: int, decay: float, **how: Any) -> tuple[Tensor, Counts]:
        return ttt_loss(self.model, batch, teacher_UH, steps, decay, **how)


def row_weights(batch: Batch, shift: Shift, known_V: Tensor, user_weight: float) -> Tensor:
    """Weight of every row's loss at one step, fp32 [T]; `known_V` marks the draft vocabulary."""
    known_T = known_V[batch.best_T[shift.label_T]]
    return torch.where(shift.valid_T, 1.0, user_weight * shift.inside_T.float()) * known_T


def total_weights(batch: Batch, known_V: Tensor, steps: int, user_weight: float) -> Tensor:
    """Sum of the rows' weights at each step, float64 [K]. The batch needs no hidden states for this."""
    each = [row_weights(batch, batch.shift(k), known_V, user_weight).sum() for k in range(steps)]
    return torch.stack(each).double()


def ttt_loss(
    model: Eagle3,
    batch: Batch,
    teacher_UH: Tensor,
    steps: int,
    decay: float,
    user_weight: float = 0.0,
    dtype: torch.dtype = torch.float32,
    totals: Tensor | None = None,
) -> tuple[Tensor, Counts]:
    """(loss, counts) of `steps` draft steps; loss = sum_k decay^k loss_k / sum_k decay^k.

    `teacher_UH`: the target's lm_head rows of the draft ids. loss_k is the weighted mean cross-entropy over rows: 1 for
    rows that count, `user_weight` for the others before the end of the last answer, 0 where the target's greedy choice
    is outside the draft vocabulary. Products are taken in `dtype`, sums and softmax in fp32. Where the batch is a part
    of a step's, `totals` are the weights of all its parts: their losses and gradients then add up to the step's.
    """
    shifts = [batch.shift(k) for k in range(steps)]
    query_T = shifts[0].inside_T if user_weight else shifts[0].valid_T
    layout = batch.layout(query_T)
    known_V = torch.from_numpy(model.vocab.t2d).to(query_T.device)
    teacher_JU, slot_T = _teacher(
        batch,
        [shift.label_T[shift.inside_T & query_T & known_V[batch.best_T[shift.label_T]]] for shift in shifts],
        teacher_UH,
        dtype,
    )
    head_UH = model.lm_head.weight.to(dtype)

    right_R = torch.ones_like(layout.query_R, dtype=torch.bool)
    losses: list[Tensor] = []
    columns: list[list[float]] = []
    for k, shift in enumerate(shifts):
        with torch.autocast(query_T.device.type, dtype, enabled=dtype != torch.float32):
            if k == 0:
                hidden_RH, memory = model.first(batch.aux_TA.to(dtype), shift.token_T, layout)
            else:
                hidden_RH = model.later(hidden_RH, shift.token_T[layout.query_R], memory)
        label_R, valid_R = shift.label_T[layout.query_R], shift.valid_T[layout.query_R]
        best_R = batch.best_T[label_R]
        known_R = known_V[best_R]
        weight_R = row_weights(batch, shift, known_V, user_weight)[layout.query_R]
        scored_R = weight_R > 0
        weight_M, weight = weight_R[scored_R], float(weight_R.sum())
        total = weight if totals is None else float(totals[k])
        loss, guess_M = _SoftCrossEntropy.apply(
            model.norm(hidden_RH[scored_R]).to(dtype),
            head_UH,
            teacher_JU,
            slot_T[label_R[scored_R]],
            weight_M / max(total, 1e-9),
        )
        losses.append(loss)
        reached_R = right_R & valid_R
        right_R = right_R & known_R
        right_R[scored_R] &= model.target_ids_U[guess_M] == best_R[scored_R]
        counted = (valid_R, right_R & valid_R, reached_R, valid_R & ~known_R)
        columns.append([float(loss.detach()) * total, weight, *(float(rows.sum()) for rows in counted)])
    decays = [decay**k for k in range(steps)]
    mean = torch.stack([each * share for each, share in zip(losses, decays, strict=True)]).sum() / sum(decays)
    return mean, Counts(*torch.tensor(columns, dtype=torch.float64).T)


def _teacher(batch: Batch, labels: list[Tensor], teacher_UH: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The target's distribution over the draft vocabulary at the positions in `labels`: [J, U], and their places."""
    used_T = torch.zeros_like(batch.generated_T)
    for label_M in labels:
        used_T[label_M] = True
    final_JH = batch.final_TH[used_T].to(dtype)
    teacher_UH = teacher_UH.to(dtype)
    rows = max(1, CHUNK_ELEMENTS // len(teacher_UH))
    teacher_JU = final_JH.new_empty(len(final_JH), len(teacher_UH), dtype=torch.float32)
    for start in range(0, len(final_JH), rows):
        part = slice(start, start + rows)
        logits, chances = F.linear(final_JH[part], teacher_UH), teacher_JU[part]
        for few in _pieces(logits):
            torch.softmax(logits[few].float(), -1, out=chances[few])
    return teacher_JU, used_T.cumsum(0) - 1
