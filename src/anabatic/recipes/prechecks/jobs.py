"""Check a job before anything heavy is loaded: its files, model, templates, adapters, layers, batches and folders. No
torch.

No torch: a mistyped file is reported in a fraction of a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from anabatic.config.rl import BUILTIN_REWARDS
from anabatic.config.sections.common import LogSettings
from anabatic.config.sections.train_jobs import LoopJob
from anabatic.config.serve import ServeJob
from anabatic.core import callbacks, extras, paths, plugins
from anabatic.core.errors import AnabaticError, ConfigError, DataError, MultipleErrors, UserError
from anabatic.core.formatting import did_you_mean
from anabatic.plan import job_rules, model_facts
from anabatic.plan.model_format import describe_wrong_model
from anabatic.recipes.export import gguf_converter
from anabatic.recipes.prechecks import data_files
from anabatic.recipes.prechecks.data_files import (
    OTHER_MODEL_COMMANDS,
    TEXT_MODEL_COMMANDS,
    UNKNOWN_COMMAND,
    EarlierOutputs,
    StageOutput,
    absolute_path,
    find_stage_output,
    is_adapter,
    read_model_sizes,
)
from anabatic.recipes.resolve import Machine, resolve

_MODEL_SUBFOLDERS = ("", "best_model", "final_model")
_ACCEPTED_MODEL_COMMANDS: dict[str, tuple[str, ...]] = {
    "classify predict": ("classify train",),
    "classify eval": ("classify train",),
    "classify train": (*TEXT_MODEL_COMMANDS, "classify train"),
    "reward": (*TEXT_MODEL_COMMANDS, "reward"),
    "export": (*TEXT_MODEL_COMMANDS, *OTHER_MODEL_COMMANDS),
    "merge": (*TEXT_MODEL_COMMANDS, *OTHER_MODEL_COMMANDS),
    "serve": (*TEXT_MODEL_COMMANDS, *OTHER_MODEL_COMMANDS),
}
"""Command -> commands whose models it takes; the others take what writes text."""


_CHAT_COMMANDS = ("rl", "dpo", "reward")
"""Commands whose rows always are conversations."""


def require_valid_job(command: str, job: Any) -> None:
    """Refuse a job that cannot run.

    Raises:
        AnabaticError: what is wrong with it; `MultipleErrors` where that is more than one thing.
    """
    job_rules.raise_problems(find_problems(command, job))


def find_problems(command: str, job: Any, earlier: EarlierOutputs | None = None) -> list[AnabaticError]:
    """Return what is wrong with a job, as far as that is known without its model.

    Args:
        earlier: what the stages before it will have made; what is not there yet is looked for among that.
    """
    known = earlier or {}
    checks = (
        _check_model(command, job, earlier),
        _check_tokenizer(job, known),
        _check_chat_template(command, job, known),
        _check_lengths(job, known),
        _check_rewards(job),
        _check_callbacks_and_sinks(job),
        _check_eval_tasks(command, job),
        find_setting_errors(command, job, earlier),
    )
    found: list[AnabaticError] = list(
        data_files.check_data_files(command, job, lambda name: find_stage_output(name, known) is not None)
    )
    found += [error for check in checks for error in check]
    return list({(str(error), error.hint): error for error in found}.values())  # two checks may name one file


def require_to_plan(command: str, job: Any) -> list[str]:
    """Refuse what a job would refuse wherever it runs; return what it names and is not there yet, to be told behind the
    plan: it is made before things are fetched.

    Raises:
        AnabaticError: what is wrong with it; `MultipleErrors` where that is more than one thing.
    """
    absent = data_files.find_absent_files(job)
    later = [spec for spec in list_adapters(job) if is_absent(spec)]
    checked_job = replace(job, adapter=[spec for spec in job.adapter if spec not in later]) if later else job
    found: list[AnabaticError] = list(data_files.check_data_files(command, job, lambda name: name in absent))
    checks = (_check_chat_template(command, job, {}), _check_rewards(job), check_named_files(checked_job, {}))
    job_rules.raise_problems([*found, *(error for check in checks for error in check)])
    missing = (*absent.values(), *(f"{spec}: no such adapter" for spec in later))
    return [f"{what} (the plan is made without it, the job needs it)" for what in missing]


def _check_model(command: str, job: Any, earlier: EarlierOutputs | None) -> Iterator[UserError]:
    name = model_facts.model_name(job)
    if not name or getattr(job, "endpoint", None):
        return
    stage_output = find_stage_output(name, earlier or {})
    if stage_output is not None:
        yield from _check_stage_model(command, name, stage_output, earlier or {})
        return
    if earlier is None:
        found = None if command.startswith("bench ") else find_missing_model(name, getattr(job, "hub", None))
        yield from [] if found is None else [found]
        return
    if model_facts.find_local_model(name) is not None or _may_be_hub_id(name, earlier):
        return
    root = Path(name).expanduser()
    if root.exists():
        yield from [] if command.startswith(("classify ", "bench ")) else [describe_wrong_model(root)]
        return
    near = _suggest_path(root, [Path(folder) for folder in earlier])
    hint = "give a Hugging Face folder or a finished run folder"
    yield DataError(f"model folder {root} does not exist", f"{hint}.{near}" if near else hint)


def _may_be_hub_id(name: str, earlier: EarlierOutputs) -> bool:
    """Whether a name may mean a model that is fetched; what would lie among the folders of the stages does not."""
    among = any(absolute_path(name).parent == absolute_path(folder).parent for folder in earlier)
    return paths.HUB_ID_PATTERN.fullmatch(name) is not None and not os.path.lexists(name) and not among


def _suggest_path(path: Path, stage_paths: list[Path]) -> str:
    siblings = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    return did_you_mean(
        path.name, [*siblings, *(one.name for one in stage_paths if one.absolute().parent == path.absolute().parent)]
    )


def _check_stage_model(
    command: str, name: str, stage_output: StageOutput, earlier: EarlierOutputs
) -> Iterator[UserError]:
    takes = _ACCEPTED_MODEL_COMMANDS.get(command, TEXT_MODEL_COMMANDS)
    fit = [other.stage for other in earlier.values() if other.command in takes]
    hint = f"name a stage that does: {', '.join(fit)}" if fit else "put one that does before it"
    if stage_output.command == UNKNOWN_COMMAND:
        return
    if not stage_output.has_model:
        yield ConfigError(
            f"model is {name}, of stage {stage_output.stage}: `{stage_output.command}` makes no model", hint
        )
    elif stage_output.command not in takes:
        kind = OTHER_MODEL_COMMANDS.get(stage_output.command, "a model that writes text")
        yield ConfigError(
            f"model is {name}: stage {stage_output.stage} makes {kind}, which `{command}` cannot use", hint
        )
    else:
        inside = next(
            absolute_path(name).relative_to(absolute_path(folder))
            for folder, one in earlier.items()
            if one is stage_output
        )
        if str(inside.parts[0] if inside.parts else "") not in _MODEL_SUBFOLDERS and not str(inside).startswith(
            "checkpoint-"
        ):
            yield ConfigError(
                f"model is {name}: stage {stage_output.stage} writes nothing of that name",
                "name best_model or final_model",
            )


def _check_tokenizer(job: Any, earlier: EarlierOutputs) -> Iterator[UserError]:
    name = getattr(job, "tokenizer", None)
    if not isinstance(name, str) or not name:
        return
    stage_output = find_stage_output(name, earlier)
    if stage_output is None:
        from anabatic.data.tokenizer import hf_folder

        try:
            hf_folder.find_tokenizer_file(name)
        except UserError as error:
            yield error
        return
    if not stage_output.has_model and stage_output.command not in ("tokenizer train", UNKNOWN_COMMAND):
        yield ConfigError(
            f"tokenizer is {name}, of stage {stage_output.stage}: `{stage_output.command}` makes no tokenizer",
            "name a stage of `tokenizer train`, or one that makes a model",
        )
    model = model_facts.model_name(job)
    entries = read_model_sizes(model, earlier)[1] if model else None
    if entries is not None and stage_output.vocab_size is not None and stage_output.vocab_size > entries:
        yield DataError(
            f"the tokenizer of {name} has {stage_output.vocab_size} entries, the model {entries}",
            "use the tokenizer that the model was trained with",
        )


def _check_chat_template(command: str, job: Any, earlier: EarlierOutputs) -> Iterator[UserError]:
    """A model of a stage has the template of our tokenizers, one of a hub is not here yet."""
    name = getattr(job, "tokenizer", None) or model_facts.model_name(job)
    if (
        command not in _CHAT_COMMANDS
        or not name
        or getattr(job, "chat_template", None)
        or find_stage_output(name, earlier)
    ):
        return
    folder = Path(name).expanduser() if getattr(job, "tokenizer", None) else model_facts.find_local_model(name)
    if folder is None or not (folder / "tokenizer_config.json").is_file():
        return  # an adapter may take that of its base
    file = folder / "chat_template.jinja"
    if not file.is_file() and not model_facts.read_json_object(folder / "tokenizer_config.json").get("chat_template"):
        yield DataError(f"{folder} has no chat template", "use a chat model's tokenizer, or train one with ours")


def _check_rewards(job: Any) -> Iterator[UserError]:
    for spec in getattr(job, "rewards", ()):
        name = spec.partition("=")[0]
        file, _, function = name.rpartition(":")
        if file.endswith(".py") and function and not Path(file).expanduser().is_file():
            yield ConfigError(f"{file}: no such file", "name a Python file: FILE.py:FUNCTION")
        elif not (file.endswith(".py") or file == "model" or name in BUILTIN_REWARDS) and not _has_plugin(name):
            plugin_names = plugins.list_plugins("anabatic.rewards")
            known = [*BUILTIN_REWARDS, *plugin_names, "model:FOLDER", "FILE.py:FUNCTION"]
            yield ConfigError(f'there is no reward "{name}".{did_you_mean(name, known)}', f"use {', '.join(known)}")


def _has_plugin(reward: str) -> bool:
    return plugins.find_plugin("anabatic.rewards", reward) is not None


def _check_callbacks_and_sinks(job: Any) -> Iterator[UserError]:
    log = getattr(job, "log", None)
    if not isinstance(log, LogSettings):
        return
    checks = [partial(callbacks.require_callback_source, spec) for spec in log.callbacks]
    packages = [name for name in log.sinks if name in extras.OPTIONAL_PACKAGES]
    checks += [partial(extras.require_installed, name, f"log.sinks {name}") for name in packages]
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield error


def _check_eval_tasks(command: str, job: Any) -> Iterator[UserError]:
    if command != "eval" or not job.tasks:
        return
    from anabatic.evals.tasks import core_suite, registry

    folder = None if job.tasks_from in (None, "hub") else Path(job.tasks_from).expanduser()
    if folder is not None and not folder.is_dir():
        yield ConfigError(f"tasks_from is {folder}, which is no folder", "name the folder of the data sets")
    try:
        # CORE's own tasks lie in its bundle, which may have to be fetched.
        registry.plan_tasks(
            [
                name if limit is None else f"{name}#{limit}"
                for name, limit in registry.split_task_names(job.tasks)
                if name != core_suite.CORE_NAME
            ]
        )
    except UserError as error:
        yield error


def _check_lengths(job: Any, earlier: EarlierOutputs) -> Iterator[UserError]:
    model = model_facts.model_name(job)
    positions = read_model_sizes(model, earlier)[0] if model else None
    if positions is None:
        return
    reply = getattr(job, "max_new_tokens", None) if getattr(job, "tasks", ()) and not job.endpoint else None
    if reply is not None and reply >= positions:
        yield DataError(
            f"a reply of {reply} tokens leaves no room for a question, the context has {positions}",
            "ask for shorter replies with --max-new-tokens",
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
        *_collect_errors(partial(_check_resolved, job, known)),
        *_collect_errors(partial(data_files.require_writable_output, command, job, earlier is None)),
        *_collect_errors(partial(_check_gguf_converter, command, job)),
    ]


def check_named_files(job: Any, earlier: EarlierOutputs) -> list[AnabaticError]:
    """Return what is wrong with what a job names beside its data, wherever it is to run."""
    return [
        *_collect_errors(partial(_require_chat_template, job, earlier)),
        *(
            error
            for spec in list_adapters(job)
            for error in _collect_errors(partial(_check_adapter, job, spec, earlier))
        ),
    ]


def find_missing_model(name: str, hub: str | None = None) -> DataError | None:
    """Return the error for a name that means no model; None: it means one, here or on a hub.

    Checkpoints of a run pass: whoever loads them knows what they may mean.
    """
    root = Path(name).expanduser()
    if paths.is_hub_id(name, hub) or model_facts.find_local_model(name) is not None:
        return None
    if not os.path.lexists(root):
        return paths.make_missing_model_error(name)
    return None if root.name.startswith("checkpoint-") else describe_wrong_model(root)


def _collect_errors(ask: Callable[[], None]) -> list[AnabaticError]:
    try:
        ask()
    except MultipleErrors as several:
        return list(several.errors)
    except AnabaticError as error:
        return [error]
    return []


def _require_chat_template(job: Any, earlier: EarlierOutputs) -> None:
    given = getattr(job, "chat_template", None)
    if given is not None and find_stage_output(given, earlier) is None:
        from anabatic.data.chat import custom_templates

        custom_templates.read_template(given)


def list_adapters(job: Any) -> list[str]:
    """Return the adapters that go into the model of a job: `FOLDER[@WEIGHT]`."""
    return [] if isinstance(job, ServeJob) else getattr(job, "adapter", [])


def is_absent(spec: str) -> bool:
    """Return whether nothing exists under the name of an adapter."""
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
    hub = getattr(job, "hub", None)
    if is_absent(spec) and not paths.is_hub_id(name, hub):
        raise adapter_config.missing_adapter_error(name)
    _require_model(name, hub)
    folder = model_facts.find_local_model(name)
    if folder is not None and is_adapter(name, earlier) is False:
        raise adapter_config.whole_model_error(folder)
    if folder is not None:
        adapter_config.read_adapter_config(folder)


def _require_model(name: str, hub: str | None = None) -> None:
    found = find_missing_model(name, hub)
    if found is not None:
        raise found


def _check_served_models(job: Any, earlier: EarlierOutputs) -> list[AnabaticError]:
    """Return what is wrong with the models of a server, each `NAME=FOLDER` or a folder."""
    if not isinstance(job, ServeJob):
        return []
    folders = [model_facts.split_name_and_folder(one)[1] for one in (*job.model, *job.classifier)]
    folders += [one.partition("=")[2] for one in job.adapter]
    return [
        error
        for one in folders
        if find_stage_output(one, earlier) is None
        for error in _collect_errors(partial(_require_model, one))
    ]


def _check_resolved(job: Any, earlier: EarlierOutputs) -> None:
    """Raise what makes a training impossible with the processes that this command starts."""
    if not isinstance(job, LoopJob):
        return
    name = model_facts.model_name(job)
    stage_output = find_stage_output(name, earlier) if name else None
    facts = None
    if stage_output is not None:
        config = {"max_position_embeddings": stage_output.max_positions} | dict(stage_output.config)
        facts = model_facts.ModelFacts(None, name, config, stage_output.is_adapter, f" by stage {stage_output.stage}")
    resolve(job, Machine(None, job.device.nproc, is_planned=False), facts)


def _check_gguf_converter(command: str, job: Any) -> None:
    if command == "export" and job.gguf != "none":
        gguf_converter.find_converter(job.llama_cpp)
