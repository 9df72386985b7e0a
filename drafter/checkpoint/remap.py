"""Move a drafter's lm_head rows from the draft vocabulary they were trained under to another one.

Kept rows are copied bit for bit, rows of new tokens are made from the verifier's head, and everything else passes
through as it lies in the file. Of a training run, AdamW's moments of lm_head move with the rows.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drafter.checkpoint.headstart import Init
from drafter.checkpoint.maps import ReadMap, read_config
from drafter.checkpoint.rows import Rows, from_float32
from drafter.checkpoint.vocab import DraftVocab, Ids, VocabError
from drafter.data.tensorfile import Span, array_part, file_metadata, span_part, tensor_spans
from drafter.data.tensorwriter import Part, write_parts

HEAD, FC = "lm_head.weight", "fc.weight"
CHECKPOINT, BEST, LOG = "checkpoint.safetensors", "best.safetensors", "log.jsonl"  # of a run, as training writes them
MOMENTS = "adamw."

Progress = Callable[[int], object]


class RemapError(VocabError):
    """A drafter whose rows cannot be moved: what was found, what was expected and what to do."""


@dataclass(frozen=True, eq=False)
class Move:
    """Where each row of the new vocabulary comes from.

    vocab: the new one, U tokens. old_rows: int64 [U], the row in the old head, -1 where there is none. old_size: how
    many rows the old head has.
    """

    vocab: DraftVocab
    old_rows: Ids
    old_size: int

    @property
    def shared(self) -> tuple[Ids, Ids]:
        """(old rows, target ids) of the tokens of both, in the order of the new vocabulary."""
        kept = self.old_rows >= 0
        return self.old_rows[kept], self.vocab.target_ids[kept]

    @property
    def kept(self) -> int:
        return int((self.old_rows >= 0).sum())

    @property
    def initialised(self) -> int:
        return len(self.vocab) - self.kept

    @property
    def dropped(self) -> int:
        return self.old_size - self.kept


def plan_move(old: ReadMap, vocab: DraftVocab) -> Move:
    """From the map that the rows lie in, in its file's order, to `vocab`."""
    rows = np.full(vocab.target_vocab_size, -1, dtype=np.int64)
    rows[old.target_ids] = np.arange(len(old.target_ids))
    return Move(vocab, rows[vocab.target_ids], len(old.target_ids))


@dataclass(frozen=True)
class Source:
    """What is remapped: a drafter folder (`config` is its config.json) or a training run (`config` of its drafter).

    files: the .safetensors files whose rows move, with their tensors. head: lm_head among the first file's.
    vocab_hash: of the map that a run was trained under; None for a drafter, which does not say.
    """

    path: Path
    is_run: bool
    config: dict[str, Any]
    files: dict[Path, dict[str, Span]]
    head: Span
    vocab_hash: str | None

    @property
    def nbytes(self) -> int:
        """What lies in the files."""
        return sum(span.nbytes for spans in self.files.values() for span in spans.values())


def open_source(path: Path) -> Source:
    """A drafter folder, or a run's folder with its checkpoint. Raises RemapError or TensorFileError."""
    config_file, checkpoint = path / "config.json", path / CHECKPOINT
    is_run = not config_file.exists() and checkpoint.exists()
    vocab_hash = None
    if is_run:
        files = [checkpoint, *(file for file in (path / BEST,) if file.exists())]
        try:
            identity = json.loads(file_metadata(checkpoint)["facts"])["identity"]
            config, vocab_hash = dict(identity["config"]), str(identity["vocab_hash"])
        except (ValueError, LookupError, TypeError) as error:
            raise RemapError(f"{checkpoint} does not say what run it is of ({error!r:.80}): train it again.") from None
        if identity.get("parent"):
            raise RemapError(
                f"{path} went on from {identity['parent']}, whose map it takes: remap that, and `train --from` it anew."
            )
    else:
        files = sorted(path.glob("*.safetensors"))
        if not path.is_dir() or not files:
            raise RemapError(f"{path} is no drafter folder with .safetensors files, and no run: name one.")
        config = read_config(config_file)
    opened = {file: tensor_spans(file) for file in files}
    heads = [span for spans in opened.values() for name, span in spans.items() if _is_head(name)]
    names = [name for spans in opened.values() for name in spans]
    if not is_run and not any(_is(name, FC) for name in names):
        raise RemapError(f"{path} has no tensor named {FC}, as each EAGLE-3 drafter has: name the drafter's folder.")
    if len(heads) > len(files) if is_run else len(heads) > 1:
        where = ", ".join(dict.fromkeys(span.file.name for span in heads))
        raise RemapError(f"{path} has {len(heads)} tensors named {HEAD} ({where}): remove what does not belong.")
    if len(heads) < len(files) if is_run else not heads:
        raise RemapError(
            f"{path} has {len(heads)} tensors named {HEAD}, expected one: a drafter that shares the target's head has "
            "no rows to move."
        )
    repeated = next((name for name, count in Counter(names).items() if count > 1), None)
    if repeated and not is_run:
        raise RemapError(f"{path} has {repeated} in two files: remove the one that does not belong.")
    _check_head(path, config, heads[0], names)
    return Source(path, is_run, config, opened, heads[0], vocab_hash)


