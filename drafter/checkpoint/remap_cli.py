"""The verb `remap`: a drafter's lm_head rows moved to another draft vocabulary."""

from __future__ import annotations

import argparse
import json
import queue
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from drafter.checkpoint.diff_cli import add_map_format
from drafter.checkpoint.folder import open_folder
from drafter.checkpoint.headstart import INITS, Likeness, describe, likeness, make_init
from drafter.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    new_folder,
    read_manifest,
    stopped_as_interrupted,
    write_manifest,
)
from drafter.checkpoint.maps import ReadMap, agreed_size, read_map
from drafter.checkpoint.remap import Move, RemapError, Source, open_source, plan_move, write_drafter, write_run
from drafter.checkpoint.rows import Rows
from drafter.checkpoint.shapes import layer_ids
from drafter.data.target import output_head, target_hashes
from drafter.report import command

REMAP = """\
examples:
  python -m drafter remap drafters/k2 --vocab vocab.safetensors --verifier models/k2.5 --init scaled --out drafters/k25
  python -m drafter remap drafters/spoilt --vocab drafters/spoilt --rows-vocab right.safetensors \\
      --verifier models/k2.5 --init verifier --out drafters/mended
  python -m drafter remap runs/a --vocab new.safetensors --rows-vocab old.safetensors --verifier DIR --init verifier \\
      --out runs/b

Rows of tokens that both vocabularies have are kept bit for bit and moved to their new places; the others are made from
the verifier's head: `verifier` copies its rows, `scaled` gives them the drafter's norms, `ridge` fits the change of
basis on the shared rows first (2 GB and minutes at Kimi's width). The mean cosine of the shared rows comes first, since
it says which to take. --rows-vocab is the map that the rows were trained under, where the folder's own was overwritten:
the second example mends a drafter whose d2t was replaced by another one. In a training run (a folder with
checkpoint.safetensors) AdamW's moments move with their rows; go on by `train --vocab OUT/vocab.safetensors --out OUT`.
An interrupted run leaves nothing.
"""


