"""The first rows of a job's data, as the model sees them: asked of `anabatic data preview` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from anabatic.config.loading import settings, yaml_reader
from anabatic.config.sections.train_jobs import PictureData, PictureSizes
from anabatic.core import json_reader
from anabatic.core.errors import DataError

TIMEOUT_SECONDS = 60.0
MAX_OUTPUT_BYTES = 4 << 20
NUM_ROWS = 3
THUMBNAIL_SIDE = 160
"""Pixels."""
_SHARED_SETTINGS = ("chat_template", "train_on_inputs", "last_turn_only")
"""Of the job and of `data preview`."""


def preview_rows(command: str, text: str) -> dict[str, Any]:
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
    model = getattr(job, "model", None)
    data = asdict(replace(job.data, train=[], valid=[]))
    recipe = {
        "inputs": files,
        "model": getattr(job, "tokenizer", None) or (model if isinstance(model, str) else getattr(model, "path", None)),
        **{name: getattr(job, name) for name in _SHARED_SETTINGS if hasattr(job, name)},
        "rows": NUM_ROWS,
        "json": True,
        "thumbnails": THUMBNAIL_SIDE,
        "data": {one.name: data[one.name] for one in fields(PictureData) if one.name in data},
        "vision": {one.name: getattr(job.vision, one.name) for one in fields(PictureSizes) if hasattr(job, "vision")},
    }
    with tempfile.TemporaryDirectory(prefix="anabatic-preview-") as folder:
        path = Path(folder) / "preview.yaml"  # and no arguments: a name of a file may look like an option
        path.write_text(yaml_reader.dump_yaml(recipe), encoding="utf-8")
        try:
            result = subprocess.run(
                [sys.executable, "-m", "anabatic", "data", "preview", "--config", str(path)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DataError(f"reading took more than {TIMEOUT_SECONDS:g} s", "name fewer or smaller files") from error
    if result.returncode:
        raise _to_data_error(result.stderr.decode("utf-8", "replace"))
    if len(result.stdout) > MAX_OUTPUT_BYTES:
        raise DataError(
            f"the first rows have more than {MAX_OUTPUT_BYTES >> 20} MiB", "look at them with a text editor"
        )
    return dict(json_reader.loads(result.stdout))


def _to_data_error(stderr: str) -> DataError:
    lines = stderr.splitlines()
    last = lines[-1] if lines else ""
    message = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), last)
    hint = next((line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")), "")
    return DataError(message[:500] or "the data cannot be read", hint)
