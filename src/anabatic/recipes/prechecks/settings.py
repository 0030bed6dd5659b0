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

from anabatic.config.loading import deepspeed_json
from anabatic.config.rl import RlJob
from anabatic.config.sections.train_jobs import LoopJob, TuneJob
from anabatic.config.serve import ServeJob
from anabatic.core import run_lookup
from anabatic.core.errors import AnabaticError, ConfigError, DataError
from anabatic.core.model_format import describe_wrong_model
from anabatic.plan import batch_divisibility, trainable_layers
from anabatic.recipes import sequence_length
from anabatic.recipes.export import gguf_converter
from anabatic.recipes.prechecks import output_folders
from anabatic.recipes.prechecks.stage_outputs import (
    UNKNOWN_COMMAND,
    EarlierOutputs,
    find_stage_output,
    is_adapter,
    read_model_config,
)


def find_setting_errors(command: str, job: Any, earlier: EarlierOutputs | None) -> list[AnabaticError]:
    """Return what is wrong with the settings of a job.

    Args:
        earlier: what the stages before it will have made; None: it is no stage.
    """
    known = earlier or {}
    return [
        *check_named_files(job, known),
        *_check_served_models(job, known),
        *_collect_error(partial(_check_batch, job)),
        *_collect_error(partial(output_folders.require_writable_output, command, job, earlier is None)),
        *_collect_error(partial(_check_gguf_converter, command, job)),
    ]


def check_named_files(job: Any, earlier: EarlierOutputs) -> list[AnabaticError]:
    """Return what is wrong with what a job names beside its data, wherever it is to run."""
    return [
        *_collect_error(partial(_check_chat_template, job, earlier)),
        *(
            error
            for spec in list_adapters(job)
            for error in _collect_error(partial(_check_adapter, job, spec, earlier))
        ),
        *_collect_error(partial(_check_tuner, job, earlier)),
    ]


def find_missing_model(name: str, hub: str | None = None) -> DataError | None:
    """Return the error for a name that means no model; None: it means one, here or on a hub.

    Checkpoints of a run pass: whoever loads them knows what they may mean.
    """
    root = Path(name).expanduser()
    if run_lookup.is_hub_id(name, hub) or sequence_length.find_local_model(name) is not None:
        return None
    if not os.path.lexists(root):
        return run_lookup.make_missing_model_error(name)
    return None if root.name.startswith("checkpoint-") else describe_wrong_model(root)


def _collect_error(ask: Callable[[], None]) -> list[AnabaticError]:
    try:
        ask()
    except AnabaticError as error:
        return [error]
    return []


def _check_chat_template(job: Any, earlier: EarlierOutputs) -> None:
    given = getattr(job, "chat_template", None)
    if given is not None and find_stage_output(given, earlier) is None:
        from anabatic.data.chat import custom_templates

        custom_templates.read_template(given)


def list_adapters(job: Any) -> list[str]:
    """Return the adapters that go into the model of a job: `FOLDER[@WEIGHT]`."""
    return [] if isinstance(job, ServeJob) else getattr(job, "adapter", [])


def is_absent(spec: str) -> bool:
    """Whether nothing is there of the name of an adapter."""
    from anabatic.models.lora import adapter_config

    return not os.path.lexists(Path(adapter_config.parse_adapter_spec(spec)[0]).expanduser())


def _check_adapter(job: Any, spec: str, earlier: EarlierOutputs) -> None:
    from anabatic.models.lora import adapter_config

    name, _ = adapter_config.parse_adapter_spec(spec)
    stage_output = find_stage_output(name, earlier)
    if stage_output is not None:
        if stage_output.command != UNKNOWN_COMMAND and not stage_output.has_model:
            raise ConfigError(
                f"adapter is {name}, of stage {stage_output.stage}: `{stage_output.command}` makes no adapter"
            )
        if stage_output.is_adapter is False:
            raise adapter_config.whole_model_error(Path(name))
        return
    _require_model(name, getattr(job, "hub", None))
    folder = sequence_length.find_local_model(name)
    if folder is not None and is_adapter(name, earlier) is False:
        raise adapter_config.whole_model_error(folder)
    if folder is not None:
        adapter_config.read_adapter_config(folder)


def _require_model(name: str, hub: str | None = None) -> None:
    found = find_missing_model(name, hub)
    if found is not None:
        raise found


def _check_served_models(job: Any, earlier: EarlierOutputs) -> list[AnabaticError]:
    """What is wrong with the models of a server, each `NAME=FOLDER` or a folder."""
    if not isinstance(job, ServeJob):
        return []
    folders = [sequence_length.split_name_and_folder(one)[1] for one in (*job.model, *job.classifier)]
    folders += [one.partition("=")[2] for one in job.adapter]
    return [
        error
        for one in folders
        if find_stage_output(one, earlier) is None
        for error in _collect_error(partial(_require_model, one))
    ]


def _check_tuner(job: Any, earlier: EarlierOutputs) -> None:
    """What is trained of a model: only what is certain is refused, the rest is said where the model is built."""
    if not isinstance(job, TuneJob):
        return
    goes_on = is_adapter(job.model, earlier)
    if goes_on:
        trainable_layers.require_adapter_tuner(sequence_length.find_local_model(job.model) or job.model, job.tuner)
        return
    if job.tuner == "freeze":
        list(trainable_layers.compile_freeze_patterns(job.freeze))
    config = read_model_config(job.model, earlier)
    blocks, linear = trainable_layers.count_blocks(config), trainable_layers.list_linear_layers(config)
    if goes_on is None or blocks is None:
        return
    if job.tuner == "freeze":
        trainable_layers.require_blocks(job.freeze, blocks)
    elif job.tuner == "lora":
        trainable_layers.select_target_modules(linear, job.lora.target_modules)


def _check_batch(job: Any) -> None:
    """Sizes that are given, for the processes that this command starts."""
    if not isinstance(job, LoopJob):
        return
    ranks = max(1, job.device.nproc // job.parallel.tensor)
    given, _, _ = deepspeed_json.apply_deepspeed(sequence_length.set_default_seq_len(job), ranks)
    batch_divisibility.require_divisible_batch(given.batch, ranks)
    if isinstance(job, RlJob):
        batch_divisibility.count_micro_steps(given, ranks)


def _check_gguf_converter(command: str, job: Any) -> None:
    if command == "export" and job.gguf != "none":
        gguf_converter.find_converter(job.llama_cpp)
