"""A new drafter before its first step: the target's head and norm, and a fitted fc.

H hidden, A what the target hands over (n_aux H), M rows of the fit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drafter.checkpoint.vocab import DraftVocab
from drafter.training.documents import Documents
from drafter.training.errors import TrainingError
from drafter.training.model import Eagle3
from drafter.training.target import Target

FIT_ROWS = 20_000
RIDGE = 1e-4  # of the mean square of a feature


def new_drafter(config: dict[str, Any], vocab: DraftVocab, target: Target, seed: int) -> Eagle3:
    """Head and final norm are the target's; what adds to the residual starts at zero, the rest at 1/sqrt(inputs).

    So before the first step the drafter is its fc and the target's own head: a random layer before that head gives a
    loss of 25 to 30 nats and gradients to match.
    """
    generator = torch.Generator().manual_seed(seed)
    model = Eagle3(config, vocab, target.embed_VH)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
        model.norm.weight.copy_(target.norm_H)
        model.lm_head.weight.copy_(target.head_VH[model.target_ids_U])
    return model


def has_own_head(model: Eagle3, target: Target) -> bool:
    """Whether lm_head is the target's own rows, as a new drafter's is; in bf16, which it may have been written in."""
    same: bool = torch.equal(model.lm_head.weight.bfloat16(), target.head_VH[model.target_ids_U].bfloat16())
    return same


def fit_fc(model: Eagle3, documents: Documents, seed: int) -> float:
    """Set fc by ridge regression from features to the final state before its norm's weight; returns R2 on held-out.

    fc g(i) then has the basis that norm and lm_head expect. A document's first position is left out: many targets
    park huge activations there.
    """
    device = documents.ranks.device
    weight_H = model.norm.weight.detach().double().to(device)
    small_H = weight_H.abs() < 1e-3
    weight_H = torch.where(small_H, torch.full_like(weight_H, torch.inf), weight_H)  # a dead channel fits zero

    def rows(indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen, count = [], 0
        for index in indices:
            chosen.append(index)
            count += documents.length(index)
            if count >= FIT_ROWS:
                break
        batches = [documents.batch([index]).to(device) for index in chosen]
        aux_MA = torch.cat([batch.aux_TA[1:].double() for batch in batches])
        return aux_MA, torch.cat([batch.final_TH[1:].double() for batch in batches]) / weight_H

    order = torch.randperm(len(documents.train), generator=torch.Generator().manual_seed(seed)).tolist()
    aux_MA, wanted_MH = rows([documents.train[i] for i in order])
    square_AA = aux_MA.T @ aux_MA
    square_AA.diagonal().add_(RIDGE * square_AA.diagonal().mean())
    try:
        fitted_AH = torch.linalg.solve(square_AA, aux_MA.T @ wanted_MH)
    except torch.linalg.LinAlgError as error:
        raise TrainingError(f"fc cannot be fitted to the shards ({error}): are the features all zero?") from None
    with torch.no_grad():
        model.fc.weight.copy_(fitted_AH.T)
    aux_MA, wanted_MH = rows(documents.held)
    missed = (aux_MA @ fitted_AH - wanted_MH).square().sum()
    return float(1 - missed / (wanted_MH - wanted_MH.mean(0)).square().sum())
