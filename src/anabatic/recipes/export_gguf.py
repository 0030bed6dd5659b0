"""A GGUF file, by llama.cpp's own converter: a program of theirs that reads the folder that we have written."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from anabatic.config.export import Gguf
from anabatic.core import log
from anabatic.core.errors import ConfigError, Failure
from anabatic.core.text import size
from anabatic.models import gguf

SCRIPT = "convert_hf_to_gguf.py"
GET = f"git clone https://github.com/ggml-org/llama.cpp and give --llama-cpp llama.cpp, or put its {SCRIPT} on PATH"
BYTES: dict[Gguf, float] = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}
"""Of a parameter."""
_LINES = 12
_STRANGE_TOKENIZER = "pre-tokenizer was not recognized"


def find(given: str | None) -> list[str]:
    """Return the command line that begins the converter.

    Raises:
        ConfigError: it is not there.
    """
    if given is None:
        found = shutil.which(SCRIPT)
        if found is None:
            raise ConfigError(f"GGUF files are written by llama.cpp, and there is no {SCRIPT} on PATH", GET)
        return [found]
    path = Path(given).expanduser()
    script = path if path.is_file() else path / SCRIPT
    if not script.is_file():
        raise ConfigError(f"llama_cpp is {path}, and there is no {script}", GET)
    return [sys.executable, str(script)]


def require(converter: list[str]) -> None:
    """Make sure that the converter starts, before hours are spent on its input.

    Raises:
        ConfigError: it does not, for example because a package that it imports is missing.
    """
    code, said = _run([*converter, "--help"])
    if code != 0:
        raise ConfigError(
            f"{converter[-1]} does not start (exit code {code}): {_last(said, 1)}",
            "install what it asks for: pip install -r requirements/requirements-convert_hf_to_gguf.txt in llama.cpp",
        )


def convert(converter: list[str], folder: Path, kind: Gguf, file: Path) -> None:
    """Convert the model of a folder.

    Args:
        file: is written.

    Raises:
        Failure: the converter failed, or left no whole file.
    """
    log.info(f"{converter[-1]} writes {file.name}")
    code, said = _run([*converter, str(folder), "--outfile", str(file), "--outtype", kind])
    log.debug(said)
    if code != 0:
        end = f"signal {-code}" if code < 0 else f"exit code {code}"
        hint = (
            "llama.cpp knows the pre-tokenizers of published models only, not one that was trained here: serve the"
            " folder with vLLM or `anabatic serve`, or add the tokenizer to its convert_hf_to_gguf_update.py"
            if _STRANGE_TOKENIZER in said
            else "the lines above are the converter's; leave --gguf out to write the folder alone"
        )
        log.info(_last(said, _LINES))
        raise Failure(f"{converter[-1]} failed with {end}", hint)
    if problem := gguf.fault(file):
        log.info(_last(said, _LINES))
        raise Failure(f"{converter[-1]} says that all is well, but {file.name} is not whole: {problem}", "run it again")
    log.info(f"{file.name}: {size(file.stat().st_size)}")


def _run(line: list[str]) -> tuple[int, str]:
    """Return exit code and all that was said."""
    try:
        done = subprocess.run(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        raise ConfigError(f"{line[0]} cannot be started: {error.strerror}", GET) from error
    return done.returncode, done.stdout.decode("utf-8", "replace")


def _last(said: str, lines: int) -> str:
    return "\n".join(said.strip().splitlines()[-lines:]) or "(it said nothing)"
