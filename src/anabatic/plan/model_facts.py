"""Facts of a model before it is built: its folder, its config.json, the shape of its decoder. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from anabatic.core import json_reader
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.paths import RunFolder
from anabatic.plan import model_shape
from anabatic.plan.shapes.decoder_shape import DecoderShape

Job = TypeVar("Job", bound=Any)
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "seq_length")
"""Keys of config.json for the positions of a model, by family."""
_MAX_ADAPTER_DEPTH = 4
"""An adapter names a model, which may be a run that made an adapter; more than that is a circle."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a job's model, looked up once.

    Attributes:
        name: as the job names it; empty: a new model.
        config: its config.json, of an adapter that of its base; empty: not known, or a new model.
        job: what the shape is read from; None: it is not known.
        is_adapter: None: not known.
        made_by: what will have made it, for messages: " by stage base".
        folder: of the model as it is named, perhaps an adapter's; None: it is new, or not on this machine.
        base_folder: of the weights: of an adapter the folder of its base.
    """

    job: Any
    name: str
    config: Mapping[str, Any]
    is_adapter: bool | None
    made_by: str = ""
    folder: Path | None = None
    base_folder: Path | None = None

    @cached_property
    def is_whole(self) -> bool:
        """The model is known to be no adapter: it is new, or here as a whole one, or its published sizes are known."""
        return self.is_adapter is False or (self.is_adapter is None and self.find_shape() is not None)

    @cached_property
    def positions(self) -> int | None:
        """Positions that the model was made for; None: not known, or without a limit."""
        found = max_positions(self.config)
        if found is None and self.name and (shape := self.find_shape()) is not None:
            found = shape.max_positions
        return found or None

    def require_shape(self) -> tuple[DecoderShape, str]:
        """Return the shape of the decoder, and where it comes from.

        Raises:
            ConfigError, DataError: it is not known.
        """
        found = self._shape
        if isinstance(found, (ConfigError, DataError)):
            raise found
        return found

    def find_shape(self) -> DecoderShape | None:
        """Return the shape of the decoder; None: it is not known."""
        return self._shape[0] if isinstance(self._shape, tuple) else None

    @cached_property
    def _shape(self) -> tuple[DecoderShape, str] | ConfigError | DataError:
        if self.job is None:
            return ConfigError(f"the shape of {self.name or 'the new model'} is not known yet")
        try:
            return model_shape.get_job_shape(self.job)
        except (ConfigError, DataError) as error:
            return error


def find_model_facts(job: Any) -> ModelFacts:
    """Look up what is known here of the model that a job trains."""
    name = model_name(job)
    if not name:
        return ModelFacts(None if model_shape.is_depth_left_open(job) else job, "", {}, False)
    folder = find_local_model(name)
    if folder is not None and (file := folder / "config.json").is_file():
        return ModelFacts(job, name, read_json_object(file), False, folder=folder)
    return ModelFacts(job, name, read_local_config(name), None if folder is None else True, folder=folder)


def model_name(job: Any) -> str:
    """Return the model that a job begins with, as it was named; empty for a new one."""
    model = getattr(job, "model", None)
    return model if isinstance(model, str) else str(getattr(model, "path", None) or "")


def with_model(job: Job, path: str) -> Job:
    """Return the job with another model to begin with."""
    if isinstance(job.model, str):
        return replace(job, model=path)
    return replace(job, model=replace(job.model, path=path))


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
    if _holds_model(root):
        return root
    run = RunFolder(root)
    return next(filter(_holds_model, (run.best_model, run.final_model)), None)


def _holds_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()


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


def max_positions(config: Mapping[str, Any]) -> int | None:
    """Return the longest segment that a model was made for; None where config.json does not say."""
    inner = config.get("text_config")
    for tree in (config, inner if isinstance(inner, dict) else {}):
        for name in _POSITION_KEYS:
            if isinstance(tree.get(name), int) and tree[name] > 0:
                return int(tree[name])
    return None


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty where it cannot be read: who loads the model says what is wrong."""
    try:
        found = json_reader.read_json_file(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
