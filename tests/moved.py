"""python -m tests.moved: the tiny Kimi trained further on other data, as Kimi-K2.5 was from K2, for bench.transfer.

The new language is the old one with a quarter of its words swapped for words that were rare: what follows what is the
same for the others. The old drafter therefore knows much of it, and a quarter of what is said now is outside its
vocabulary. The folder gets a profile and prompts: `python -m bench.transfer --moved FOLDER`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.engine.profiles import profile_text
from tests.tiny.pair import SEED, TinyPair, build, cache_root, progress, source_hash

if TYPE_CHECKING:
    from tests.tiny.language import Language

SWAPPED = 64  # of the 258 words of the old language
STEPS, LR = 240, 2e-3
PROMPTS, HELD = 2000, 200
WORDS = "the eagle hunts over water and sees a fish then it dives holds turns lands feeds its young in spring"


def build_moved(root: Path | None = None) -> Path:
    """The folder of the moved target, from the cache or built now, which takes a minute on one core."""
    root = root or cache_root()
    mark = hashlib.sha256(source_hash().encode() + Path(__file__).read_bytes()).hexdigest()[:12]
    final = root / f"kimi-moved-{mark}"
    if not final.exists():
        beside = final.with_name(final.name + ".tmp")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        construct(build("kimi", root), beside, progress("kimi-moved"))
        beside.rename(final)
    pair = build("kimi", root)
    moved = replace(pair, name="moved", target=final / "target", drafters={})
    # A drafter that is nearly always wrong is one of the arms, so no engine may be stopped for it.
    off = '[probe]\noff = "an experiment with drafters that are wrong on purpose"\n'
    (final / "profile.toml").write_text(profile_text(moved) + off)
    (final / "drafter").unlink(missing_ok=True)
    (final / "drafter").symlink_to(pair.drafters["mha_perfect"])
    return final


def construct(pair: TinyPair, folder: Path, say: Callable[[str], None]) -> None:
    """Trains the old target on, and writes it with its prompts."""
    import torch

    from tests.tiny import language, targets, tokenizer

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(SEED + 1)
    tokens = tokenizer.train()
    tongue = moved(language.build(tokens, SEED))
    model = targets.load(pair.reference).train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS, pct_start=0.05)
    for step in range(STEPS):
        tokens_BT = tongue.sample(*targets.SHAPES[step % len(targets.SHAPES)], generator)
        loss = tongue.loss(model(tokens_BT, use_cache=False).logits, tokens_BT)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 40 == 0:
            say(f"target: step {step + 1} of {STEPS}, {loss.item():.3f} nats")
    targets.write_kimi(model.eval(), tokens, folder)
    rng = random.Random(SEED)
    lines = {" ".join(rng.choices(WORDS.split(), k=rng.randint(4, 30))) for _ in range(PROMPTS + HELD)}
    for name, some in (("asked", sorted(lines)[HELD:]), ("held", sorted(lines)[:HELD])):
        rng.shuffle(some)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": line}) + "\n" for line in some))


def moved(tongue: Language) -> Language:
    """The language with SWAPPED words of its core in the places of words outside it, and the other way round."""
    import torch

    core = tongue.core_C.tolist()
    outside = [i for i in tongue.printable.tolist() if i not in set(core)]
    swap_V = torch.arange(len(tongue.mode_V))
    for inner, outer in zip(core[1 : 1 + SWAPPED], outside, strict=False):  # core[0] is the end token, which stays
        swap_V[inner], swap_V[outer] = outer, inner
    main_MV, second_V, third_V, mode_V = (
        torch.empty_like(each) for each in (tongue.main_MV, tongue.second_V, tongue.third_V, tongue.mode_V)
    )
    main_MV[:, swap_V] = swap_V[tongue.main_MV]
    second_V[swap_V], third_V[swap_V] = swap_V[tongue.second_V], swap_V[tongue.third_V]
    mode_V[swap_V] = tongue.mode_V
    return replace(
        tongue,
        main_MV=main_MV,
        second_V=second_V,
        third_V=third_V,
        mode_V=mode_V,
        core_C=swap_V[tongue.core_C],
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.moved", description="Build the moved target, or find it.")
    parser.add_argument("--out", type=Path, help="folder to build in (default: $EYAS_TEST_CACHE, or .cache/tiny)")
    print(build_moved(parser.parse_args().out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
