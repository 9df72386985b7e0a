"""The two tiny targets: a Llama, and a Kimi-K2.5 (MLA, experts, yarn) around a DeepSeek-V3 text model.

Each is trained to speak the language of language.py and written as SGLang reads it. `reference` folders hold what
Hugging Face's own classes load: the same weights under the names of the text model.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.tiny.language import Language
from tests.tiny.tokenizer import BOS, EOS, MEDIA, PAD, VOCAB_SIZE

HIDDEN, HEADS, MAX_POSITION = 64, 4, 2048
IDS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 512,
}
# (batch, time) of the training batches in turn: the long one teaches attention to stay sharp over many keys.
SHAPES = (*[(12, 64)] * 7, (3, 384))


def llama() -> LlamaForCausalLM:
    """An untrained Llama of four layers."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITION,
        tie_word_embeddings=False,
        dtype="float32",
        **IDS,
    )
    return LlamaForCausalLM(config)


def deepseek() -> DeepseekV3ForCausalLM:
    """An untrained DeepSeek-V3 of five layers, the first of them dense: the text half of Kimi-K2.5."""
    config = DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=5,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        max_position_embeddings=MAX_POSITION,
        rope_parameters=dict(YARN),
        tie_word_embeddings=False,
        dtype="float32",
        **IDS,
    )
    return DeepseekV3ForCausalLM(config)


def train(
    model: PreTrainedModel, language: Language, steps: int, generator: torch.Generator, say: Callable[[str], None]
) -> None:
    """AdamW on fresh walks, cosine learning rate; leaves the model in evaluation mode with frozen weights."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=steps, pct_start=0.05)
    for step in range(steps):
        tokens_BT = language.sample(*SHAPES[step % len(SHAPES)], generator)
        loss = language.loss(model(tokens_BT, use_cache=False).logits, tokens_BT)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            say(f"target: step {step + 1} of {steps}, {loss.item():.3f} nats")
    model.eval().requires_grad_(False)


def write_llama(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """`folder/target`, which transformers can load too."""
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")


def write_kimi(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """`folder/target` as a Kimi-K2.5 checkpoint, and `folder/reference` as the DeepSeek-V3 one inside it."""
    target, reference = folder / "target", folder / "reference"
    for each in (target, reference):
        tokenizer.save_pretrained(each)
    model.save_pretrained(reference)

    # transformers reads neither of these keys and does not save them; SGLang's DeepSeek needs all three
    text = json.loads((reference / "config.json").read_text())
    text |= {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    vision = {
        "patch_size": 14,
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
        "init_pos_emb_time": 4,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "text_hidden_size": HIDDEN,
        "mm_hidden_size": 32,
        "vt_hidden_size": 32,
        "vt_num_attention_heads": 2,
        "vt_num_hidden_layers": 1,
        "vt_intermediate_size": 64,
        "merge_kernel_size": [2, 2],
        "projector_ln_eps": 1e-5,
    }
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": vision,
        "media_placeholder_token_id": MEDIA,
        "dtype": "float32",
        "tie_word_embeddings": False,
        **IDS,
    }
    (target / "config.json").write_text(json.dumps(config, indent=1))
    weights = load_file(reference / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in weights.items()}, target / "model.safetensors")
    shutil.copy(Path(__file__).with_name("kimi_processor.py"), target)
    processor = {
        "processor_class": "TinyKimiProcessor",
        "auto_map": {"AutoProcessor": "kimi_processor.TinyKimiProcessor"},
    }
    (target / "processor_config.json").write_text(json.dumps(processor, indent=1))


def load(reference: Path) -> PreTrainedModel:
    """The target as Hugging Face runs it, fp32, frozen."""
    return AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32).eval().requires_grad_(False)


def aux_hidden(model: PreTrainedModel, tokens_BT: Tensor, inputs_to: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """What a drafter is fed, [B, T, len(inputs_to) * H]: what enters the named layers; and the logits [B, T, V].

    `hidden_states[i]` of transformers is the input to layer i, that is the output of layer i - 1.
    """
    out = model(tokens_BT, output_hidden_states=True, use_cache=False)
    return torch.cat([out.hidden_states[i] for i in inputs_to], dim=-1), out.logits


def greedy(model: PreTrainedModel, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Each prompt with `count` greedy tokens after it; the end token is a token like any other.

    Slow and plain: every step runs the whole text again. Prompts of any lengths share a batch, since in a causal model
    nothing to the right of a token can change it.
    """
    texts = [list(prompt) for prompt in prompts]
    for _ in range(count):
        longest = max(map(len, texts))
        tokens_BT = torch.tensor([text + [PAD] * (longest - len(text)) for text in texts])
        logits_BTV = model(tokens_BT, use_cache=False).logits
        for b, text in enumerate(texts):
            text.append(int(logits_BTV[b, len(text) - 1].argmax()))
    return texts
