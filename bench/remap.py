"""What a remap costs: `python -m drafter remap` at Kimi's size, against copying the same bytes.

Makes a drafter of 2.4 GB, the head of its verifier (one of two shards, 2.3 GB) and two maps that overlap as the case's
did, in a temporary folder that is removed. Both commands write to the same disk and end with fsync.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drafter.checkpoint.headstart import INITS
from drafter.checkpoint.vocab import DraftVocab
from drafter.data.tensorfile import array_part, to_bf16
from drafter.data.tensorwriter import Part, write_parts
from drafter.report import command, machine

TEXT = """\
examples:
  python -m bench.remap --small
  python -m bench.remap --runs 5 --cold --json >remap.json

ratio_vs_cp: the median over the runs of (seconds of the remap, its process included) / (seconds of cp --reflink=never
and fsync of the same drafter), each pair one after the other
--cold: both sides' files are dropped from the page cache before each measurement; else both are read before
exit codes: 0 fine, 1 a command failed, 2 usage, 130 interrupted
"""
# python -m drafter, which says its own peak at the end: wait4 would count what this process held when it forked.
REMAP = """\
import sys
from drafter.__main__ import main
code = main(sys.argv[1:])
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM:")), end="", flush=True)
sys.exit(code)
"""
BLOCK = 1 << 22  # random numbers that the big tensors repeat


class BenchError(RuntimeError):
    """A measurement that could not be made."""


@dataclass(frozen=True)
class Sizes:
    """Of the drafter and its verifier; the default is Kimi's. identical, shared: as in the case."""

    target_vocab: int = 163_840
    draft_vocab: int = 32_000
    identical: int = 252
    shared: int = 25_750
    hidden: int = 7_168
    intermediate: int = 18_432
    heads: int = 64
    head_dim: int = 128

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The drafter's weights but lm_head, by name."""
        hidden, inner, width = self.hidden, self.intermediate, self.heads * self.head_dim
        return {
            "fc.weight": (hidden, 3 * hidden),
            **{f"midlayer.self_attn.{name}_proj.weight": (width, 2 * hidden) for name in "qkv"},
            "midlayer.self_attn.o_proj.weight": (hidden, width),
            **{f"midlayer.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")},
            "midlayer.mlp.down_proj.weight": (hidden, inner),
            **{
                f"midlayer.{name}.weight": (hidden,)
                for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
            },
            "norm.weight": (hidden,),
        }


def case_maps(sizes: Sizes | None = None, seed: int = 0) -> tuple[DraftVocab, DraftVocab]:
    """Two ascending vocabularies which share `shared` tokens and agree at exactly `identical` positions.

    A token of the first alone stands after `identical` shared ones, and from there on the first is always ahead, by one
    or two: so no later position agrees.
    """
    s = sizes or Sizes()
    alone = s.draft_vocab - s.shared
    assert alone > 0 and s.identical < s.shared and s.shared + 2 * alone <= s.target_vocab
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.choice(s.target_vocab, s.shared + 2 * alone, replace=False))
    between = np.arange(s.identical + 1, len(ids) - 1)
    middle = np.sort(rng.choice(between, 2 * alone - 2, replace=False))
    only = np.concatenate([[s.identical], middle, [len(ids) - 1]])  # A, A, B, A, B, … A, B, B
    first = np.concatenate([only[:1], middle[0::2]])
    second = np.concatenate([middle[1::2], only[-1:]])
    found = [DraftVocab(np.delete(ids, out).astype(np.int64), s.target_vocab) for out in (second, first)]
    return found[0], found[1]


@dataclass(frozen=True)
class Files:
    """What `make` wrote."""

    drafter: Path
    verifier: Path
    old: Path
    new: Path


