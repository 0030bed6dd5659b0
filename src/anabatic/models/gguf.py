"""Check that a GGUF file is complete; only its header is read.

Source of the layout: ggml's `docs/gguf.md` (version 3) and the sizes of blocks in `gguf-py/gguf/constants.py`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from anabatic.core.formatting import format_size

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBER_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value type -> format of `struct`."""
_STRING, _ARRAY = 8, 9
_BLOCK_SIZES = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34), 30: (1, 2)}
"""Tensor type -> elements and bytes of a block: F32, F16, Q4_0, Q8_0, BF16."""
_MAX_LENGTH = 1 << 26
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GgufHeader:
    """Summary of a file's header.

    Attributes:
        num_tensors: number of tensors.
        num_parameters: number of their elements.
        min_bytes: smallest size of the complete file.
    """

    num_tensors: int
    num_parameters: int
    min_bytes: int


def find_gguf_fault(path: Path) -> str:
    """Return why a file is not a complete GGUF file; empty if it is."""
    if not path.is_file():
        return "it was not written"
    length = path.stat().st_size
    try:
        with open(path, "rb") as file:
            header = read_header(file)
    except ValueError as error:
        return f"{error} ({format_size(length)})"
    if not header.num_tensors:
        return "it holds no tensor"
    if length < header.min_bytes:
        return f"it ends at {length:,} of {header.min_bytes:,} bytes"
    return ""


def read_header(file: BinaryIO) -> GgufHeader:
    """Read the header of an open file from its start.

    Raises:
        ValueError: it is truncated, or not a GGUF file.
    """
    if file.read(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = _read_number(file, "I")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}")
    tensors, keys = _read_number(file, "Q"), _read_number(file, "Q")
    alignment = _DEFAULT_ALIGNMENT
    for _ in range(keys):
        name = _read_string(file)
        value = _read_value(file, _read_number(file, "I"))
        if name == b"general.alignment" and isinstance(value, int) and value > 0:
            alignment = value
    end = parameters = 0
    for _ in range(tensors):
        _read_string(file)
        shape = [_read_number(file, "Q") for _ in range(_require_at_most(_read_number(file, "I"), 8))]
        tensor_type, offset = _read_number(file, "I"), _read_number(file, "Q")
        elements = math.prod(shape)
        block_elements, block_bytes = _BLOCK_SIZES.get(tensor_type, (elements or 1, 0))
        end = max(end, offset + elements // block_elements * block_bytes)
        parameters += elements
    start = -(-file.tell() // alignment) * alignment
    return GgufHeader(tensors, parameters, start + end)


def _read_bytes(file: BinaryIO, count: int) -> bytes:
    data = file.read(_require_at_most(count, _MAX_LENGTH))
    if len(data) < count:
        raise ValueError("its heading is torn")
    return data


def _require_at_most(count: int, maximum: int) -> int:
    if count > maximum:
        raise ValueError("its heading is damaged")
    return count


def _read_number(file: BinaryIO, number_format: str) -> int:
    value: int = struct.unpack("<" + number_format, _read_bytes(file, struct.calcsize("<" + number_format)))[0]
    return value


def _read_string(file: BinaryIO) -> bytes:
    return _read_bytes(file, _read_number(file, "Q"))


def _read_value(file: BinaryIO, value_type: int) -> int | bytes | None:
    """Read a value; arrays are skipped."""
    if value_type == _STRING:
        return _read_string(file)
    if value_type == _ARRAY:
        item_type, count = _read_number(file, "I"), _read_number(file, "Q")
        if item_type in _NUMBER_FORMATS:
            _read_bytes(file, count * struct.calcsize("<" + _NUMBER_FORMATS[item_type]))
            return None
        for _ in range(_require_at_most(count, _MAX_LENGTH)):
            _read_value(file, item_type)
        return None
    if value_type not in _NUMBER_FORMATS:
        raise ValueError("its heading is damaged")
    return _read_number(file, _NUMBER_FORMATS[value_type])
