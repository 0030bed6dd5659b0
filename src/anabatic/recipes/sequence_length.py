"""`batch.seq_len` where nothing is said of it: what is common, and no more than the model has positions. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from anabatic.core import json_reader, log
from anabatic.core.paths import RunFolder

Job = TypeVar("Job", bound=Any)
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "seq_length")
"""What families call it."""
_MAX_ADAPTER_DEPTH = 4
"""An adapter names a model, which may be a run that made an adapter; more than that is a circle."""


def model_name(job: Any) -> str:
    """Return the model that a job begins with, as it was named; empty for a new one."""
    model = getattr(job, "model", None)
    return model if isinstance(model, str) else str(getattr(model, "path", None) or "")


def split_name_and_folder(one: str) -> tuple[str, str]:
    """Return the name and the folder of `NAME=FOLDER`, or of a folder that gives its own name."""
    name, equals, folder = one.partition("=")
    if equals and name and folder and not Path(one).exists():
        return name, folder
    path = Path(one).expanduser().resolve()
    generic = ("final_model", "best_model")
    return (path.parent.name if path.name in generic else path.name) or one, one


def find_local_model(name: str) -> Path | None:
    """Return the folder with config.json or adapter_config.json that a name means here; None where there is none."""
    root = Path(name).expanduser()
    run = RunFolder(root)
    for folder in (root, run.best_model, run.final_model):
        if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
            return folder
    return None


def read_local_config(name: str) -> dict[str, Any]:
    """Return the config.json of a model on this machine, of an adapter that of its base; empty where there is none
    that can be read."""
    for _ in range(_MAX_ADAPTER_DEPTH):
        folder = find_local_model(name)
        if folder is None:
            return {}
        has_config = (folder / "config.json").is_file()
        found = read_json_object(folder / ("config.json" if has_config else "adapter_config.json"))
        if has_config:
            return found
        name = str(found.get("base_model_name_or_path") or "")
        if not name:
            return {}
    return {}


def max_positions(config: dict[str, Any]) -> int | None:
    """Return the longest segment that a model was made for; None where config.json does not say."""
    inner = config.get("text_config")
    for tree in (config, inner if isinstance(inner, dict) else {}):
        for name in _POSITION_KEYS:
            if isinstance(tree.get(name), int) and tree[name] > 0:
                return int(tree[name])
    return None


def resolve_seq_len(job: Job, positions: int | None = None) -> Job:
    """Return `settled(job)`; say so where the model makes `batch.seq_len` shorter than what is common."""
    found = set_default_seq_len(job, positions)
    length, common = found.batch.seq_len, job.batch.resolved_seq_len
    if job.batch.seq_len is None and length is not None and length < common:
        log.info(f"batch.seq_len {length} (the model was made for {length} positions; {common} is common)")
    return found


def set_default_seq_len(job: Job, positions: int | None = None) -> Job:
    """Return the job with `batch.seq_len` set, where it is left open and the model is known.

    Args:
        positions: of the model; None: as its folder on this machine says.
    """
    if job.batch.seq_len is not None:
        return job
    name = model_name(job)
    if positions is None and name:
        positions = max_positions(read_local_config(name))
        if positions is None:
            return job
    common = job.batch.resolved_seq_len
    length = common if positions is None else min(common, positions)
    return replace(job, batch=replace(job.batch, seq_len=length))


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty where it cannot be read: who loads the model says what is wrong."""
    try:
        found = json_reader.read_json_file(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