def make(folder: Path, sizes: Sizes) -> Files:
    """A drafter, its verifier and the two maps. The drafter's head is the verifier's rows, a fifth of it noise."""
    rng = np.random.default_rng(1)
    block = to_bf16(rng.standard_normal(BLOCK, np.float32) * np.float32(0.02))
    old, new = case_maps(sizes)
    files = Files(folder / "drafter", folder / "verifier", folder / "old.safetensors", folder / "new.safetensors")
    files.drafter.mkdir()
    files.verifier.mkdir()
    old.save(files.old)
    new.save(files.new)

    row = rng.integers(0, BLOCK - sizes.hidden, sizes.target_vocab)  # where in the block a token's row begins
    noise = rng.integers(0, BLOCK - sizes.hidden, sizes.target_vocab)

    def verifier_rows(ids: np.ndarray) -> np.ndarray:
        found: np.ndarray = block[row[ids, None] + np.arange(sizes.hidden)]
        return found

    def drafter_rows(ids: np.ndarray) -> np.ndarray:
        theirs, other = (
            (block[at[ids, None] + np.arange(sizes.hidden)].astype(np.uint32) << 16).view(np.float32)
            for at in (row, noise)
        )
        return to_bf16(theirs + np.float32(0.2) * other)

    def rows_part(name: str, ids: np.ndarray, rows: Any) -> Part:
        def chunks() -> Iterator[memoryview]:
            for begin in range(0, len(ids), 256):
                yield rows(ids[begin : begin + 256]).reshape(-1).view(np.uint8).data

        return Part(name, "BF16", (len(ids), sizes.hidden), len(ids) * sizes.hidden * 2, chunks)

    def repeated(name: str, shape: tuple[int, ...]) -> Part:
        count = int(np.prod(shape))

        def chunks() -> Iterator[memoryview]:
            for begin in range(0, count, BLOCK):
                yield block[: count - begin].view(np.uint8).data

        return Part(name, "BF16", shape, 2 * count, chunks)

    every = np.arange(sizes.target_vocab)
    head = "language_model.lm_head.weight"
    write_parts(
        files.verifier / "model-00001-of-00002.safetensors",
        [repeated("language_model.model.norm.weight", (sizes.hidden,))],
    )
    write_parts(files.verifier / "model-00002-of-00002.safetensors", [rows_part(head, every, verifier_rows)])
    index = {
        head: "model-00002-of-00002.safetensors",
        "language_model.model.norm.weight": "model-00001-of-00002.safetensors",
    }
    (files.verifier / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (files.verifier / "config.json").write_text(json.dumps({"text_config": {"vocab_size": sizes.target_vocab}}))
    parts = [
        array_part("d2t", old.d2t),
        rows_part("lm_head.weight", old.target_ids, drafter_rows),
        *(repeated(name, shape) for name, shape in sizes.tensors().items()),
        array_part("t2d", old.t2d),
    ]
    write_parts(files.drafter / "model.safetensors", parts, {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": sizes.target_vocab,
        "draft_vocab_size": sizes.draft_vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.heads,
        "head_dim": sizes.head_dim,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
    }
    (files.drafter / "config.json").write_text(json.dumps(config))
    return files


def measure(files: Files, init: str, cold: bool) -> dict[str, Any]:
    """One pair: the copy, then the remap. Raises BenchError where one of them fails."""
    out = files.drafter.with_name("out")
    sources = [files.drafter / "model.safetensors", *files.verifier.glob("*.safetensors")]
    _warm(sources, cold)
    begun = time.perf_counter()
    out.mkdir()
    _run(["cp", "--reflink=never", *map(str, sorted(files.drafter.iterdir())), str(out)])
    for file in out.iterdir():
        _sync(file)
    copied = time.perf_counter() - begun
    _remove(out)
    _warm(sources, cold)
    begun = time.perf_counter()
    argv = [sys.executable, "-c", REMAP, "remap", str(files.drafter), "--vocab", str(files.new)]
    said, peak = _run([*argv, "--verifier", str(files.verifier), "--init", init, "--out", str(out), "--json"])
    remapped = time.perf_counter() - begun
    found = json.loads(said)
    size = sum(file.stat().st_size for file in out.iterdir())
    _remove(out)
    return {
        "cp_seconds": copied,
        "remap_seconds": remapped,
        "ratio": remapped / copied,
        "peak_rss_mb": int(peak.split()[1]) * 1024 / 1e6,
        "bytes": size,
        **{key: found[key] for key in ("kept", "initialised", "dropped", "mean_cosine", "recommended")},
    }


def _run(argv: Sequence[str]) -> list[str]:
    """A command's lines on stdout. Raises BenchError where it fails."""
    done = subprocess.run(argv, stdout=subprocess.PIPE, cwd=Path(__file__).resolve().parents[1], text=True)
    if done.returncode:
        raise BenchError(f"{argv[0]} ended with {done.returncode}: {shlex.join(argv)}")
    return done.stdout.splitlines()


def _warm(files: Sequence[Path], cold: bool) -> None:
    """Put files into the page cache, or out of it."""
    for file in files:
        with file.open("rb", buffering=0) as stream:
            if cold:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                buffer = bytearray(1 << 24)
                while stream.readinto(buffer):
                    pass


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _remove(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(
        prog="remap", description=__doc__, epilog=TEXT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = top.add_argument
    add("--init", choices=INITS, default="scaled", help="how rows of new tokens are made (default: scaled)")
    add("--runs", type=int, default=1, metavar="N", help="pairs to measure (default: 1)")
    add("--cold", action="store_true", help="with the sources out of the page cache")
    add("--small", action="store_true", help="a thousandth of the size, to see that the command works")
    add(
        "--dir",
        type=Path,
        metavar="DIR",
        help="where the files are made, 7.5 GB at full size (default: a temporary one)",
    )
    add("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    return top


SMALL = Sizes(2_048, 400, 12, 322, 224, 576, 8, 32)


def main(argv: list[str] | None = None) -> int:
    """Make, measure, remove, report; returns the exit code."""
    args = parser().parse_args(argv)
    if args.runs < 1:
        parser().error(f"--runs is {args.runs}, expected 1 or more")
    try:
        with tempfile.TemporaryDirectory(prefix="remap-", dir=args.dir) as folder:
            print("remap: making the files", file=sys.stderr)
            files = make(Path(folder), SMALL if args.small else Sizes())
            runs = []
            for _ in range(args.runs):
                runs.append(measure(files, args.init, args.cold))
                print(f"remap: {describe(runs[-1])}", file=sys.stderr)
    except (BenchError, OSError) as error:
        print(f"remap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("remap: interrupted; what was made is removed.", file=sys.stderr)
        return 130
    found = {
        "ratio_vs_cp": statistics.median(run["ratio"] for run in runs),
        "peak_rss_mb": max(run["peak_rss_mb"] for run in runs),
        "init": args.init,
        "cold": args.cold,
        "small": args.small,
        "runs": runs,
        "machine": machine(),
        "command": command(),
    }
    if args.json:
        print(json.dumps(found))
    else:
        print(f"x{found['ratio_vs_cp']:.2f} of cp, {found['peak_rss_mb']:.0f} MB at most")
    return 0


def describe(run: dict[str, Any]) -> str:
    """One pair in words."""
    return (
        f"cp {run['cp_seconds']:.2f} s, remap {run['remap_seconds']:.2f} s, x{run['ratio']:.2f}, "
        f"{run['peak_rss_mb']:.0f} MB; {run['kept']:,} rows kept, {run['initialised']:,} initialised"
    )


if __name__ == "__main__":
    sys.exit(main())
