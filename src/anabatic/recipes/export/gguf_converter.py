"""A GGUF file, by llama.cpp's own converter: a program of theirs that reads the folder that we have written."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from anabatic.config.export import Gguf
from anabatic.core import log
from anabatic.core.errors import ConfigError, Failure
from anabatic.core.formatting import format_size
from anabatic.models import gguf

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
    if problem := gguf.find_gguf_fault(file):
        log.info(_last_lines(output, _TAIL_LINES))
        raise Failure(f"{converter[-1]} says that all is well, but {file.name} is not whole: {problem}", "run it again")
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
