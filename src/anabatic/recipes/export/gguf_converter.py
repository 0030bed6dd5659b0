"""Write a GGUF file with llama.cpp's own converter, and check that it is complete."""

from __future__ import annotations

import math
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from anabatic.config.export import Gguf
from anabatic.core import log
from anabatic.core.errors import ConfigError, Failure
from anabatic.core.formatting import format_size

CONVERTER_SCRIPT = "convert_hf_to_gguf.py"
INSTALL_HINT = (
    f"git clone https://github.com/ggml-org/llama.cpp and give --llama-cpp llama.cpp, or put its "
    f"{CONVERTER_SCRIPT} on PATH"
)
BYTES_PER_PARAMETER: dict[Gguf, float] = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}
"""Of a parameter."""
_TAIL_LINES = 12
_UNKNOWN_PRETOKENIZER = "pre-tokenizer was not recognized"


def find_converter(given: str | None) -> list[str]:
    """Return the command line that begins the converter.

    Raises:
        ConfigError: it is not there.
    """
    if given is None:
        found = shutil.which(CONVERTER_SCRIPT)
        if found is None:
            raise ConfigError(
                f"GGUF files are written by llama.cpp, and there is no {CONVERTER_SCRIPT} on PATH", INSTALL_HINT
            )
        return [found]
    path = Path(given).expanduser()
    script = path if path.is_file() else path / CONVERTER_SCRIPT
    if not script.is_file():
        raise ConfigError(f"llama_cpp is {path}, and there is no {script}", INSTALL_HINT)
    return [sys.executable, str(script)]


def require_converter_starts(converter: list[str]) -> None:
    """Make sure that the converter starts, before hours are spent on its input.

    Raises:
        ConfigError: it does not, for example because a package that it imports is missing.
    """
    code, output = _run_converter([*converter, "--help"])
    if code != 0:
        raise ConfigError(
            f"{converter[-1]} does not start (exit code {code}): {_last_lines(output, 1)}",
            "install what it asks for: pip install -r requirements/requirements-convert_hf_to_gguf.txt in llama.cpp",
        )


def convert_to_gguf(converter: list[str], folder: Path, kind: Gguf, file: Path) -> None:
    """Convert the model of a folder.

    Args:
        file: is written.

    Raises:
        Failure: the converter failed, or left no whole file.
    """
    log.info(f"{converter[-1]} writes {file.name}")
    code, output = _run_converter([*converter, str(folder), "--outfile", str(file), "--outtype", kind])
    log.debug(output)
    if code != 0:
        end = f"signal {-code}" if code < 0 else f"exit code {code}"
        hint = (
            "llama.cpp knows the pre-tokenizers of published models only, not one that was trained here: serve the"
            " folder with vLLM or `anabatic serve`, or add the tokenizer to its convert_hf_to_gguf_update.py"
            if _UNKNOWN_PRETOKENIZER in output
            else "the lines above are the converter's; leave --gguf out to write the folder alone"
        )
        log.info(_last_lines(output, _TAIL_LINES))
        raise Failure(f"{converter[-1]} failed with {end}", hint)
    if problem := find_gguf_fault(file):
        log.info(_last_lines(output, _TAIL_LINES))
        raise Failure(f"{converter[-1]} reports success, but {file.name} is incomplete: {problem}", "run it again")
    log.info(f"{file.name}: {format_size(file.stat().st_size)}")


def _run_converter(line: list[str]) -> tuple[int, str]:
    """Return exit code and all that was said."""
    try:
        done = subprocess.run(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        raise ConfigError(f"{line[0]} cannot be started: {error.strerror}", INSTALL_HINT) from error
    return done.returncode, done.stdout.decode("utf-8", "replace")


def _last_lines(output: str, lines: int) -> str:
    return "\n".join(output.strip().splitlines()[-lines:]) or "(it said nothing)"


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
