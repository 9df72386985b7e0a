"""Documents packed one after another into a batch, and the one place that shifts them for a draft step.

T packed tokens, B documents, A what the target hands over (n_aux H), H hidden, R query rows.

Row i holds the feature g(i) and the token x(i+1), and predicts x(i+2), whose label is the target's distribution p(i+1).
At step k the row has moved k on: it is fed with its own output and the text's true token, and predicts one further.

    position   i             i+1           i+2           i+3
    step 0     g(i), x(i+1)  label p(i+1), that is x(i+2)
    step 1     out_0, x(i+2)               label p(i+2), that is x(i+3)
    step 2     out_1, x(i+3)                             label p(i+3), that is x(i+4)

Which rows count. A served drafter is asked at i once x(i+1) has been written: by prefill for the answer's first token,
by a verify step for the others. So x(i+1) must be generated; and every token of the chain up to the one that is
predicted, x(i+2+k), must be in the same stretch of the mask: past it nothing is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from drafter.data.shards import Document
from drafter.training.attention import Layout


@dataclass(frozen=True)
class Batch:
    """Packed documents.

    tokens_T int64; generated_T bool, the loss mask; best_T int64, the target's greedy choice after each position;
    aux_TA and final_TH bf16 or fp32, `final` after the final norm; lengths: tokens of each document.
    """

    tokens_T: Tensor
    generated_T: Tensor
    best_T: Tensor
    aux_TA: Tensor
    final_TH: Tensor
    lengths: list[int]

    @classmethod
    def of(cls, documents: list[Document], best: list[Tensor]) -> Batch:
        """From documents and, for each, the target's greedy choices."""
        return cls(
            tokens_T=torch.cat([to_torch(document.input_ids) for document in documents]).long(),
            generated_T=torch.cat([to_torch(document.loss_mask) for document in documents]),
            best_T=torch.cat(best),
            aux_TA=torch.cat([to_torch(document.aux_hidden) for document in documents]),
            final_TH=torch.cat([to_torch(document.final_hidden) for document in documents]),
            lengths=[len(document.input_ids) for document in documents],
        )

    @cached_property
    def last_T(self) -> Tensor:
        """For each token the packed index of its document's last generated token; -1 where there is none."""
        ends = np.cumsum(self.lengths)
        generated_T = self.generated_T.cpu()
        last = []
        for start, end in zip(ends - self.lengths, ends, strict=True):
            found = generated_T[start:end].nonzero()
            last.append(int(start + found[-1, 0]) if len(found) else -1)
        return torch.tensor(last).repeat_interleave(torch.tensor(self.lengths)).to(self.generated_T.device)

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        on = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor) and name != "last_T"}
        return Batch(**on, lengths=self.lengths)

    def shift(self, k: int) -> Shift:
        """Every row at step k."""
        here_T = torch.arange(len(self.tokens_T), device=self.tokens_T.device)
        predicted_T = here_T + 2 + k
        inside_T = predicted_T <= self.last_T
        count_T = self.generated_T.long().cumsum(0)
        chain_T = count_T[predicted_T.clamp(max=len(here_T) - 1)] - count_T
        label_T = (here_T + 1 + k).clamp(max=len(here_T) - 1)
        return Shift(self.tokens_T[label_T], label_T, inside_T, inside_T & (chain_T == k + 2))

    def layout(self, query_T: Tensor) -> Layout:
        """Where the rows lie when those in `query_T` (bool) are drafted from."""
        return Layout.of(self.lengths, query_T)


@dataclass(frozen=True)
class Shift:
    """Rows at one step. token_T: the token fed in. label_T: the position whose distribution is to be predicted.

    inside_T: the predicted token lies before the end of the document's last answer. valid_T: the row counts.
    """

    token_T: Tensor
    label_T: Tensor
    inside_T: Tensor
    valid_T: Tensor


def to_torch(x: np.ndarray) -> Tensor:
    """A copy as a tensor; uint16 is bf16."""
    tensor = torch.from_numpy(np.array(x))
    return tensor.view(torch.bfloat16) if x.dtype == np.uint16 else tensor
