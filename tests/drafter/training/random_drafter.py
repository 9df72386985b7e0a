"""Small drafters of random weights, norms included: as the trainer computes them, and as the reference does."""

import torch

from drafter.checkpoint.vocab import DraftVocab
from drafter.training.model import Eagle3
from tests.tiny.drafters import mha_config, mla_config, shapes
from tests.tiny.eagle import Drafter

V, U, H = 512, 200, 64


def config(groups: int) -> dict:
    """Of `groups` key heads; 0: latent attention, with values narrower than keys."""
    if not groups:
        return mla_config([0, 1, 2]) | {"draft_vocab_size": U, "v_head_dim": 24, "qk_nope_head_dim": 12}
    return mha_config([0, 1, 2]) | {"num_key_value_heads": groups, "draft_vocab_size": U}


def reference(groups: int = 2) -> Drafter:
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(shape, generator=generator) * (0.5 if len(shape) == 1 else shape[-1] ** -0.5)
        for name, shape in shapes(config(groups)).items()
    }
    weights["norm.weight"] = torch.randn(H, generator=generator)
    weights["lm_head.weight"] = torch.randn(U, H, generator=generator)
    weights["d2t"] = torch.randperm(V, generator=generator)[:U].sort().values - torch.arange(U)
    return Drafter(config(groups), weights, torch.randn(V, H, generator=generator))


def drafter(groups: int = 2) -> Eagle3:
    slow = reference(groups)
    vocab = DraftVocab.from_tensors(slow.weights["d2t"].numpy(), None, V)
    model = Eagle3(config(groups), vocab, slow.embed_VH)
    model.load_state_dict({name: tensor for name, tensor in slow.weights.items() if name != "d2t"})
    return model
