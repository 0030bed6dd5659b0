"""Is a GGUF file whole? Only its heading is read.

Source of the layout: ggml's `docs/gguf.md` (version 3) and the sizes of blocks in `gguf-py/gguf/constants.py`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from anabatic.core.text import size

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a value -> how `struct` reads it."""
_STRING, _ARRAY = 8, 9
_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34), 30: (1, 2)}
"""Type of a tensor -> numbers and bytes of a block: F32, F16, Q4_0, Q8_0, BF16."""
_LONGEST = 1 << 26
_ALIGNMENT = 32


@dataclass(frozen=True)
class Heading:
    """What a file says of itself.

    Attributes:
        tensors: how many.
        parameters: numbers in them.
        end: bytes that the file must have at least.
    """

    tensors: int
    parameters: int
    end: int


def fault(path: Path) -> str:
    """Return why a file is no whole GGUF file; empty when it is one."""
    if not path.is_file():
        return "it was not written"
    length = path.stat().st_size
    try:
        with open(path, "rb") as file:
            heading = read(file)
    except ValueError as error:
        return f"{error} ({size(length)})"
    if not heading.tensors:
        return "it holds no tensor"
    if length < heading.end:
        return f"it ends at {length:,} of {heading.end:,} bytes"
    return ""


def read(file: BinaryIO) -> Heading:
    """Read the heading of a file that is open at its beginning.

    Raises:
        ValueError: it is torn, or no GGUF file.
    """
    if file.read(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = _number(file, "I")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}")
    tensors, keys = _number(file, "Q"), _number(file, "Q")
    alignment = _ALIGNMENT
    for _ in range(keys):
        name = _text(file)
        value = _value(file, _number(file, "I"))
        if name == b"general.alignment" and isinstance(value, int) and value > 0:
            alignment = value
    end = parameters = 0
    for _ in range(tensors):
        _text(file)
        shape = [_number(file, "Q") for _ in range(_bounded(_number(file, "I"), 8))]
        kind, offset = _number(file, "I"), _number(file, "Q")
        elements = math.prod(shape)
        numbers, width = _BLOCKS.get(kind, (elements or 1, 0))
        end = max(end, offset + elements // numbers * width)
        parameters += elements
    start = -(-file.tell() // alignment) * alignment
    return Heading(tensors, parameters, start + end)


def _take(file: BinaryIO, count: int) -> bytes:
    data = file.read(_bounded(count, _LONGEST))
    if len(data) < count:
        raise ValueError("its heading is torn")
    return data


def _bounded(count: int, most: int) -> int:
    if count > most:
        raise ValueError("its heading is damaged")
    return count


def _number(file: BinaryIO, kind: str) -> int:
    value: int = struct.unpack("<" + kind, _take(file, struct.calcsize("<" + kind)))[0]
    return value


def _text(file: BinaryIO) -> bytes:
    return _take(file, _number(file, "Q"))


def _value(file: BinaryIO, kind: int) -> int | bytes | None:
    """Read a value; arrays are passed over."""
    if kind == _STRING:
        return _text(file)
    if kind == _ARRAY:
        inner, count = _number(file, "I"), _number(file, "Q")
        if inner in _NUMBERS:
            _take(file, count * struct.calcsize("<" + _NUMBERS[inner]))
            return None
        for _ in range(_bounded(count, _LONGEST)):
            _value(file, inner)
        return None
    if kind not in _NUMBERS:
        raise ValueError("its heading is damaged")
    return _number(file, _NUMBERS[kind])
