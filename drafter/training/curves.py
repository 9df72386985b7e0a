"""Curves as TensorBoard reads them: an event file of scalars, written without TensorBoard.

The format is TFRecord (length and bytes, each with a masked CRC-32C) around protocol buffers `Event` of
tensorflow/core/util/event.proto: wall_time = 1 (double), step = 2 (int64), file_version = 3, summary = 5, in it
value = 1 with tag = 1 and simple_value = 2 (float).
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path

CASTAGNOLI = 0x82F63B78  # CRC-32C's polynomial, its bits reversed


class Curves:
    """One event file in a folder, which a resumed run adds another to."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"events.out.tfevents.{time.time_ns() // 10**9}.eyas.{os.getpid()}"
        self._write(_text(3, b"brain.Event:2"), 0)

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Scalars by name at a step."""
        values = b"".join(
            _text(1, _text(1, name.encode()) + b"\x15" + struct.pack("<f", value)) for name, value in scalars.items()
        )
        self._write(_text(5, values), step)

    def _write(self, body: bytes, step: int) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + body
        length = struct.pack("<Q", len(event))
        with self._file.open("ab") as stream:
            stream.write(length + _crc(length) + event + _crc(event))


def _text(field: int, content: bytes) -> bytes:
    """A field of bytes: strings and messages alike."""
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (CASTAGNOLI if byte & 1 else 0)
        table.append(byte)
    return table


TABLE = _table()


def _crc(content: bytes) -> bytes:
    """TFRecord's masked CRC-32C."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
