"""The reference drafters against something slower still, and against the attention of transformers."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from tests.tiny.drafters import CONFIGS, shapes
from tests.tiny.eagle import Drafter, acceptance_length, walk
from tests.tiny.targets import YARN

V, U, H, ROWS, STEPS = 512, 256, 64, 11, 4
STYLES = sorted(CONFIGS)


def random_drafter(style: str) -> Drafter:
    """A drafter of random weights, norms included, with a draft vocabulary that starts at no round number."""
    generator = torch.Generator().manual_seed(3)
    config = CONFIGS[style]([0, 1, 2])
    weights = {
        name: torch.randn(shape, generator=generator) * (0.5 if len(shape) == 1 else shape[-1] ** -0.5)
        for name, shape in shapes(config).items()
    }
    weights["norm.weight"] = torch.randn(H, generator=generator)
    weights["lm_head.weight"] = torch.randn(U, H, generator=generator)
    weights["d2t"] = torch.randperm(V, generator=generator)[:U].sort().values - torch.arange(U)
    return Drafter(config, weights, torch.randn(V, H, generator=generator))


def random_text() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    aux_BTA = torch.randn(2, ROWS, 3 * H, generator=generator)
    return aux_BTA, torch.randint(V, (2, ROWS), generator=generator)


class OneRowAtATime:
    """What an engine does for one request: a growing list of keys and values, and one query at a time.

    Rotary embeddings are turns of complex numbers, MLA is absorbed into its latent, softmax is written out: nothing
    is shared with eagle.py but the weights.
    """

    def __init__(self, drafter: Drafter, style: str) -> None:
        self.w = {name: tensor.double() for name, tensor in drafter.weights.items() if tensor.is_floating_point()}
        self.config, self.embed, self.style = drafter.config, drafter.embed_VH.double(), style
        self.d2t = drafter.weights["d2t"]

    def rms(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + 1e-6) * self.w[f"{name}.weight"]

    def lin(self, x: Tensor, name: str) -> Tensor:
        return self.w[f"midlayer.{name}.weight"] @ x

    def turn(self, x: Tensor, position: int) -> Tensor:
        """x as complex numbers, each turned by its angle. Pairs lie half a width apart (mha) or beside each other."""
        half = len(x) // 2
        if self.style == "mha":
            pairs = torch.complex(x[:half], x[half:])
            angles = [position * 10000.0 ** (-2 * i / len(x)) for i in range(half)]
        else:
            pairs = torch.complex(x[0::2], x[1::2])
            angles = [position * yarn_frequency(i, len(x)) for i in range(half)]
        return pairs * torch.exp(1j * torch.tensor(angles, dtype=torch.float64))

    def run(self, hidden: Tensor, token: int, position: int, memory: list[Any]) -> tuple[Tensor, int]:
        """One row: (its output, the target id it guesses); appends what later rows attend to."""
        embedded = self.rms(self.embed[token], "midlayer.input_layernorm")
        x = torch.cat([embedded, self.rms(hidden, "midlayer.hidden_norm")])
        attended = self.mha(x, position, memory) if self.style == "mha" else self.mla(x, position, memory)
        hidden = hidden + self.lin(attended, "self_attn.o_proj")
        x = self.rms(hidden, "midlayer.post_attention_layernorm")
        gate = self.lin(x, "mlp.gate_proj")
        hidden = hidden + self.lin(gate / (1 + torch.exp(-gate)) * self.lin(x, "mlp.up_proj"), "mlp.down_proj")
        draft_id = int((self.w["lm_head.weight"] @ self.rms(hidden, "norm")).argmax())
        return hidden, draft_id + int(self.d2t[draft_id])

    def mha(self, x: Tensor, position: int, memory: list[Any]) -> Tensor:
        q = self.lin(x, "self_attn.q_proj").view(4, 16)
        k = self.lin(x, "self_attn.k_proj").view(2, 16)
        v = self.lin(x, "self_attn.v_proj").view(2, 16)
        memory.append(([self.turn(k[g], position) for g in range(2)], v))
        out = []
        for head in range(4):
            turned = self.turn(q[head], position)
            scores = [float((turned * keys[head // 2].conj()).real.sum()) / 4.0 for keys, _ in memory]
            out.append(mix(scores, [values[head // 2] for _, values in memory]))
        return torch.cat(out)

    def mla(self, x: Tensor, position: int, memory: list[Any]) -> Tensor:
        c = self.config
        query = self.rms(self.lin(x, "self_attn.q_a_proj"), "midlayer.self_attn.q_a_layernorm")
        q = self.lin(query, "self_attn.q_b_proj").view(4, 32)
        kv = self.lin(x, "self_attn.kv_a_proj_with_mqa")
        latent = self.rms(kv[: c["kv_lora_rank"]], "midlayer.self_attn.kv_a_layernorm")
        memory.append((latent, self.turn(kv[c["kv_lora_rank"] :], position)))
        expand = self.w["midlayer.self_attn.kv_b_proj.weight"].view(4, 32, c["kv_lora_rank"])
        scale = 32**-0.5 * (0.1 * math.log(YARN["factor"]) + 1) ** 2
        out = []
        for head in range(4):
            absorbed, turned = expand[head, :16].T @ q[head, :16], self.turn(q[head, 16:], position)
            scores = [
                scale * (float(absorbed @ latent) + float((turned * key.conj()).real.sum())) for latent, key in memory
            ]
            out.append(expand[head, 16:] @ mix(scores, [latent for latent, _ in memory]))
        return torch.cat(out)


def mix(scores: list[float], values: list[Tensor]) -> Tensor:
    """The values weighted by the softmax of the scores."""
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return sum((w / sum(weights) * value for w, value in zip(weights, values, strict=True)), torch.zeros(()))


def yarn_frequency(pair: int, width: int) -> float:
    """One frequency by the definition: pairs are blended by where they lie between two numbers of turns."""

    yarn: dict[str, Any] = dict(YARN)

    def pair_that_turns(times: float) -> float:
        wavelength = yarn["original_max_position_embeddings"] / times
        return math.log(wavelength / (2 * math.pi)) / math.log(yarn["rope_theta"]) * width / 2

    low = max(math.floor(pair_that_turns(yarn["beta_fast"])), 0)
    high = min(math.ceil(pair_that_turns(yarn["beta_slow"])), width - 1)
    slowed = min(max((pair - low) / (high - low), 0.0), 1.0)
    plain = float(yarn["rope_theta"] ** (-2 * pair / width))
    return plain * (1 - slowed) + plain / yarn["factor"] * slowed


@pytest.mark.parametrize("style", STYLES)
def test_proposals_equal_an_engine_that_runs_one_row_at_a_time(style: str) -> None:
    drafter = random_drafter(style)
    aux_BTA, tokens_BT = random_text()
    proposed = drafter.propose(aux_BTA, tokens_BT, STEPS).tolist()
    slow = OneRowAtATime(drafter, style)
    for b in range(2):
        memory: list[Any] = []  # rows whose hidden state came from the target: they outlive a verify step
        for t in range(ROWS):
            fused = slow.w["fc.weight"] @ aux_BTA[b, t].double()
            hidden, guess = slow.run(fused, int(tokens_BT[b, t]), t, memory)
            guesses, chain = [guess], list(memory)
            for k in range(1, STEPS):
                hidden, guess = slow.run(hidden, guess, t + k, chain)
                guesses.append(guess)
            assert proposed[b][t] == guesses, f"text {b}, row {t}"


@pytest.mark.parametrize("style", STYLES)
def test_attention_is_that_of_transformers(style: str) -> None:
    """The first step's attention; transformers knows no chain of drafts."""
    drafter = random_drafter(style)
    generator = torch.Generator().manual_seed(6)
    x_BTX = torch.randn(2, ROWS, 2 * H, generator=generator)
    position_T = torch.arange(ROWS)
    heads = drafter.project(x_BTX, position_T[:, None] * drafter.frequency_F)
    ours = drafter.attend(heads, [heads])

    shared = {"hidden_size": 2 * H, "num_attention_heads": 4, "max_position_embeddings": 2048}
    if style == "mha":
        config: Any = LlamaConfig(**shared, num_key_value_heads=2, head_dim=16, rope_theta=10000.0)
        module, rotary = LlamaAttention(config, 0), LlamaRotaryEmbedding(config)
    else:
        dims = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        config = DeepseekV3Config(
            **shared,
            num_key_value_heads=4,
            rope_parameters=dict(YARN),
            **{name: drafter.config[name] for name in dims},
        )
        module, rotary = DeepseekV3Attention(config, 0), DeepseekV3RotaryEmbedding(config)
    config._attn_implementation = "eager"
    module.o_proj = torch.nn.Identity()
    mine = {name.removeprefix("midlayer.self_attn."): tensor for name, tensor in drafter.weights.items()}
    module.load_state_dict({name: mine[name] for name in module.state_dict()})
    mask = torch.full((ROWS, ROWS), -torch.inf).triu(1)[None, None].expand(2, 1, -1, -1)
    with torch.no_grad():
        theirs = module(x_BTX, position_embeddings=rotary(x_BTX, position_T[None]), attention_mask=mask)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("style", STYLES)
