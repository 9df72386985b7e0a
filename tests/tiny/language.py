"""The little language that the tiny targets speak: a noisy walk over token ids with two tokens of memory.

The likeliest next token depends on the last token and on the *mode* of the one before. Followed greedily, the walk goes
round one long cycle; sampled at temperature 1, it has two nats of entropy. So neither is degenerate, and both are
learnt in half a minute.

Shapes: B batch, T time, V vocabulary, M 2 modes, C core, O 3 named successors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.tiny.tokenizer import EOS, SPECIALS, VOCAB_SIZE, printable_ids

MAIN, SECOND, THIRD = 0.55, 0.20, 0.10  # chances of the named successors; the rest falls on any printable token
CORE = 258  # a few more than a draft vocabulary of 256 can hold beside the start token
LONGEST_PROMPT = 24


@dataclass(frozen=True)
class Language:
    """Tables of the walk. `main_MV[mode of x[t-1], x[t]]` is the likeliest x[t+1]."""

    main_MV: Tensor
    second_V: Tensor
    third_V: Tensor
    mode_V: Tensor
    core_C: Tensor  # the ids on the cycle, the end token among them, so that answers end
    printable: Tensor  # the ids that the rest of the probability falls on, evenly
    spoken_to: Tensor  # the ids that a prompt may hold: all but the special ones

    def successors(self, tokens_BT: Tensor) -> Tensor:
        """The three named successors at every position, [B, T, O]. The first position has no context: mode 0."""
        previous_BT = tokens_BT.roll(1, dims=1)
        previous_BT[:, 0] = 0
        main_BT = self.main_MV[self.mode_V[previous_BT], tokens_BT]
        return torch.stack([main_BT, self.second_V[tokens_BT], self.third_V[tokens_BT]], dim=-1)

    def loss(self, logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
        """Mean cross-entropy in nats against the language's own distribution of the next token, not against samples.

        The exact distribution has no sampling noise in it, which makes so short a training enough.
        """
        log_BTV = logits_BTV[:, 1:].log_softmax(-1)  # the first position lacks the context that decides
        named_BTO = log_BTV.gather(-1, self.successors(tokens_BT)[:, 1:])
        chance_O = torch.tensor([MAIN, SECOND, THIRD])
        rest = 1.0 - MAIN - SECOND - THIRD
        return -((named_BTO * chance_O).sum(-1) + rest * log_BTV[..., self.printable].mean(-1)).mean()

    def sample(self, batch: int, time: int, generator: torch.Generator, surprise: float = 1.0) -> Tensor:
        """Random walks [B, T], each after a prompt of random tokens.

        `surprise` 1.0 speaks the language and 0.0 says the main successor every time, as a greedy answer does.
        """
        tokens_BT = self.prompts(batch, time, generator)
        stray_BT = self.printable[torch.randint(len(self.printable), (batch, time), generator=generator)]
        chance_BT = torch.rand(batch, time, generator=generator) * (MAIN + (1.0 - MAIN) * surprise)
        start_B = torch.randint(2, min(LONGEST_PROMPT, time // 2) + 1, (batch,), generator=generator)
        for t in range(2, time):
            named_BO = self.successors(tokens_BT[:, t - 2 : t])[:, 1]
            spoken_B = stray_BT[:, t]
            for limit, option in ((MAIN + SECOND + THIRD, 2), (MAIN + SECOND, 1), (MAIN, 0)):
                spoken_B = torch.where(chance_BT[:, t] < limit, named_BO[:, option], spoken_B)
            tokens_BT[:, t] = torch.where(start_B <= t, spoken_B, tokens_BT[:, t])
        return tokens_BT

    def prompts(self, batch: int, time: int, generator: torch.Generator) -> Tensor:
        """Random tokens that a prompt may hold, [B, T]."""
        return self.spoken_to[torch.randint(len(self.spoken_to), (batch, time), generator=generator)]


def build(tokens: PreTrainedTokenizerFast, seed: int) -> Language:
    """A language over the tokenizer's printable ids and its end token.

    The state of the greedy walk is (mode of the token before, token). Each mode sends one half of the core to one half
    of the core, and the other mode sends it to the other half: every state then has exactly one state before it, so the
    walk falls into cycles, and tables are drawn until it is one cycle through all 2 * CORE states.
    """
    generator = torch.Generator().manual_seed(seed)
    printable = torch.tensor(printable_ids(tokens))
    core_C = printable[torch.randperm(len(printable), generator=generator)[:CORE]]
    core_C[0] = EOS
    half = CORE // 2
    mode_V = torch.randint(2, (VOCAB_SIZE,), generator=generator)
    mode_V[core_C[:half]] = 0
    mode_V[core_C[half:]] = 1

    def any_core() -> Tensor:
        return core_C[torch.randint(CORE, (VOCAB_SIZE,), generator=generator)]

    main_MV = any_core().repeat(2, 1)  # tokens off the cycle have one main successor, whatever came before
    while True:
        to = core_C[torch.randperm(CORE, generator=generator)]
        swapped = torch.cat([to[half:], to[:half]])
        low, high = torch.randperm(half, generator=generator), torch.randperm(half, generator=generator)
        main_MV[0, core_C] = to
        main_MV[1, core_C] = swapped[torch.cat([low, half + high])]
        if cycle_length(main_MV, mode_V, int(core_C[0])) == 2 * CORE:
            break
    return Language(
        main_MV=main_MV,
        second_V=any_core(),
        third_V=any_core(),
        mode_V=mode_V,
        core_C=core_C,
        printable=printable,
        spoken_to=torch.arange(len(SPECIALS), VOCAB_SIZE),
    )


def cycle_length(main_MV: Tensor, mode_V: Tensor, token: int) -> int:
    """How many states the greedy walk passes before it is back at (mode 0, token)."""
    main, mode = main_MV.tolist(), mode_V.tolist()
    state, length = (0, token), 0
    while True:
        state = (mode[state[1]], main[state[0]][state[1]])
        length += 1
        if state == (0, token):
            return length
