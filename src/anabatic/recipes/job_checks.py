"""Settings of a job against what is at hand: templates, adapters, layers, batches, the place to write. No torch.

The very functions that the commands use later are asked here; what needs more than the standard library is imported
where a job names such a thing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from anabatic.config import deepspeed
from anabatic.config.rl import RlJob
from anabatic.config.serve import ServeJob
from anabatic.config.train import LoopJob, TuneJob
from anabatic.core import run_names
from anabatic.core.errors import AnabaticError, ConfigError, DataError
from anabatic.core.model_files import no_model
from anabatic.plan import divide, layers
from anabatic.recipes import export_gguf, length, outputs
from anabatic.recipes.made import UNKNOWN, Earlier, config_of, is_adapter, of_stage


def check(command: str, job: Any, earlier: Earlier | None) -> list[AnabaticError]:
    """Return what is wrong with the settings of a job.

    Args:
        earlier: what the stages before it will have made; None: it is no stage.
    """
    known = earlier or {}
    return [
        *settings(job, known),
        *_served(job, known),
        *_refused(partial(_batch, job)),
        *_refused(partial(outputs.require, command, job, earlier is None)),
        *_refused(partial(_converter, command, job)),
    ]


def settings(job: Any, earlier: Earlier) -> list[AnabaticError]:
    """Return what is wrong with what a job names beside its data, wherever it is to run."""
    return [
        *_refused(partial(_chat_template, job, earlier)),
        *(error for spec in adapters(job) for error in _refused(partial(_adapter, job, spec, earlier))),
        *_refused(partial(_tuner, job, earlier)),
    ]


def missing(name: str, hub: str | None = None) -> DataError | None:
    """Return the error for a name that means no model; None: it means one, here or on a hub.

    Checkpoints of a run pass: whoever loads them knows what they may mean.
    """
    root = Path(name).expanduser()
    if run_names.is_id(name, hub) or length.folder_of(name) is not None:
        return None
    if not os.path.lexists(root):
        return run_names.missing_model(name)
    return None if root.name.startswith("checkpoint-") else no_model(root)


def _refused(ask: Callable[[], None]) -> list[AnabaticError]:
    try:
        ask()
    except AnabaticError as error:
        return [error]
    return []


def _chat_template(job: Any, earlier: Earlier) -> None:
    given = getattr(job, "chat_template", None)
    if given is not None and of_stage(given, earlier) is None:
        from anabatic.data import templates

        templates.read(given)


def adapters(job: Any) -> list[str]:
    """Return the adapters that go into the model of a job: `FOLDER[@WEIGHT]`."""
    return [] if isinstance(job, ServeJob) else getattr(job, "adapter", [])


def is_absent(spec: str) -> bool:
    """Whether nothing is there of the name of an adapter."""
    from anabatic.models import adapter_config

    return not os.path.lexists(Path(adapter_config.parse(spec)[0]).expanduser())


def _adapter(job: Any, spec: str, earlier: Earlier) -> None:
    from anabatic.models import adapter_config

    name, _ = adapter_config.parse(spec)
    made = of_stage(name, earlier)
    if made is not None:
        if made.command != UNKNOWN and not made.has_model:
            raise ConfigError(f"adapter is {name}, of stage {made.stage}: `{made.command}` makes no adapter")
        if made.adapter is False:
            raise adapter_config.whole_model(Path(name))
        return
    _there(name, getattr(job, "hub", None))
    folder = length.folder_of(name)
    if folder is not None and is_adapter(name, earlier) is False:
        raise adapter_config.whole_model(folder)
    if folder is not None:
        adapter_config.read_config(folder)


def _there(name: str, hub: str | None = None) -> None:
    found = missing(name, hub)
    if found is not None:
        raise found


def _served(job: Any, earlier: Earlier) -> list[AnabaticError]:
    """What is wrong with the models of a server, each `NAME=FOLDER` or a folder."""
    if not isinstance(job, ServeJob):
        return []
    folders = [length.named(one)[1] for one in (*job.model, *job.classifier)]
    folders += [one.partition("=")[2] for one in job.adapter]
    return [error for one in folders if of_stage(one, earlier) is None for error in _refused(partial(_there, one))]


def _tuner(job: Any, earlier: Earlier) -> None:
    """What is trained of a model: only what is certain is refused, the rest is said where the model is built."""
    if not isinstance(job, TuneJob):
        return
    goes_on = is_adapter(job.model, earlier)
    if goes_on:
        layers.require_goes_on(length.folder_of(job.model) or job.model, job.tuner)
        return
    if job.tuner == "freeze":
        list(layers.expressions(job.freeze))
    config = config_of(job.model, earlier)
    blocks, linear = layers.blocks_of(config), layers.linear_of(config)
    if goes_on is None or blocks is None:
        return
    if job.tuner == "freeze":
        layers.require_blocks(job.freeze, blocks)
    elif job.tuner == "lora":
        layers.targets(linear, job.lora.target_modules)


def _batch(job: Any) -> None:
    """Sizes that are given, for the processes that this command starts."""
    if not isinstance(job, LoopJob):
        return
    ranks = max(1, job.device.nproc // job.parallel.tensor)
    given, _, _ = deepspeed.apply(length.settled(job), ranks)
    divide.require_batch(given.batch, ranks)
    if isinstance(job, RlJob):
        divide.micro_steps(given, ranks)


def _converter(command: str, job: Any) -> None:
    if command == "export" and job.gguf != "none":
        export_gguf.find(job.llama_cpp)
