"""The original EAGLE's checkpoint, a pickle of torch: read without executing it, and written as a folder to convert.

The one place of these rooms that needs torch, which is imported here and refused with the fix where it is missing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from drafter.checkpoint import formats, shapes
from drafter.checkpoint.folder import DrafterError
from drafter.checkpoint.subject import TargetFacts
from drafter.data.tensorfile import write_tensors

WEIGHTS = "pytorch_model.bin"
KINDS = ("float16", "bfloat16", "float32", "int64", "int32", "uint8", "bool")


def is_eagle_bin(folder: Path) -> bool:
    """Whether a folder holds EAGLE's pickle and no safetensors."""
    return (folder / WEIGHTS).is_file() and not any(folder.glob("*.safetensors"))


def unpickle(folder: Path, into: Path, target: TargetFacts) -> None:
    """The folder with safetensors, its numbers as they are (fp16 stays fp16), and the config that SGLang asks for.

    EAGLE names no layers and captures what SGLang's default does. Raises DrafterError.
    """
    try:
        import torch
    except ImportError:
        raise DrafterError(
            f"{folder / WEIGHTS} is a pickle of torch, which is not installed here: pip install 'eyas[drafter]'."
        ) from None
    from pickle import UnpicklingError

    try:
        found = torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True)
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError as error:
        raise DrafterError(f"{error.filename} is missing: EAGLE writes it beside {WEIGHTS}.") from None
    except (UnpicklingError, RuntimeError, ValueError, EOFError, RecursionError) as error:
        raise DrafterError(
            f"{folder} holds no readable EAGLE checkpoint ({str(error).splitlines()[0]:.200}): what is not tensors "
            "alone is never loaded."
        ) from None
    sound = isinstance(found, dict) and all(torch.is_tensor(tensor) for tensor in found.values())
    if not sound or not isinstance(config, dict):
        raise DrafterError(f"{folder} holds no EAGLE checkpoint: expected tensors by name, and a JSON object.")
    layers = formats.ids_of(formats.default_inputs(target), target)
    config |= {"architectures": [shapes.LLAMA]}
    config.setdefault("model_type", "llama")
    config.setdefault("num_hidden_layers", 1)
    config.setdefault("draft_vocab_size", config.get("vocab_size"))
    config.setdefault("eagle_config", {formats.LAYERS_KEY: layers, "use_aux_hidden_state": True})
    (into / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    write_tensors(into / "model.safetensors", {str(name): _array(torch, str(name), x) for name, x in found.items()})


def _array(torch: Any, name: str, tensor: Any) -> np.ndarray:
    """A tensor as numpy has it; uint16 is bfloat16. Raises DrafterError for one that no drafter here is made of."""
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in KINDS or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise DrafterError(
            f"{WEIGHTS}: {name:.80} is {kind} ({tensor.layout} on {tensor.device}), expected numbers of "
            f"{', '.join(KINDS)}: save it again as fp16."
        )
    whole = tensor.detach().contiguous()
    found: np.ndarray = whole.view(torch.uint16).numpy() if whole.dtype == torch.bfloat16 else whole.numpy()
    return found
