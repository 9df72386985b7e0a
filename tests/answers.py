"""python -m tests.answers: greedy answers of the tiny Llama with what a drafter is fed over them, captured.

A folder as bench.train_quality takes it: target, vocab.safetensors, shards to learn from and held, of other prompts.
The features are transformers' own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from drafter.training.model import load_drafter
from drafter.training.target import load_target
from tests.drafter.training.shard_folder import captured, write_shards
from tests.tiny import language, targets, tokenizer
from tests.tiny.pair import SEED, TinyPair, build

SHORTEST, LONGEST = 4, 24  # prompts, in tokens
PAST = 8  # tokens past an answer


def write_answers(folder: Path, pair: TinyPair, documents: int, held: int, tokens: int) -> Path:
    """`documents` answers of `tokens` to learn from and `held` others, each after a random prompt of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "target").symlink_to(pair.target.absolute())
    vocab = load_drafter(pair.drafters["mha_perfect"], load_target(pair.target).embed_VH).vocab
    vocab.save(folder / "vocab.safetensors")
    generator = torch.Generator().manual_seed(SEED + 2)
    tongue, model = language.build(tokenizer.train(), SEED), targets.load(pair.reference)
    for name, count in (("shards", documents), ("held", held)):
        lengths = torch.randint(SHORTEST, LONGEST + 1, (count,), generator=generator).tolist()
        prompts = [tongue.prompts(1, length, generator)[0].tolist() for length in lengths]
        texts = targets.greedy(model, prompts, tokens + PAST)
        spans = [(length, length + tokens) for length in lengths]
        write_shards(folder / name, captured(pair, texts, spans), pair)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.answers", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder, which is made")
    parser.add_argument("--documents", type=int, default=600)
    parser.add_argument("--held", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    print(write_answers(args.out, build("llama"), args.documents, args.held, args.tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