def _check_head(path: Path, config: Mapping[str, Any], head: Span, names: Iterable[str]) -> None:
    beside = [name for name in names if ".lm_head." in f".{name}" and not name.endswith(HEAD)]
    if beside:
        raise RemapError(f"{path} has {beside[0]} beside {HEAD}, as quantised heads do: remap the unquantised drafter.")
    if config.get("tie_word_embeddings") is True:
        raise RemapError(
            f"{path}: tie_word_embeddings makes the target's embedding the head: there are no rows to move."
        )
    told = config.get("draft_vocab_size")
    if told is not None and head.shape[:1] != (told,):
        raise RemapError(
            f"{path}: {HEAD} is {list(head.shape)} but draft_vocab_size is {told!r:.40}: make config.json and the "
            "weights agree."
        )


def write_drafter(source: Source, move: Move, init: Init, folder: Path, progress: Progress = int) -> str:
    """config.json and model.safetensors in `folder`; returns the latter's sha256. Files that need not change do not."""
    if source.config.get("draft_vocab_size") == len(move.vocab):
        shutil.copyfile(source.path / "config.json", folder / "config.json")
    else:
        config = source.config | {"draft_vocab_size": len(move.vocab)}
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    spans = [span for tensors in source.files.values() for span in tensors.values()]
    parts, metadata = _parts(spans, move, init, maps=True), file_metadata(source.head.file)
    return write_parts(folder / "model.safetensors", parts, metadata, progress)


def write_run(source: Source, move: Move, init: Init, folder: Path, progress: Progress = int) -> None:
    """The run's files in `folder`, as a run over the new vocabulary that can be gone on with."""
    for file, spans in source.files.items():
        metadata = file_metadata(file)
        if file.name == CHECKPOINT:
            facts = json.loads(metadata["facts"])
            facts["identity"]["vocab_hash"] = move.vocab.hash
            facts["identity"]["config"]["draft_vocab_size"] = len(move.vocab)
            metadata = metadata | {"facts": json.dumps(facts)}
        write_parts(folder / file.name, _parts(list(spans.values()), move, init, maps=False), metadata, progress)
    if (source.path / LOG).exists():
        shutil.copyfile(source.path / LOG, folder / LOG)
    move.vocab.save(folder / "vocab.safetensors")


def _parts(spans: Sequence[Span], move: Move, init: Init, maps: bool) -> list[Part]:
    """The tensors of a file with their rows moved; `maps`: with d2t and t2d, where they were or beside the others."""
    written = {"d2t": move.vocab.d2t, "t2d": move.vocab.t2d}
    parts = []
    for span in spans:
        end = next((end for end in written if _is(span.name, end)), None)
        if end is not None:
            parts.append(array_part(span.name, written.pop(end)))
        elif _is_head(span.name):
            parts.append(_moved(span, move, init))
        elif span.name.startswith(MOMENTS) and _is(span.name, HEAD) and span.shape:
            parts.append(_moved(span, move, None))
        else:
            parts.append(span_part(span))
    if maps and "d2t" in written:
        parts.insert(0, array_part("d2t", written["d2t"]))  # int64 first, so that it is aligned
    if maps and "t2d" in written:
        parts.append(array_part("t2d", written["t2d"]))
    return parts


def _moved(span: Span, move: Move, init: Init | None) -> Part:
    """A matrix with a row for each draft token, its rows moved; new ones are made by `init`, or zero without it."""
    if span.shape[0] != move.old_size:
        raise RemapError(
            f"{span.file}: {span.name} has {span.shape[0]:,} rows, the map has {move.old_size:,}: give the map that "
            "the rows were trained under as --rows-vocab."
        )

    def chunks() -> Iterator[memoryview]:
        with Rows(span) as rows:
            for begin in range(0, len(move.vocab), rows.chunk):
                part = slice(begin, begin + rows.chunk)
                old = move.old_rows[part]
                block = np.zeros((len(old), rows.width), rows.dtype)
                block[old >= 0] = rows.read(old[old >= 0])
                if init is not None and (old < 0).any():
                    block[old < 0] = from_float32(init(move.vocab.target_ids[part][old < 0]), rows.dtype)
                yield block.reshape(-1).view(np.uint8).data

    with Rows(span) as rows:
        shape = (len(move.vocab), rows.width)
        return Part(span.name, span.dtype, shape, len(move.vocab) * rows.row_bytes, chunks)


def _is_head(name: str) -> bool:
    return _is(name, HEAD) and not name.startswith(MOMENTS)


def _is(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")
