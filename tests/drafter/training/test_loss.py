"""The loss and its metrics against Python loops over (row, step), and against faults that must show."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.data.shards import Document
from drafter.training.batch import Batch
from drafter.training.loss import ttt_loss
from drafter.training.target import best_tokens
from tests.drafter.training.random_drafter import H, V, drafter, reference

STEPS, DECAY = 3, 0.8
HEAD = torch.randn(V, H, generator=torch.Generator().manual_seed(7)) * 0.3


def document(length: int, mask: list[bool], seed: int, known_share: float = 1.0) -> Document:
    """Random features, and final states that prefer tokens of the draft vocabulary when `known_share` is 1."""
    generator = torch.Generator().manual_seed(seed)
    final = torch.randn(length, H, generator=generator)
    ids = drafter().target_ids_U
    wanted = ids[torch.randint(len(ids), (length,), generator=generator)]
    leaning = torch.rand(length, generator=generator) < known_share
    final[leaning] += HEAD[wanted[leaning]]
    tokens = torch.randint(V, (length,), generator=generator)
    aux = torch.randn(length, 3 * H, generator=generator)
    return Document(tokens.int().numpy(), np.array(mask), aux.numpy(), final.numpy(), f"document {seed}")


def batch_of(documents: list[Document]) -> Batch:
    return Batch.of(documents, [best_tokens(torch.from_numpy(d.final_hidden), HEAD) for d in documents])


def brute(documents: list[Document], user_weight: float) -> dict[str, float]:
    """Row by row and step by step, by the words of batch.py's drawing; the model is the slow reference."""
    slow = reference()
    ids = slow.target_ids_U.tolist()
    sums = [dict.fromkeys(("loss", "weight", "valid", "right", "reached", "oov"), 0.0) for _ in range(STEPS)]
    for doc in documents:
        x, mask, length = doc.input_ids.tolist(), doc.loss_mask.tolist(), len(doc.input_ids)
        end = max((i for i in range(length) if mask[i]), default=-1)
        p = (torch.from_numpy(doc.final_hidden) @ HEAD.T).double()
        # logits[k][i], from texts stretched far enough that every row exists
        stretched = torch.tensor([x + [0] * (STEPS + 1)])
        state, earlier, logits = slow.fuse(torch.from_numpy(doc.aux_hidden)[None]), [], []
        for k in range(STEPS):
            state, each = slow.step(state, stretched[:, 1 + k : 1 + k + length], earlier)
            logits.append(each[0].double())
        for i in range(length):
            alive = True
            for k in range(STEPS):
                if i + 2 + k > end:
                    break
                counts = all(mask[j] for j in range(i + 1, i + 3 + k))
                best = int(p[i + 1 + k].argmax())
                guess = ids[int(logits[k][i].argmax())]
                weight = (1.0 if counts else user_weight) if best in ids else 0.0
                teacher = p[i + 1 + k][ids].softmax(0)
                sums[k]["loss"] -= weight * float((teacher * logits[k][i].log_softmax(0)).sum())
                sums[k]["weight"] += weight
                sums[k]["valid"] += counts
                sums[k]["reached"] += counts and alive
                alive = alive and guess == best
                sums[k]["right"] += counts and alive
                sums[k]["oov"] += counts and best not in ids
    return sums


MASKS = st.lists(st.lists(st.booleans(), min_size=3, max_size=12), min_size=1, max_size=3).filter(
    lambda masks: any(mask[i] and mask[i + 1] for mask in masks for i in range(1, len(mask) - 1))
)


@settings(deadline=None, max_examples=40)
@given(MASKS, st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([0.5, 1.0]), st.integers(0, 50))
def test_loss_and_counts_equal_loops(masks, user_weight, known_share, seed):
    documents = [document(len(mask), mask, seed + n, known_share) for n, mask in enumerate(masks)]
    loss, counts = ttt_loss(drafter(), batch_of(documents), HEAD[drafter().target_ids_U], STEPS, DECAY, user_weight)
    sums = brute(documents, user_weight)
    for name in ("loss", "weight", "valid", "right", "reached", "oov"):
        assert getattr(counts, name).tolist() == pytest.approx([each[name] for each in sums], rel=1e-4, abs=1e-4), name
    means = [each["loss"] / each["weight"] if each["weight"] else 0.0 for each in sums]
    decays = [DECAY**k for k in range(STEPS)]
    wanted = sum(d * m for d, m in zip(decays, means, strict=True)) / sum(decays)
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-4)
    rates = counts.rates(DECAY)
    assert rates["loss"] == pytest.approx(wanted, rel=1e-4)
    assert rates["accept_len_positions"] == pytest.approx(1 + sum(s["right"] / max(s["valid"], 1) for s in sums))


