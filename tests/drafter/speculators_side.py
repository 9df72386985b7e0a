"""Run by the real speculators in its own environment: loads or makes a drafter there, and writes its logits down.

python speculators_side.py load FOLDER STATES.npz OUT.npz
python speculators_side.py make FOLDER TARGET STATES.npz OUT.npz [KEY=JSON …]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

STEPS = 3
ATTENTION = "eager"  # speculators' default, flex attention, has to be compiled first


def logits(model: Eagle3DraftModel, states: Path, out: Path) -> None:
    """Every step's draft logits [STEPS, T, U] for `aux` [T, 3 H] and the tokens one position on, `tokens` [T]."""
    found, given = [], np.load(states)
    model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output[0].float().numpy()))
    tokens = torch.from_numpy(given["tokens"])[None]
    with torch.no_grad():
        model.eval().float()(
            torch.from_numpy(given["aux"])[None], tokens, document_ids=torch.zeros_like(tokens), ttt_steps=STEPS
        )
    np.savez(out, logits=np.stack(found))


def make(target: str, **changes: object) -> Eagle3DraftModel:
    """A drafter as speculators' own trainer would begin it, with random weights and the target's embedding."""
    torch.manual_seed(5)
    layer = LlamaConfig.from_pretrained(target)
    layer.num_hidden_layers, layer.intermediate_size = 1, 96
    layer._attn_implementation = ATTENTION
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=200,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(target),
        ),
        **changes,
    )
    model = Eagle3DraftModel(config)
    ids = torch.randperm(layer.vocab_size)[:200].sort().values
    mask = torch.zeros(layer.vocab_size, dtype=torch.bool)
    mask[ids] = True
    model.load_vocab_mappings(mask, ids - torch.arange(200))
    model.load_verifier_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name == "lm_head.weight":
                parameter.normal_()
    return model


if __name__ == "__main__":
    verb, folder, *rest = sys.argv[1:]
    if verb == "load":
        config = Eagle3SpeculatorConfig.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = ATTENTION
        logits(Eagle3DraftModel.from_pretrained(folder, config=config), Path(rest[0]), Path(rest[1]))
    else:
        target, states, out, *changes = rest
        made = make(target, **{key: json.loads(value) for key, _, value in (each.partition("=") for each in changes)})
        made.save_pretrained(folder)
        logits(made, Path(states), Path(out))
