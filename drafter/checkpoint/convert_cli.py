"""The verbs inspect and convert."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tqdm import tqdm

from drafter.checkpoint import formats, shapes, summary
from drafter.checkpoint.convert import Source, needed, read_source, write_converted
from drafter.checkpoint.diff_cli import add_map_format
from drafter.checkpoint.eaglebin import is_eagle_bin, unpickle
from drafter.checkpoint.folder import DrafterError
from drafter.checkpoint.manifest import Manifest, new_folder, read_manifest, stopped_as_interrupted, write_manifest
from drafter.checkpoint.subject import TargetFacts, read_target
from drafter.checkpoint.vocab import DraftVocab, VocabError
from drafter.report import command, file_sha256

INSPECT = """\
example:
  python -m drafter inspect deploy/drafters/smollm2-135m-eagle3 --tensors
"""
CONVERT = """\
examples:
  python -m drafter convert DIR --to sglang --target DIR --out DIR        of speculators or EAGLE (.bin)
  python -m drafter convert DIR --to speculators --target DIR --out DIR
  python -m drafter convert DIR --to modelopt --out DIR

Refused, with the reason, where the other format would say something else: norm_before_residual, a sliding window, an
embedding of the drafter's own, norm_output's two meanings. An EAGLE .bin needs torch; nothing in it is executed.
"""


def add_inspect(commands: Any) -> None:
    """The verb `inspect`."""
    verb = _verb(commands, "inspect", "what a drafter folder is", "Describe a drafter folder of any format.", INSPECT)
    verb.add_argument("folder", type=Path, metavar="DIR", help="the drafter")
    verb.add_argument("--tensors", action="store_true", help="list every tensor")
    verb.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    verb.set_defaults(run=run_inspect)


def add_convert(commands: Any) -> None:
    """The verb `convert`."""
    verb = _verb(
        commands, "convert", "a drafter in another tool's format", "Write a drafter folder in another format.", CONVERT
    )
    add = verb.add_argument
    add("source", type=Path, metavar="DIR", help="the drafter: SGLang's, speculators', Model-Optimizer's or EAGLE's")
    add("--to", choices=formats.FORMATS, required=True, help="the format to write")
    add("--out", type=Path, required=True, metavar="DIR", help="the new folder")
    add("--target", type=Path, metavar="DIR", help="the drafter's target: to and from speculators, and for a .bin")
    add(
        "--norm-output",
        choices=("fed-back", "head-only"),
        help="what norm_output means in DIR: the normed state goes on (SGLang), or only lm_head sees it (SpecForge)",
    )
    add_map_format(verb)
    add("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    verb.set_defaults(run=run_convert)


def run_inspect(args: argparse.Namespace) -> int:
    """Print what a folder is. Raises DrafterError where it cannot be read."""
    found = summary.summarise(args.folder)
    print(json.dumps(found) if args.json else summary.render(found, args.tensors))
    return 0


def run_convert(args: argparse.Namespace) -> int:
    """Write the folder, and what it is. Raises ValueError with a sentence for what a person must change."""
    target = read_target(args.target) if args.target else None
    try:
        with stopped_as_interrupted(), ExitStack() as stack:
            _convert(args, target, stack)
    except KeyboardInterrupt:
        print("convert: interrupted; nothing was left behind.", file=sys.stderr)
        return 130
    found = summary.summarise(args.out)
    if args.json:
        print(json.dumps(found))
    else:
        print(summary.render(found, tensors=False))
    return 0


def _convert(args: argparse.Namespace, target: TargetFacts | None, stack: ExitStack) -> None:
    path = args.source
    if is_eagle_bin(path):
        beside = stack.enter_context(TemporaryDirectory(dir=_existing(args.out), prefix=".eagle-"))
        unpickle(path, Path(beside), needed(target, "EAGLE names no captured layers"))
        path = Path(beside)
    try:
        source = read_source(path, args.map_format)
        folder = stack.enter_context(new_folder(args.out))
        size = sum(span.nbytes for span in source.spans.values())
        bar = stack.enter_context(tqdm(total=size, unit="B", unit_scale=True, desc="write", disable=None, leave=False))
        write_converted(source, args.to, folder, target, args.norm_output, bar.update)
        if args.to != "speculators":
            _sign(args, source, folder, target)
    except (DrafterError, VocabError) as error:  # of a .bin: what was written beside is gone when this is read
        raise type(error)(str(error).replace(str(path), str(args.source))) from None


def _sign(args: argparse.Namespace, source: Source, folder: Path, target: TargetFacts | None) -> None:
    """eyas.json, with the target's hashes where it is known and the drafter's own history where it has one."""
    before = read_manifest(args.source) or {}
    size = source.target_vocab_size
    vocab = DraftVocab.from_ids(source.target_ids, size)[0] if source.target_ids is not None else None
    config = json.loads((folder / "config.json").read_bytes())
    hashes = {"config_sha256": target.config_sha256, "tokenizer_sha256": target.tokenizer_sha256} if target else {}
    named = before.get("target") or {"name": args.target.absolute().name if args.target else None}
    manifest = Manifest(
        name=args.out.name,
        vocab_hash=vocab.hash if vocab else "",
        target=named | {key: value for key, value in hashes.items() if value},
        capture=before.get("capture") or {"layer_ids": shapes.layer_ids(config)},
        origin={
            "kind": "foreign",
            "parent": args.source.absolute().name,
            "command": command(),
            "data_hash": (before.get("origin") or {}).get("data_hash"),
            "git": (before.get("origin") or {}).get("git", ""),
        },
        training=before.get("training") or {},
    )
    write_manifest(folder, manifest, file_sha256(folder / "model.safetensors"))


def _existing(path: Path) -> Path:
    """The nearest folder above that exists, on whose disk the work is done."""
    found = next((parent for parent in path.absolute().parents if parent.is_dir()), None)
    if found is None:
        raise DrafterError(f"{path} cannot be written: name a folder on this disk.")
    return found


def _verb(commands: Any, name: str, text: str, description: str, epilog: str) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return verb