def answers(seed: int = 0) -> list[Document]:
    return [
        document(40, [False] * 9 + [True] * 31, seed),
        document(30, [False] * 5 + [True] * 20 + [False] * 5, seed + 1),
    ]


@pytest.mark.parametrize("user_weight", [0.0, 0.5])
def test_gradients_equal_those_of_whole_logits(user_weight, monkeypatch):
    monkeypatch.setattr("drafter.training.loss.CHUNK_ELEMENTS", 1000)  # five rows at a time
    model, batch = drafter(), batch_of(answers())
    teacher_UH = HEAD[model.target_ids_U]
    ttt_loss(model, batch, teacher_UH, STEPS, DECAY, user_weight)[0].backward()
    got = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    total = torch.zeros(())
    shifts = [batch.shift(k) for k in range(STEPS)]
    layout = batch.layout(torch.ones(len(batch.tokens_T), dtype=torch.bool))
    hidden, memory = model.first(batch.aux_TA, shifts[0].token_T, layout)
    for k, shift in enumerate(shifts):
        if k:
            hidden = model.later(hidden, shift.token_T, memory)
        teacher = (batch.final_TH @ teacher_UH.T).softmax(-1)[shift.label_T]
        each = -(teacher * model.logits(hidden).log_softmax(-1)).sum(-1)
        weight = torch.where(shift.valid_T, 1.0, user_weight * shift.inside_T)
        weight = weight * torch.isin(batch.best_T[shift.label_T], model.target_ids_U)
        total = total + DECAY**k * (each * weight).sum() / weight.sum() / sum(DECAY**j for j in range(STEPS))
    total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_bf16_is_near_fp32():
    model, batch = drafter(), batch_of(answers())
    losses = [
        float(ttt_loss(model, batch, HEAD[model.target_ids_U], STEPS, DECAY, dtype=dtype)[0].detach())
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.02) and losses[0] != losses[1]


def test_a_document_without_an_answer_costs_nothing():
    model = drafter()
    silent = document(20, [False] * 20, 5)
    with_it = ttt_loss(model, batch_of([*answers(), silent]), HEAD[model.target_ids_U], STEPS, DECAY, 1.0)[0]
    without = ttt_loss(model, batch_of(answers()), HEAD[model.target_ids_U], STEPS, DECAY, 1.0)[0]
    assert float(with_it.detach()) == pytest.approx(float(without.detach()), rel=1e-5)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_best_tokens_are_the_argmax_in_fp32(dtype, fast, monkeypatch):
    monkeypatch.setattr("drafter.training.target.bf16_is_fast", lambda device: fast)
    generator = torch.Generator().manual_seed(0)
    final, head = torch.randn(300, H, generator=generator).to(dtype), torch.randn(V, H, generator=generator).to(dtype)
    assert torch.equal(best_tokens(final, head), (final.float() @ head.float().T).argmax(-1))


@pytest.mark.parametrize("fast", [False, True])
def test_of_equal_tokens_the_first_is_best(fast, monkeypatch):
    monkeypatch.setattr("drafter.training.target.bf16_is_fast", lambda device: fast)
    head = torch.randn(V, H, generator=torch.Generator().manual_seed(0)).bfloat16()
    head[[9, 77, 300, 500]] = head[400].clone()
    assert best_tokens(head[[400, 9]], head).tolist() == [9, 9]


def changed(fault: str, doc: Document) -> Document:
    """The document with one of the mistakes that capture pipelines have made."""
    h = H
    aux, final, mask, tokens = doc.aux_hidden, doc.final_hidden, doc.loss_mask, doc.input_ids
    if fault == "layer order":
        aux = np.concatenate([aux[:, h:], aux[:, :h]], axis=1)
    elif fault == "final norm":
        final = final * 3.0
    elif fault == "features one late":
        aux = np.roll(aux, 1, axis=0)
    elif fault == "labels one late":
        final = np.roll(final, 1, axis=0)
    elif fault == "mask one early":
        mask = np.roll(mask, -1)
    elif fault == "tokens one early":
        tokens = np.roll(tokens, -1)
    return Document(tokens, mask, aux, final, doc.name)


@pytest.mark.parametrize(
    "fault",
    ["none", "layer order", "final norm", "features one late", "labels one late", "mask one early", "tokens one early"],
)
def test_each_fault_shows(fault):
    model = drafter()
    teacher_UH = HEAD[model.target_ids_U]
    right = float(ttt_loss(model, batch_of(answers()), teacher_UH, STEPS, DECAY)[0].detach())
    wrong = float(
        ttt_loss(model, batch_of([changed(fault, d) for d in answers()]), teacher_UH, STEPS, DECAY)[0].detach()
    )
    assert math.isclose(right, wrong, rel_tol=1e-4) == (fault == "none")
