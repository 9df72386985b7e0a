"""What a preflight looks at: a drafter folder, the target that it would draft for, and how they would be served."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter.checkpoint.folder import DrafterError, DrafterFolder
from drafter.checkpoint.specials import Special, target_specials
from drafter.checkpoint.vocab import VocabError
from drafter.data.target import TOKENIZERS
from drafter.data.tensorfile import plain_bytes

# What SGLang 0.5.23 does with layer ids depends on the target's class: DeepSeek's takes them as inputs of layers
# (`models/deepseek_v2.py`), unless the first is 1; the others take them as outputs (`models/llama.py`).
INPUT_TO_LAYER = ("Deepseek", "KimiK2")


@dataclass(frozen=True)
class TargetFacts:
    """What a target's folder says about itself. `config` is the text model's; sizes and specials are None
    where it is silent.
    """

    path: Path
    config: dict[str, Any]
    architecture: str
    config_sha256: str
    tokenizer_sha256: str | None
    specials: list[Special] | None

    def size(self, key: str) -> int | None:
        """A whole number of the config, or None."""
        found = self.config.get(key)
        return found if type(found) is int and found > 0 else None

    @property
    def mla(self) -> bool:
        """Whether it attends through a latent, which takes attention backends of its own."""
        return self.size("kv_lora_rank") is not None

    @property
    def takes_inputs(self) -> bool:
        """Whether layer ids mean inputs to layers (but for a first id of 1), rather than outputs."""
        return self.architecture.startswith(INPUT_TO_LAYER)


@dataclass(frozen=True)
class Deployment:
    """How a profile would serve the drafter; None where it leaves the choice to the engine."""

    name: str
    device: str
    context_length: int
    layer_ids: list[int] | None = None
    sha256: str | None = None
    attention_backend: str | None = None
    draft_attention_backend: str | None = None
    quantization: str | None = None
    draft_quantization: str | None = None
    trust_remote_code: bool = False
    extra_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subject:
    """`target` and `deployment` are None where they are not known here: what needs them is not checked."""

    folder: DrafterFolder
    target: TargetFacts | None = None
    deployment: Deployment | None = None

    @property
    def config(self) -> dict[str, Any]:
        return self.folder.config

    @property
    def config_file(self) -> Path:
        return self.folder.path / "config.json"


def read_target(folder: Path) -> TargetFacts:
    """Raises DrafterError where the folder holds no model's config, VocabError where its tokenizer cannot be read."""
    try:
        raw = plain_bytes(folder / "config.json")
        whole = json.loads(raw)
        config = whole.get("text_config") or whole
        names = whole.get("architectures") or [""]
        facts = TargetFacts(
            folder,
            dict(config),
            str(names[0]),
            hashlib.sha256(raw).hexdigest(),
            _tokenizer_sha256(folder),
            target_specials(folder, config.get("vocab_size")),
        )
    except OSError as error:
        raise DrafterError(
            f"target {error.filename or folder} cannot be read ({error.strerror}): give the folder that the engine "
            "loads the target from."
        ) from None
    except VocabError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        raise DrafterError(
            f"{folder / 'config.json'} is no model's configuration: give the folder that the engine loads the target "
            "from."
        ) from None
    if facts.size("vocab_size") is None or facts.size("hidden_size") is None:
        raise DrafterError(f"{folder / 'config.json'} names no vocab_size and hidden_size: is it a target's folder?")
    return facts


def _tokenizer_sha256(folder: Path) -> str | None:
    file = next((folder / name for name in TOKENIZERS if (folder / name).is_file()), None)
    return hashlib.sha256(file.read_bytes()).hexdigest() if file else None