def add_remap(commands: Any) -> None:
    """The verb `remap`."""
    verb = commands.add_parser(
        "remap",
        help="move a drafter's lm_head rows to another draft vocabulary",
        description="Move a drafter's lm_head rows from one draft vocabulary to another.",
        epilog=REMAP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = verb.add_argument
    add("source", type=Path, metavar="SRC", help="a drafter folder, or a training run's")
    add("--vocab", type=Path, required=True, metavar="FROM", help="the new vocabulary: a drafter folder or a map")
    add(
        "--rows-vocab", type=Path, metavar="OLD", help="the map that SRC's rows were trained under (default: SRC's own)"
    )
    add("--verifier", type=Path, required=True, metavar="DIR", help="the target's folder, for the rows of new tokens")
    add("--init", choices=INITS, required=True, help="how rows of new tokens are made")
    add("--out", type=Path, required=True, metavar="DIR", help="the new folder")
    add("--name", help="the drafter's name (default: the name of --out)")
    add_map_format(verb)
    add("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    verb.set_defaults(run=run_remap)


def run_remap(args: argparse.Namespace) -> int:
    """Compare the heads, move the rows, report. Raises ValueError with a sentence for what a person must change."""
    try:
        with stopped_as_interrupted(), ExitStack() as stack:
            found = _remap(args, stack)
    except KeyboardInterrupt:
        print("remap: interrupted; nothing was left behind.", file=sys.stderr)
        return 130
    print(json.dumps(found) if args.json else _words(args, found))
    return 0


def _remap(args: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    source = open_source(args.source)
    span = output_head(args.verifier)
    verifier = stack.enter_context(Rows(span))
    old, move = _plan(args, source, verifier)
    head = stack.enter_context(Rows(source.head))
    beside = stack.enter_context(new_folder(args.out))
    _check_room(args.out, source, move, head)
    target = None if source.is_run else _Background(lambda: target_hashes(args.verifier))
    rows, ids = move.shared
    pair_bytes = len(rows) * (head.row_bytes + verifier.row_bytes)
    with _bar("compare", pair_bytes) as progress:
        alike = likeness(head, rows, verifier, ids, progress)
    _say(describe(alike))
    with _bar("fit", pair_bytes if args.init == "ridge" else 0) as progress:
        init = make_init(args.init, head, rows, verifier, ids, alike, progress)
    with _bar("write", source.nbytes + (len(move.vocab) - move.old_size) * head.row_bytes) as progress:
        if target is None:
            write_run(source, move, init, beside, progress)
        else:
            weights_sha256 = write_drafter(source, move, init, beside, progress)
            write_manifest(beside, _manifest(args, source, move, alike, target.result()), weights_sha256)
    return _report(args, old, move, alike)


def _plan(args: argparse.Namespace, source: Source, verifier: Rows) -> tuple[ReadMap, Move]:
    """The map that the rows lie in, and where they go."""
    if source.is_run and args.rows_vocab is None:
        raise RemapError(
            f"{args.source} is a run, which holds no map: give the one it was started with as --rows-vocab."
        )
    size, told = verifier.count, source.config.get("vocab_size")
    agreed_size(args.source, {"its config": told if type(told) is int else None, "the verifier's head": size})
    old = read_map(args.rows_vocab or args.source, args.map_format, size)
    new = read_map(args.vocab, args.map_format, size)
    if len(old.target_ids) != source.head.shape[0]:
        raise RemapError(
            f"{old.source} maps {len(old.target_ids):,} rows, the head of {args.source} has {source.head.shape[0]:,}: "
            "give the map that the rows were trained under as --rows-vocab."
        )
    before, after = old.sorted(size)[0], new.sorted(size)[0]
    named = None if source.is_run else (read_manifest(source.path) or {}).get("vocab_hash")
    if named and before.hash != named:
        raise RemapError(
            f"{old.source} has the vocabulary {before.hash[:16]}, but {source.path / MANIFEST} says that lm_head was "
            f"trained under {named!s:.16}: give that map as --rows-vocab, or remove {MANIFEST} if it is wrong."
        )
    if source.vocab_hash is not None and (before.hash != source.vocab_hash or not old.ascending):
        raise RemapError(
            f"{args.source} was trained under the vocabulary {source.vocab_hash[:16]}, {old.source} is "
            f"{before.hash[:16]}: give the one that the run was started with."
        )
    return old, plan_move(old, after)


def _check_room(out: Path, source: Source, move: Move, head: Rows) -> None:
    need = source.nbytes + max(0, len(move.vocab) - move.old_size) * head.row_bytes * len(source.files)
    free = shutil.disk_usage(out.absolute().parent).free
    if free < need:
        raise RemapError(
            f"{out.absolute().parent} has {free / 1e6:,.0f} MB free, {out.name} needs {need / 1e6:,.0f} MB: make room."
        )


def _manifest(
    args: argparse.Namespace, source: Source, move: Move, alike: Likeness, target: dict[str, str | None]
) -> Manifest:
    before = read_manifest(source.path) or {}
    return Manifest(
        name=args.name or args.out.name,
        vocab_hash=move.vocab.hash,
        target={"name": args.verifier.absolute().name} | {key: value for key, value in target.items() if value},
        capture=before.get("capture") or {"layer_ids": layer_ids(source.config)},  # the convention is not known
        origin={
            "kind": "remap",
            "parent": source.path.absolute().name,
            "parent_sha256": open_folder(source.path).sha256,
            "command": command(),
            "data_hash": (before.get("origin") or {}).get("data_hash"),
            "git": (before.get("origin") or {}).get("git", ""),
        },
        training=(before.get("training") or {}) | {"remap": _rows(move) | alike.as_json() | {"init": args.init}},
    )


def _rows(move: Move) -> dict[str, int]:
    return {"kept": move.kept, "initialised": move.initialised, "dropped": move.dropped}


def _report(args: argparse.Namespace, old: ReadMap, move: Move, alike: Likeness) -> dict[str, Any]:
    """The object that `remap --json` prints."""
    return {
        **_rows(move),
        "moved": int((move.old_rows[move.old_rows >= 0] != (move.old_rows >= 0).nonzero()[0]).sum()),
        "size": len(move.vocab),
        "old_size": move.old_size,
        "init": args.init,
        **alike.as_json(),
        "rows_vocab": str(old.source),
        "reading": old.reading,
        "evidence": list(old.evidence),
        "vocab_hash": move.vocab.hash,
        "out": str(args.out),
    }


def _words(args: argparse.Namespace, found: dict[str, Any]) -> str:
    advice = ""
    if found["initialised"] and found["recommended"] != args.init:
        advice = f" Made by --init {args.init}; {found['recommended']} is recommended."
    return (
        f"{args.out}: {found['kept']:,} rows kept ({found['moved']:,} of them moved), {found['initialised']:,} "
        f"initialised, {found['dropped']:,} dropped; {found['size']:,} rows.{advice} Hash {found['vocab_hash'][:16]}."
    )


class _Background:
    """A function that runs beside this thread, and that does not keep an interrupted process alive."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._done: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._done.put((work(), None))
        except (ValueError, OSError) as error:  # told where the result is asked for
            self._done.put((None, error))

    def result(self) -> Any:
        value, error = self._done.get()
        if error is not None:
            raise error
        return value


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], object]]:
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None if total else True, leave=False) as bar:
        yield bar.update


def _say(line: str) -> None:
    print(f"remap: {line}", file=sys.stderr)
