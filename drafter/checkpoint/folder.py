"""Read a drafter folder (config.json + safetensors) without loading a weight.

What is refused here cannot be read at all, by anybody. Whether it can be meant is for the checks (`preflight`), since
SGLang detects few faults: a missing tensor stays random, acceptance length becomes 1.00 and no error is raised.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from drafter.checkpoint import shapes

ARCHITECTURES = (shapes.LLAMA, shapes.MLA)
MAX_HEADER_BYTES = 16 * 1024 * 1024  # a drafter's header is a few kilobytes; parsing takes ten times its size
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


class DrafterError(ValueError):
    """A drafter folder that cannot be served: says what was found, what was expected and what to do."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file's header describes it.

    `dtype` is safetensors' name (F32, BF16, I64, …); `begin` and `end` are bytes from the start of the file.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class DrafterFolder:
    """A readable drafter. `sha256` covers config.json and every safetensors file: the drafter's identity.

    `file_sha256` are the hashes that it is made of. `unloaded` are safetensors files that SGLang passes over,
    `repeated` tensors that more than one loaded file has.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    sha256: str
    file_sha256: dict[str, str]
    unloaded: tuple[str, ...]
    repeated: tuple[str, ...]

    @property
    def architecture(self) -> str:
        """The class that SGLang builds; empty where config.json names none."""
        names = self.config.get("architectures")
        return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""

    @property
    def layer_ids(self) -> list[int] | None:
        """The nested `eagle_config` ids, the only ones that drive SGLang's capture; None means its default."""
        return shapes.layer_ids(self.config)


def open_folder(path: Path) -> DrafterFolder:
    """Read a drafter folder whatever it holds. Raises DrafterError where there is nothing to read."""
    try:
        return _open_folder(path)
    except OSError as error:
        raise DrafterError(
            f"drafter {path}: {error.filename or path} cannot be read ({error.strerror}): expected config.json and "
            "model.safetensors as plain files, so copy the folder again or mend its rights."
        ) from None


def _open_folder(path: Path) -> DrafterFolder:
    if not path.is_dir():
        raise DrafterError(
            f"drafter {path} is not a folder: give the folder that holds config.json and model.safetensors."
        )
    config = _read_object(path / "config.json", "a drafter needs one, in SGLang's format")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickles = sorted(file for file in path.iterdir() if file.suffix in PICKLES)
        found = f"only {pickles[0].name}, a pickle, which is not read" if pickles else "none"
        raise DrafterError(f"drafter {path}: expected a .safetensors file, found {found}.")
    loaded = _loaded(path, files)
    tensors: dict[str, TensorInfo] = {}
    repeated: list[str] = []
    for file in loaded:
        header = read_header(file)
        repeated += [name for name in header if name in tensors]
        tensors |= header
    unloaded = tuple(file.name for file in files if file not in loaded)
    hashes = {file.name: _sha256(file) for file in (path / "config.json", *files)}
    identity = hashlib.sha256("".join(f"{name} {found}\n" for name, found in hashes.items()).encode()).hexdigest()
    return DrafterFolder(path, config, tensors, identity, hashes, unloaded, tuple(dict.fromkeys(repeated)))


def _loaded(path: Path, files: list[Path]) -> list[Path]:
    """The files that SGLang 0.5.23 loads (`model_loader/weight_utils.py`): those of the index where there is one."""
    if not (path / INDEX).is_file():
        names = [file.name for file in files]
        if len(names) == 2 and names[0].endswith("consolidated.safetensors") and names[1].endswith("model.safetensors"):
            return files[1:]
        return files
    index = _read_object(path / INDEX, "copy the folder again")
    named = index.get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise DrafterError(f"{path / INDEX} has no weight_map of file names: copy it again, or remove it.")
    by_name = {file.name: file for file in files}
    missing = sorted({file for file in named.values() if file not in by_name})
    if missing:
        raise DrafterError(
            f"{path / INDEX} names {missing[0]!r:.80}, which is no .safetensors file of the folder: copy the folder "
            "again."
        )
    return [file for file in files if file.name in set(named.values())]


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, from its header alone.

    Raises DrafterError where the file is cut short or is not safetensors, by the rules of safetensors itself: every
    byte after the header belongs to exactly one tensor.
    """
    if not file.is_file():  # a pipe would wait for its writer, a device never end
        raise DrafterError(f"drafter {file.parent}: {file} cannot be read (it is no plain file): copy it again.")
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = int.from_bytes(head, "little")
        if size < 8 or not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            if head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK"):
                what = "is a pickle, whatever its name, and is not read: export the drafter to safetensors"
            elif 8 < length + 8 <= size:
                what = f"has a header of {length:,} bytes, expected {MAX_HEADER_BYTES:,} at most: copy it again"
            else:
                what = f"is not a safetensors file (or is cut short at {size} bytes): copy it again"
            raise DrafterError(f"{file} {what}.")
        raw = stream.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_without_repeats)
        header.pop("__metadata__", None)
        tensors = {name: _entry(file.name, 8 + length, entry) for name, entry in header.items()}
        at = 8 + length
        for name, tensor in sorted(tensors.items(), key=lambda named: (named[1].begin, named[1].end)):
            if tensor.begin != at:
                raise ValueError(f"{name!r:.80} begins at byte {tensor.begin}, not at {at}")
            at = tensor.end
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DrafterError(f"{file} has a broken safetensors header ({error!s:.200}): copy it again.") from None
    if size != at:
        raise DrafterError(f"{file} has {size} bytes, its header says {at}: it is cut short, copy it again.")
    return tensors


def _entry(file: str, start: int, entry: dict[str, Any]) -> TensorInfo:
    dtype, shape = entry["dtype"], tuple(_size(size) for size in entry["shape"])
    begin, end = (_size(offset) for offset in entry["data_offsets"])
    if dtype not in BITS:
        raise ValueError(f"{dtype!r:.40} is no dtype")
    bits = BITS[dtype]
    for size in shape:
        bits *= size
        if bits > 2**66:  # no file holds so much: stop before the product itself is a burden
            raise ValueError(f"shape {shape!s:.80} is beyond any file")
    if bits != 8 * (end - begin):
        raise ValueError(f"{dtype} {list(shape)} takes {bits / 8:.0f} bytes, not {end - begin}")
    return TensorInfo(file, dtype, shape, start + begin, start + end)


def _size(found: Any) -> int:
    if type(found) is not int or found < 0:
        raise ValueError(f"{found!r:.40} is no size")
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _read_object(file: Path, purpose: str) -> dict[str, Any]:
    if file.exists() and not file.is_file():
        raise DrafterError(f"drafter {file.parent}: {file} cannot be read (it is no plain file): copy it again.")
    try:
        found = json.loads(file.read_bytes(), parse_float=_finite, parse_int=_whole, parse_constant=_finite)
    except FileNotFoundError:
        raise DrafterError(f"{file} is missing: {purpose}.") from None
    except (ValueError, RecursionError) as error:
        raise DrafterError(f"{file} is not JSON ({error!s:.200}): copy it again.") from None
    if not isinstance(found, dict):
        raise DrafterError(f"{file} holds {found!r:.40}, expected a JSON object: copy it again.")
    return found


def _finite(text: str) -> float:
    found = float(text)
    if not isfinite(found):
        raise ValueError(f"{text:.40} is no number")
    return found


def _whole(text: str) -> int:
    _finite(text)  # nothing has a size that is beyond a float
    return int(text)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
