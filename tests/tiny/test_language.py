"""The language is what it says: one long greedy cycle, the promised chances, a loss whose floor is its entropy."""

import math
from collections import Counter

import pytest
import torch

from tests.tiny import language, tokenizer
from tests.tiny.language import CORE, MAIN, SECOND, THIRD, Language


@pytest.fixture(scope="module")
def tongue() -> Language:
    return language.build(tokenizer.train(), seed=5)


def test_greedy_walk_is_one_cycle_through_every_state(tongue: Language) -> None:
    main, mode = tongue.main_MV.tolist(), tongue.mode_V.tolist()
    core = tongue.core_C.tolist()
    visited = []
    state = (mode[core[1]], core[2])
    for _ in range(2 * CORE):
        visited.append(state)
        state = (mode[state[1]], main[state[0]][state[1]])
    assert state == visited[0]
    assert len(set(visited)) == 2 * CORE
    assert Counter(token for _, token in visited) == dict.fromkeys(core, 2)  # the end token too: answers do end


def test_every_token_leads_onto_the_cycle(tongue: Language) -> None:
    core = set(tongue.core_C.tolist())
    assert set(tongue.main_MV.flatten().tolist()) <= core


def test_spoken_text_has_the_chances_of_the_language(tongue: Language) -> None:
    tokens_BT = tongue.sample(64, 200, torch.Generator().manual_seed(1))
    spoken = slice(language.LONGEST_PROMPT, None)
    named_BTO = tongue.successors(tokens_BT)[:, :-1][:, spoken]
    came_BT = tokens_BT[:, 1:][:, spoken]
    share = [(named_BTO[..., option] == came_BT).float().mean().item() for option in range(3)]
    # four standard errors of 11,000 draws, and what falls on a named token by accident
    assert share == pytest.approx([MAIN, SECOND, THIRD], abs=4 * math.sqrt(0.25 / came_BT.numel()) + 2 / CORE)


def test_no_surprise_is_greedy(tongue: Language) -> None:
    tokens_BT = tongue.sample(8, 100, torch.Generator().manual_seed(1), surprise=0.0)
    named_BT = tongue.successors(tokens_BT)[:, :-1, 0]
    assert torch.equal(named_BT[:, language.LONGEST_PROMPT :], tokens_BT[:, 1 + language.LONGEST_PROMPT :])


def test_loss_of_the_language_itself_is_its_entropy_and_nothing_is_lower(tongue: Language) -> None:
    generator = torch.Generator().manual_seed(2)
    tokens_BT = tongue.sample(4, 32, generator)
    chance_BTV = torch.zeros(4, 32, tokenizer.VOCAB_SIZE)
    chance_BTV[..., tongue.printable] = (1 - MAIN - SECOND - THIRD) / len(tongue.printable)
    for option, chance in enumerate((MAIN, SECOND, THIRD)):
        chance_BTV.scatter_add_(-1, tongue.successors(tokens_BT)[..., [option]], torch.full((4, 32, 1), chance))
    entropy = torch.special.entr(chance_BTV[:, 1:]).sum(-1).mean().item()
    assert 1.5 < entropy < 3.0  # nats: enough for a test of distributions to have something to measure

    floor = tongue.loss((chance_BTV + 1e-12).log(), tokens_BT).item()
    assert floor == pytest.approx(entropy, abs=1e-3)
    for _ in range(5):
        bent_BTV = (chance_BTV + 1e-12).log() + 0.3 * torch.randn(chance_BTV.shape, generator=generator)
        assert tongue.loss(bent_BTV, tokens_BT).item() > floor
