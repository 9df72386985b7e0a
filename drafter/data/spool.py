"""The folder that a capturing engine and its client share: the engine's handshake, and the tensors on their way.

DIR/handshake.json says what the engine captures. DIR/spool/RID-START.safetensors holds the rows START … of one
request: input_ids int32 [t], aux_hidden [t, n_aux*H], final_hidden [t, H]. The client joins them and deletes them.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

from drafter.data.tensorfile import TensorFileError, map_tensors

# Only requests whose id begins so are captured: others that the engine answers are nobody's training data.
RID_PREFIX = "capture-"
HANDSHAKE = "handshake.json"
FORMAT = 1


class SpoolError(ValueError):
    """A capture folder, or tensors in it, that cannot be used: what was found and what to do."""


@dataclass(frozen=True)
class Handshake:
    """What an engine says about itself once its first prompt has passed the capture.

    layer_ids: as the engine was given them. inputs_to: the layers whose input is captured, as it resolved them.
    host, pid: where it runs; a client on another machine that sees the same disk cannot look at its processes.
    convention: what layer_ids then mean, `output_of_layer` or `input_to_layer`. dtype: bfloat16 or float32.
    """

    format: int
    host: str
    pid: int
    sglang: str
    layer_ids: list[int]
    inputs_to: list[int]
    convention: str
    hidden_size: int
    dtype: str
    tp_rank: int


def convention_of(layer_ids: list[int], inputs_to: list[int]) -> str | None:
    """What layer ids mean to a target that captures the inputs to these layers; None where they do not fit."""
    if inputs_to == layer_ids:
        return "input_to_layer"
    if inputs_to == inputs_of(layer_ids, "output_of_layer"):
        return "output_of_layer"
    return None


def inputs_of(layer_ids: list[int], convention: str) -> list[int]:
    """The layers whose input is captured: the output of a layer is the input to the next."""
    return [layer + (convention == "output_of_layer") for layer in layer_ids]


def spool_of(folder: Path) -> Path:
    return folder / "spool"


def part_file(folder: Path, rid: str, start: int) -> Path:
    """Where the rows from `start` of a request lie."""
    return spool_of(folder) / f"{rid}-{start:08d}.safetensors"


def write_handshake(folder: Path, handshake: Handshake) -> None:
    """Put the handshake in its place in one step. Raises OSError."""
    beside = folder / f"{HANDSHAKE}.tmp"
    beside.write_text(json.dumps(asdict(handshake)) + "\n")
    beside.replace(folder / HANDSHAKE)


def read_handshake(folder: Path) -> Handshake:
    """Raises SpoolError where there is none, or where the engine that wrote it no longer runs."""
    file = folder / HANDSHAKE
    try:
        handshake = Handshake(**json.loads(file.read_bytes()))
    except FileNotFoundError:
        raise SpoolError(
            f"{file} is missing: no engine captures into this folder. Start one with "
            f"`python -m server engine --profile FILE --capture {folder}` and name the same folder."
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise SpoolError(f"{file} cannot be read ({error}): start the capturing engine again.") from None
    if handshake.format != FORMAT:
        raise SpoolError(
            f"{file} has format {handshake.format}, expected {FORMAT}: start the engine with this version."
        )
    if handshake.host == platform.node() and not process_runs(handshake.pid):
        raise SpoolError(
            f"{file} was written by process {handshake.pid}, which no longer runs: start the capturing engine again."
        )
    return handshake


def process_runs(pid: int) -> bool:
    """Whether a process of this machine runs under this number; one that ended and was not collected does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def clear(folder: Path) -> None:
    """Delete what is left of requests that nobody will collect."""
    for file in spool_of(folder).glob(f"{RID_PREFIX}*"):
        file.unlink(missing_ok=True)


def delete_parts(folder: Path, rid: str) -> None:
    """Delete a request's tensors."""
    for file in spool_of(folder).glob(f"{rid}-*"):
        file.unlink(missing_ok=True)


def join_parts(folder: Path, rid: str, input_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """(aux_hidden [T, n_aux*H], final_hidden [T, H]) of a request, or None while rows are missing.

    input_ids: int32 [T], what was sent. Chunks may overlap, as where the engine computed some rows twice.
    Raises SpoolError where a part holds other ids.
    """
    wanted, rows = len(input_ids), 0
    aux_hidden: list[np.ndarray] = []
    final_hidden: list[np.ndarray] = []
    for file in sorted(spool_of(folder).glob(f"{rid}-*.safetensors")):
        start = int(file.stem.rpartition("-")[2])
        try:
            part = map_tensors(file)
            part_ids, aux, final = part["input_ids"], part["aux_hidden"], part["final_hidden"]
        except (TensorFileError, KeyError) as error:
            raise SpoolError(
                f"{file} is not what a capturing engine writes ({error}): start the engine again."
            ) from None
        end = min(start + len(part_ids), wanted)
        if start > rows:
            return None
        if end <= rows:
            continue
        if not np.array_equal(part_ids[rows - start : end - start], input_ids[rows:end]):
            raise SpoolError(
                f"{file} holds other token ids than were sent for these positions: the engine changes its input, "
                "so its tensors would be filed under the wrong tokens."
            )
        # Copied: a part is deleted while its rows still wait for their shard.
        aux_hidden.append(np.array(aux[rows - start : end - start]))
        final_hidden.append(np.array(final[rows - start : end - start]))
        rows = end
    if rows < wanted:
        return None
    return np.concatenate(aux_hidden), np.concatenate(final_hidden)
