"""A tiny target with its drafters, built on first use and cached by a hash of what builds it."""

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAMES = ("llama", "kimi")
SEED = 2026
# `layer_ids` as the drafter's config and SGLang's --return-aux-hidden-state-layer-ids have them. SGLang adds one for
# every Llama target, and for a Kimi target takes them as they are unless the first is 1.
LAYERS: dict[str, dict[str, Any]] = {
    "llama": {"layer_ids": (0, 1, 2), "convention": "output_of_layer", "inputs_to": (1, 2, 3)},
    "kimi": {"layer_ids": (2, 3, 4), "convention": "input_to_layer", "inputs_to": (2, 3, 4)},
}
STYLES = {"llama": ("mha",), "kimi": ("mha", "mla")}


@dataclass(frozen=True)
class TinyPair:
    """Where a target and its drafters lie, and what a test must know to use them.

    `drafters` has `STYLE_perfect`, `STYLE_noised_a` and `STYLE_noised_b` for the styles `mha` and (kimi) `mla`.
    """

    name: str
    folder: Path
    target: Path
    reference: Path
    """The same weights for Hugging Face's AutoModelForCausalLM."""
    drafters: dict[str, Path]
    layer_ids: tuple[int, ...]
    """As SGLang's flags and a drafter's eagle_config have them."""
    convention: str
    """What `layer_ids` means: `output_of_layer` or `input_to_layer`."""
    inputs_to: tuple[int, ...]
    """The same layers as indices into the hidden states of transformers."""
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    trust_remote_code: bool

    def acceptance(self, drafter: str) -> dict[str, Any]:
        """What the builder measured on greedy answers: `acceptance_length`, `histogram`, `out_of_vocabulary` …"""
        measured: dict[str, Any] = json.loads((self.drafters[drafter] / "acceptance.json").read_text())
        return measured


def cache_root() -> Path:
    """$EYAS_TEST_CACHE, or .cache/tiny in the repository."""
    return Path(os.environ.get("EYAS_TEST_CACHE") or HERE.parent.parent / ".cache" / "tiny")


def source_hash() -> str:
    """Twelve hex digits over the files that build the models and the versions of the libraries that run them."""
    digest = hashlib.sha256()
    for path in sorted(HERE.iterdir()):
        if path.suffix in (".py", ".txt") and not path.name.startswith(("test_", "__")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for package in ("torch", "transformers", "tokenizers"):
        digest.update(f"{package} {version(package)}\n".encode())
    return digest.hexdigest()[:12]


def build(name: str, root: Path | None = None, force: bool = False) -> TinyPair:
    """The pair called `name`, from the cache or built now (about a minute). Two processes at once are safe.

    `force` builds it anew. Raises ValueError for an unknown name.
    """
    if name not in NAMES:
        raise ValueError(f"no tiny model is called {name!r}: choose one of {', '.join(NAMES)}")
    root = root or cache_root()
    final = root / f"{name}-{source_hash()}"
    if force or not final.exists():
        root.mkdir(parents=True, exist_ok=True)
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the second process waits here, then finds the folder
            if force or not final.exists():
                beside = final.with_suffix(".tmp")
                shutil.rmtree(beside, ignore_errors=True)  # of a build that was killed
                construct(name, beside, progress(name))
                if final.exists():
                    shutil.rmtree(final)
                beside.rename(final)
    return read(name, final)


def read(name: str, folder: Path) -> TinyPair:
    """The pair in a folder that `construct` wrote."""
    layers = LAYERS[name]
    return TinyPair(
        name=name,
        folder=folder,
        target=folder / "target",
        reference=folder / ("target" if name == "llama" else "reference"),
        drafters={path.name: path for path in sorted((folder / "drafters").iterdir())},
        layer_ids=layers["layer_ids"],
        convention=layers["convention"],
        inputs_to=layers["inputs_to"],
        vocab_size=512,
        draft_vocab_size=256,
        hidden_size=64,
        trust_remote_code=name == "kimi",
    )


def progress(name: str) -> Callable[[str], None]:
    """A function that writes a line to stderr, with the seconds since now."""
    begun = time.monotonic()

    def say(line: str) -> None:
        print(f"tiny {name} {time.monotonic() - begun:5.1f} s  {line}", file=sys.stderr, flush=True)

    return say


def construct(name: str, folder: Path, say: Callable[[str], None]) -> None:
    """Trains the target and its drafters, and writes them into `folder`, which must not exist."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from tests.tiny import drafters, language, targets, tokenizer

    disable_progress_bar()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums come out the same on any number of cores, and a busy machine is not made to spin
    try:
        generator = torch.Generator().manual_seed(SEED)
        tokens = tokenizer.train()
        tongue = language.build(
            tokenizer.printable_ids(tokens),
            specials=len(tokenizer.SPECIALS),
            end_token=tokenizer.EOS,
            vocab_size=tokenizer.VOCAB_SIZE,
            seed=SEED,
        )
        folder.mkdir(parents=True)
        if name == "llama":
            target = targets.llama()
            targets.train(target, tongue, 500, generator, say)
            targets.write_llama(target, tokens, folder)
        else:
            target = targets.deepseek()
            targets.train(target, tongue, 500, generator, say)
            targets.write_kimi(target, tokens, folder)

        layers = LAYERS[name]
        answers = drafters.Answers.of(target, layers["inputs_to"], tongue, generator)
        ids_U = drafters.draft_vocabulary(answers.written())
        for style in STYLES[name]:
            make = drafters.mha_config if style == "mha" else drafters.mla_config
            perfect = drafters.untrained(make(list(layers["layer_ids"])), ids_U, target, generator)
            drafters.train(perfect, target, layers["inputs_to"], tongue, 300, generator, say)
            length = drafters.write(perfect, folder / "drafters" / f"{style}_perfect", answers, 0.0)
            say(f"{style}_perfect: acceptance length {length:.3f}")
            noise_UH = torch.randn(perfect.weights["lm_head.weight"].shape, generator=generator)
            for label, wanted in drafters.NOISED.items():
                spoilt, scale = drafters.spoil(perfect, answers, wanted, noise_UH)
                length = drafters.write(spoilt, folder / "drafters" / f"{style}_{label}", answers, scale)
                say(f"{style}_{label}: acceptance length {length:.3f}")
    finally:
        torch.set_num_threads(threads)
