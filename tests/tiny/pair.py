"""A tiny target with its drafters, built on first use and cached under a hash of what builds it."""

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
SEED = 2026
DRAFTER_STEPS = 320


@dataclass(frozen=True)
class Recipe:
    """What differs between the pairs.

    `layer_ids` are what a drafter's eagle_config and SGLang's --return-aux-hidden-state-layer-ids hold. SGLang adds one
    to them for a Llama target; for a Kimi target it takes them as they are, unless the first is 1. `inputs_to` are the
    layers whose input is captured: the same numbers as indices into the `hidden_states` of transformers.
    """

    layer_ids: tuple[int, ...]
    convention: str
    inputs_to: tuple[int, ...]
    styles: tuple[str, ...]
    target_steps: int


RECIPES = {
    "llama": Recipe((0, 1, 2), "output_of_layer", (1, 2, 3), ("mha",), 500),
    "kimi": Recipe((2, 3, 4), "input_to_layer", (2, 3, 4), ("mha", "mla"), 500),
}
NAMES = tuple(RECIPES)


@dataclass(frozen=True)
class TinyPair:
    """Where a target and its drafters lie, and what a test must know to use them.

    `drafters` has `STYLE_perfect`, `STYLE_noised_a` and `STYLE_noised_b`; the styles are `mha` and, for Kimi, also
    `mla`. `reference` holds the target's weights for the AutoModelForCausalLM of transformers. `convention` says what
    `layer_ids` mean: `output_of_layer` or `input_to_layer`.
    """

    name: str
    folder: Path
    target: Path
    reference: Path
    drafters: dict[str, Path]
    layer_ids: tuple[int, ...]
    convention: str
    inputs_to: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    trust_remote_code: bool

    def acceptance(self, drafter: str) -> dict[str, Any]:
        """What the builder measured on greedy answers: `acceptance_length`, `histogram`, `out_of_vocabulary` …"""
        return read_json(self.drafters[drafter] / "acceptance.json")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


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
    """The pair called `name` (one of NAMES), from the cache or built now, which takes a minute or two on one core.

    Two processes at once are safe: one builds, the other waits for it. `root` is the cache's folder; `force` builds
    anew. Raises ValueError for an unknown name.
    """
    if name not in NAMES:
        raise ValueError(f"no tiny model is called {name!r}: choose one of {', '.join(NAMES)}")
    root = root or cache_root()
    final = root / f"{name}-{source_hash()}"
    if force or not final.exists():
        root.mkdir(parents=True, exist_ok=True)
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if force or not final.exists():  # another process may have built it while this one waited
                beside = final.with_name(final.name + ".tmp")
                shutil.rmtree(beside, ignore_errors=True)  # left by a build that was killed
                construct(name, beside, progress(name))
                shutil.rmtree(final, ignore_errors=True)
                beside.rename(final)
    return read(name, final)


def read(name: str, folder: Path) -> TinyPair:
    """The pair in a folder that `construct` wrote."""
    recipe = RECIPES[name]
    drafters = {path.name: path for path in sorted((folder / "drafters").iterdir())}
    config = read_json(next(iter(drafters.values())) / "config.json")
    reference = folder / "reference"
    return TinyPair(
        name=name,
        folder=folder,
        target=folder / "target",
        reference=reference if reference.exists() else folder / "target",
        drafters=drafters,
        layer_ids=recipe.layer_ids,
        convention=recipe.convention,
        inputs_to=recipe.inputs_to,
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        hidden_size=config["hidden_size"],
        trust_remote_code=(folder / "target" / "processor_config.json").exists(),
    )


def progress(name: str) -> Callable[[str], None]:
    """A function that writes a line to stderr, with the seconds since now."""
    begun = time.monotonic()

    def say(line: str) -> None:
        print(f"tiny {name} {time.monotonic() - begun:5.1f} s  {line}", file=sys.stderr, flush=True)

    return say


def construct(name: str, folder: Path, say: Callable[[str], None]) -> None:
    """Trains the target and its drafters and writes them into `folder`, which must not exist."""
    import torch  # here, since a pair from the cache needs neither torch nor the seconds that it takes to import
    from transformers.utils.logging import disable_progress_bar

    from tests.tiny import drafters, language, targets, tokenizer

    disable_progress_bar()
    recipe = RECIPES[name]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums then come out the same on any number of cores
    try:
        generator = torch.Generator().manual_seed(SEED)
        tokens = tokenizer.train()
        tongue = language.build(tokens, SEED)
        target = targets.llama() if name == "llama" else targets.deepseek()
        targets.train(target, tongue, recipe.target_steps, generator, say)
        folder.mkdir(parents=True)
        write_target = targets.write_llama if name == "llama" else targets.write_kimi
        write_target(target, tokens, folder)

        answers = drafters.Answers.of(target, recipe.inputs_to, tongue, generator)
        ids_U = drafters.draft_vocabulary(answers.written())
        for style in recipe.styles:
            config = drafters.CONFIGS[style](list(recipe.layer_ids))
            perfect = drafters.untrained(config, ids_U, target, generator)
            drafters.train(perfect, target, recipe.inputs_to, tongue, DRAFTER_STEPS, generator, say)
            length = drafters.write(perfect, folder / "drafters" / f"{style}_perfect", answers, 0.0)
            say(f"{style}_perfect: acceptance length {length:.3f}")
            noise_UH = torch.randn(perfect.weights["lm_head.weight"].shape, generator=generator)
            for label, wanted in drafters.NOISED.items():
                spoilt, scale = drafters.spoil(perfect, answers, wanted, noise_UH)
                length = drafters.write(spoilt, folder / "drafters" / f"{style}_{label}", answers, scale)
                say(f"{style}_{label}: acceptance length {length:.3f}")
    finally:
        torch.set_num_threads(threads)
