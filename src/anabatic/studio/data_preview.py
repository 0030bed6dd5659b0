"""The first rows of a job's data, as the model sees them: asked of `anabatic data preview` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from anabatic.config.loading import settings
from anabatic.core import json_reader
from anabatic.core.errors import DataError

TIMEOUT_SECONDS = 60.0
MAX_OUTPUT_BYTES = 4 << 20
NUM_ROWS = 3


def preview_file(command: str, text: str) -> dict[str, Any]:
    """Return what `anabatic data preview --json` prints for the training data of a recipe.

    Rows are read in another process: a hostile or huge file must not take the studio with it.

    Raises:
        ConfigError: the recipe is wrong.
        DataError: the recipe names no data, or it cannot be read.
    """
    job = settings.parse_job(command, text, "recipe")
    files = getattr(getattr(job, "data", None), "train", [])
    if not files:
        raise DataError("the recipe names no data", "set data.train")
    tokenizer = getattr(job, "tokenizer", None) or getattr(job, "model", None)
    arguments = [*files, "--rows", str(NUM_ROWS), "--json", "--command", command]
    if isinstance(tokenizer, str) and tokenizer:
        arguments += ["--model", tokenizer]
    try:
        result = subprocess.run(
            [sys.executable, "-m", "anabatic", "data", "preview", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(f"reading took more than {TIMEOUT_SECONDS:g} s", "name fewer or smaller files") from error
    if result.returncode:
        raise _to_data_error(result.stderr.decode("utf-8", "replace"))
    return dict(json_reader.loads(result.stdout[:MAX_OUTPUT_BYTES]))


def _to_data_error(stderr: str) -> DataError:
    lines = stderr.splitlines()
    message = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[-1:] or "")
    hint = next((line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")), "")
    return DataError(str(message)[:500] or "the data cannot be read", hint)
