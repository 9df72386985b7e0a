"""The trainable model against the slow reference, and its attention against a softmax written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafter.checkpoint.vocab import DraftVocab
from drafter.training.attention import Layout, attend
from drafter.training.errors import TrainingError
from drafter.training.model import Eagle3, check_config, load_drafter
from drafter.training.rotary import rotary_of
from tests.drafter.training.random_drafter import V, config, drafter, reference
from tests.tiny.eagle import load
from tests.tiny.pair import build

STEPS = 4


def brute_attention(q, k, v, positions, own_k, own_v):
    """One query row after another: `positions[r]` is (document, position); keys are [B][S] lists of [G, D]."""
    rows = []
    for r, (document, position) in enumerate(positions):
        heads = []
        for n in range(q.shape[1]):
            g = n // (q.shape[1] // k.shape[2])
            keys = [k[document, s, g] for s in range(position + 1)] + [key[r, g] for key in own_k]
            values = [v[document, s, g] for s in range(position + 1)] + [value[r, g] for value in own_v]
            chance = torch.stack([(q[r, n] * key).sum() for key in keys]).div(q.shape[-1] ** 0.5).softmax(0)
            heads.append(sum(c * value for c, value in zip(chance, values, strict=True)))
        rows.append(torch.stack(heads))
    return torch.stack(rows)


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 3), st.booleans(), st.integers(0, 99))
def test_attention_and_its_gradients_equal_brute_force(rows, steps, everywhere, seed):
    generator = torch.Generator().manual_seed(seed)
    query_P = torch.rand(sum(rows), generator=generator) < (2.0 if everywhere else 0.6)
    query_P[int(torch.randint(sum(rows), (1,), generator=generator))] = True
    layout = Layout.of(rows, query_P)
    count, heads, groups, width = int(query_P.sum()), 4, 2, 8

    def random(*shape):
        return torch.randn(*shape, generator=generator).requires_grad_()

    q, k, v = random(count, heads, width), random(sum(rows), groups, width), random(sum(rows), groups, width)
    own_k, own_v = ([random(count, groups, width) for _ in range(steps)] for _ in range(2))
    weight = torch.randn(count, heads, width, generator=generator)

    padded = (layout.pad_keys(k), layout.pad_keys(v))
    fast = attend(q, *padded, layout, own_k, own_v)
    got = torch.autograd.grad((fast * weight).sum(), [q, k, v, *own_k, *own_v])

    places = [(b, t) for b, count_b in enumerate(rows) for t in range(count_b)]
    positions = [places[int(p)] for p in query_P.nonzero()]
    grid = [x.new_zeros(len(rows), max(rows), groups, width) for x in (k, v)]
    grid = [g.index_put(tuple(torch.tensor(places).T), x) for g, x in zip(grid, (k, v), strict=True)]
    slow = brute_attention(q, *grid, positions, own_k, own_v)
    wanted = torch.autograd.grad((slow * weight).sum(), [q, k, v, *own_k, *own_v])
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [0, 1, 2, 4])
def test_every_step_equals_the_reference(groups):
    model, slow = drafter(groups), reference(groups)
    generator = torch.Generator().manual_seed(1)
    lengths = [9, 4, 6]
    aux, tokens = [], []
    for length in lengths:
        aux.append(torch.randn(length, 3 * model.config["hidden_size"], generator=generator))
        tokens.append(torch.randint(V, (length + STEPS,), generator=generator))
    query_P = torch.ones(sum(lengths), dtype=torch.bool)
    query_P[[0, 3, 10]] = False
    layout = Layout.of(lengths, query_P)
    hidden, memory = model.first(
        torch.cat(aux), torch.cat([t[: len(a)] for t, a in zip(tokens, aux, strict=True)]), layout
    )
    got = [model.logits(hidden)]
    for k in range(1, STEPS):
        fed = torch.cat([t[k : k + len(a)] for t, a in zip(tokens, aux, strict=True)])
        hidden = model.later(hidden, fed[layout.query_R], memory)
        got.append(model.logits(hidden))
    wanted = [[] for _ in range(STEPS)]
    for a, t in zip(aux, tokens, strict=True):
        state, earlier = slow.fuse(a[None]), []
        for k in range(STEPS):
            state, logits = slow.step(state, t[None, k : k + len(a)], earlier)
            wanted[k].append(logits[0])
    for k in range(STEPS):
        torch.testing.assert_close(got[k], torch.cat(wanted[k])[query_P], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("pair", "name"), [("llama", "mha_perfect"), ("kimi", "mha_perfect"), ("kimi", "mla_perfect")])
def test_a_folder_is_loaded_as_the_reference_loads_it(pair, name):
    made = build(pair)
    embed = torch.randn(made.vocab_size, made.hidden_size)
    model, slow = load_drafter(made.drafters[name], embed), load(made.drafters[name], embed)
    assert {name for name, _ in model.named_parameters()} == set(slow.weights) - {"d2t", "t2d"}
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(tensor, slow.weights[name], rtol=0, atol=0)
    assert model.target_ids_U.tolist() == slow.target_ids_U.tolist()


@pytest.mark.parametrize(
    "wrong",
    [
        {"norm_output": True},
        {"eagle_config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
        {"num_hidden_layers": 2},
        {"architectures": ["DeepseekV2ForCausalLM"]},
        {"target_hidden_size": 7},
        {"num_key_value_heads": 3},
    ],
)
def test_what_sglang_computes_otherwise_is_refused(wrong):
    with pytest.raises(TrainingError, match=next(iter(wrong.get("eagle_config", wrong)))):
        check_config(config(2) | wrong)


YARN = {"rope_theta": 50000.0, "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        YARN | {"rope_type": "yarn", "beta_slow": 1.0},
        YARN | {"rope_type": "yarn", "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 8192},
    ],
)
def test_rope_is_that_of_transformers(rope):
    """By transformers' own functions, from a config that keeps its rope in either place."""
    width, longest = 128, 262144
    known = LlamaConfig(head_dim=width, rope_parameters=rope, max_position_embeddings=longest)
    if rope["rope_type"] == "default":
        wanted, size = rope["rope_theta"] ** (-torch.arange(0, width, 2) / width), 1.0
    else:
        wanted, size = ROPE_INIT_FUNCTIONS[rope["rope_type"]](known, torch.device("cpu"))
    ours = config(2) | {"head_dim": width, "max_position_embeddings": longest}
    ours.pop("rope_theta")
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
    old = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling | {"type": rope["rope_type"]}}
    for place in ({"rope_parameters": rope}, old):
        found = rotary_of(ours | place)
        torch.testing.assert_close(found.frequency_F, wanted, rtol=1e-5, atol=0)
        assert found.magnitude == pytest.approx(size) and found.score == 1.0


def test_rope_of_another_kind_is_refused():
    with pytest.raises(TrainingError, match="scaled by 'longrope'"):
        rotary_of(config(2) | {"rope_scaling": {"type": "longrope"}})


def test_the_embedding_is_the_targets_and_frozen():
    model = drafter(2)
    assert "embed_VH" not in dict(model.named_parameters())
    assert isinstance(model, Eagle3) and isinstance(model.vocab, DraftVocab)