def test_a_later_token_changes_no_earlier_proposal(style: str) -> None:
    drafter = random_drafter(style)
    aux_BTA, tokens_BT = random_text()
    before = drafter.propose(aux_BTA, tokens_BT, STEPS)
    aux_BTA[:, 7:] += 1.0
    tokens_BT[:, 7:] = (tokens_BT[:, 7:] + 1) % V
    after = drafter.propose(aux_BTA, tokens_BT, STEPS)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    answer=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    steps=st.integers(1, 4),
    data=st.data(),
)
def test_walk_is_what_an_engine_does(prompt: list[int], answer: list[int], steps: int, data: st.DataObject) -> None:
    """An engine that does not see the answer: it drafts, asks the target position by position, and keeps a prefix."""
    start, stop = len(prompt), len(prompt) + len(answer)
    text = prompt + answer + data.draw(st.lists(st.integers(0, 3), min_size=steps, max_size=steps))
    token = st.integers(0, 3)
    guesses = data.draw(
        st.lists(st.lists(token, min_size=steps, max_size=steps), min_size=len(text), max_size=len(text))
    )

    written, counts = [text[start]], [0] * (steps + 1)  # prefill writes the first token
    while len(written) < len(answer):
        drafts, kept = list(guesses[start + len(written) - 2]), 0
        while drafts and drafts.pop(0) == text[start + len(written)]:
            written.append(text[start + len(written)])
            kept += 1
        written.append(text[start + len(written)])  # the target's own token
        counts[kept] += 1
    assert walk(text, guesses, start, stop) == counts
    if sum(counts):
        assert acceptance_length(counts) == pytest.approx((len(written) - 1) / sum(counts))


def test_walk_needs_the_tokens_past_the_stop() -> None:
    with pytest.raises(ValueError, match="the text has 10 tokens but a walk up to 8 needs 11"):
        walk([0] * 10, [[0] * 3] * 10, 2, 8)
