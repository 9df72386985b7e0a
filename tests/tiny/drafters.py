"""EAGLE-3 drafters for the tiny targets: built in SGLang's format, trained, and spoilt by measured amounts of noise.

A *perfect* drafter guesses nearly every greedy token; two *noised* ones are it with noise on their lm_head, so that
their acceptance lengths on the target's greedy answers lie a set distance apart. Shapes as in eagle.py.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny.eagle import MHA, MLA, Drafter, Heads, acceptance_length, walk
from tests.tiny.language import Language
from tests.tiny.targets import HEADS, HIDDEN, MAX_POSITION, YARN, aux_hidden, greedy
from tests.tiny.tokenizer import BOS, EOS, VOCAB_SIZE

DRAFT_VOCAB, STEPS, AUX, INTERMEDIATE = 256, 3, 3, 192
NOISED = {"noised_a": 2.2, "noised_b": 2.1}  # acceptance lengths at STEPS draft steps, on greedy answers
# (batch, time, surprise) of the training batches in turn, as in targets.py; surprise 0 is what greedy answers look like
SHAPES = ((16, 48, 0.0), (16, 48, 0.5), (16, 48, 0.0), (16, 48, 0.0), (16, 48, 0.0), (2, 384, 0.2))


def mha_config(layer_ids: list[int]) -> dict[str, Any]:
    """config.json of a Llama-style drafter."""
    return shared_config(MHA, "llama", layer_ids) | {
        "num_key_value_heads": 2,
        "head_dim": HIDDEN // HEADS,
        "rope_theta": 10000.0,
    }


def mla_config(layer_ids: list[int]) -> dict[str, Any]:
    """config.json of a DeepSeek-style drafter; the expert keys are those that SGLang's config class insists on."""
    yarn = {key: value for key, value in YARN.items() if key not in ("rope_type", "rope_theta")}
    return shared_config(MLA, "deepseek_v3", layer_ids) | {
        "num_key_value_heads": HEADS,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "rope_theta": YARN["rope_theta"],
        "rope_scaling": yarn | {"type": "yarn"},
        "moe_intermediate_size": 32,
        "moe_layer_freq": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


CONFIGS: dict[str, Callable[[list[int]], dict[str, Any]]] = {"mha": mha_config, "mla": mla_config}


def shared_config(architecture: str, model_type: str, layer_ids: list[int]) -> dict[str, Any]:
    """The keys that both styles have."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": DRAFT_VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_POSITION,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layer_ids, "use_aux_hidden_state": True},
    }


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The float tensors of a checkpoint, without lm_head and the final norm."""
    hidden, heads, inner = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    found: dict[str, tuple[int, ...]] = {"fc": (hidden, AUX * hidden)}
    if config["architectures"][0] == MHA:
        width, groups = config["head_dim"], config["num_key_value_heads"]
        attention: dict[str, tuple[int, ...]] = {
            "q_proj": (heads * width, 2 * hidden),
            "k_proj": (groups * width, 2 * hidden),
            "v_proj": (groups * width, 2 * hidden),
            "o_proj": (hidden, heads * width),
        }
    else:
        nope, rope, values = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        query, latent = config["q_lora_rank"], config["kv_lora_rank"]
        attention = {
            "q_a_proj": (query, 2 * hidden),
            "q_a_layernorm": (query,),
            "q_b_proj": (heads * (nope + rope), query),
            "kv_a_proj_with_mqa": (latent + rope, 2 * hidden),
            "kv_a_layernorm": (latent,),
            "kv_b_proj": (heads * (nope + values), latent),
            "o_proj": (hidden, heads * values),
        }
    found |= {f"midlayer.self_attn.{name}": shape for name, shape in attention.items()}
    found |= {f"midlayer.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    found["midlayer.mlp.down_proj"] = (hidden, inner)
    found |= {f"midlayer.{name}": (hidden,) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    return {f"{name}.weight": shape for name, shape in found.items()}


def draft_vocabulary(texts: list[list[int]]) -> Tensor:
    """The ids that the target writes most, ascending, [U]; the two ends of a text are always among them."""
    counts = Counter(token for text in texts for token in text)
    ranked = sorted(range(VOCAB_SIZE), key=lambda i: (i not in (BOS, EOS), -counts[i], i))
    return torch.tensor(sorted(ranked[:DRAFT_VOCAB]))


def untrained(config: dict[str, Any], ids_U: Tensor, target: PreTrainedModel, generator: torch.Generator) -> Drafter:
    """A drafter of random weights, whose head and final norm start as the target's own."""
    weights: dict[str, Tensor] = {}
    for name, shape in shapes(config).items():
        spread = shape[-1] ** -0.5
        weights[name] = torch.randn(shape, generator=generator) * spread if len(shape) > 1 else torch.ones(shape)
    weights["norm.weight"] = target.model.norm.weight.clone()
    weights["lm_head.weight"] = target.lm_head.weight[ids_U].clone()
    for tensor in weights.values():
        tensor.requires_grad_(True)
    weights["d2t"] = ids_U - torch.arange(len(ids_U))
    weights["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, ids_U, True)
    return Drafter(config, weights, target.get_input_embeddings().weight)


def train(
    drafter: Drafter,
    target: PreTrainedModel,
    inputs_to: tuple[int, ...],
    language: Language,
    steps: int,
    generator: torch.Generator,
    say: Callable[[str], None],
) -> None:
    """AdamW on the cross-entropy with the target's distribution over the draft vocabulary, over STEPS draft steps.

    Tokens are the text's own at every step, hidden states the drafter's. Leaves the weights frozen.
    """
    trained = [tensor for tensor in drafter.weights.values() if tensor.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps, pct_start=0.05)
    ids_U = drafter.target_ids_U
    for step in range(steps):
        batch, time, surprise = SHAPES[step % len(SHAPES)]
        tokens_BT = language.sample(batch, time, generator, surprise)
        aux_BTA, logits_BTV = aux_hidden(target, tokens_BT, inputs_to)
        teacher_BTU = logits_BTV[..., ids_U].softmax(-1)

        rows = time - STEPS
        hidden_BTH, loss = drafter.fuse(aux_BTA[:, :rows]), torch.zeros(())
        earlier: list[Heads] = []
        for k in range(STEPS):
            shifted = slice(1 + k, 1 + k + rows)
            hidden_BTH, guess_BTU = drafter.step(hidden_BTH, tokens_BT[:, shifted], earlier)
            loss = loss - (teacher_BTU[:, shifted] * guess_BTU.log_softmax(-1)).sum(-1).mean() / STEPS
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            say(f"drafter: step {step + 1} of {steps}, {loss.item():.3f} nats")
    for tensor in trained:
        tensor.requires_grad_(False)


@dataclass(frozen=True)
class Answers:
    """Greedy answers of a target and what it would hand to a drafter along them.

    `texts` are prompts of `start` tokens with `length` + STEPS tokens after them; the walk covers `length`.
    """

    texts: list[list[int]]
    aux_BTA: Tensor
    start: int
    length: int

    @classmethod
    def of(
        cls, target: PreTrainedModel, inputs_to: tuple[int, ...], language: Language, generator: torch.Generator
    ) -> "Answers":
        start, length, count = 12, 96, 40
        prompts_BT = language.prompts(count, start, generator)
        texts = greedy(target, prompts_BT.tolist(), length + STEPS)
        aux_BTA, _ = aux_hidden(target, torch.tensor(texts), inputs_to)
        return cls(texts, aux_BTA, start, length)

    def written(self) -> list[list[int]]:
        """The answers without their prompts."""
        return [text[self.start :] for text in self.texts]

    def histogram(self, drafter: Drafter) -> list[int]:
        """How many verify steps kept 0, 1 … STEPS draft tokens, over all answers."""
        guesses = drafter.propose(self.aux_BTA[:, :-1], torch.tensor(self.texts)[:, 1:], STEPS).tolist()
        walks = [
            walk(text, guessed, self.start, self.start + self.length)
            for text, guessed in zip(self.texts, guesses, strict=True)
        ]
        return [sum(counts) for counts in zip(*walks, strict=True)]


def noised(drafter: Drafter, noise_UH: Tensor, scale: float) -> Drafter:
    """The drafter with `scale` times the head's own spread of noise on its lm_head."""
    head_UH = drafter.weights["lm_head.weight"]
    spoilt = head_UH + scale * head_UH.std() * noise_UH
    return Drafter(drafter.config, drafter.weights | {"lm_head.weight": spoilt}, drafter.embed_VH)


def spoil(drafter: Drafter, answers: Answers, wanted: float, noise_UH: Tensor) -> tuple[Drafter, float]:
    """The noised drafter whose acceptance length is nearest to `wanted`, and its noise scale; by bisection."""
    low, high = 0.0, 4.0
    tried: dict[float, float] = {}
    for _ in range(12):
        scale = (low + high) / 2
        tried[scale] = acceptance_length(answers.histogram(noised(drafter, noise_UH, scale)))
        low, high = (scale, high) if tried[scale] > wanted else (low, scale)
    best = min(tried, key=lambda scale: (abs(tried[scale] - wanted), scale))
    return noised(drafter, noise_UH, best), best


def write(drafter: Drafter, folder: Path, answers: Answers, noise_scale: float) -> float:
    """`folder` as SGLang reads it, with the acceptance that was measured beside it; returns the acceptance length."""
    folder.mkdir(parents=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in drafter.weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(drafter.config, indent=1))

    histogram = answers.histogram(drafter)
    known = set(drafter.target_ids_U.tolist())
    written = [token for answer in answers.written() for token in answer]
    measured = {
        "acceptance_length": acceptance_length(histogram),
        "histogram": histogram,
        "steps": STEPS,
        "noise_scale": noise_scale,
        "answers": len(answers.texts),
        "tokens_each": answers.length,
        "out_of_vocabulary": sum(token not in known for token in written) / len(written),
    }
    (folder / "acceptance.json").write_text(json.dumps(measured, indent=1))
    return acceptance_length(histogram)
