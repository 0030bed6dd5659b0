"""The plan of a pipeline: every stage resolved and checked before the first one runs."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic import __version__
from anabatic.config.loading import command_table, validation
from anabatic.config.loading import settings as settings_module
from anabatic.config.loading.command_package import Command
from anabatic.config.pipeline import PipelineJob, PipelineStage
from anabatic.core import json_reader
from anabatic.core.errors import ConfigError, UserError
from anabatic.core.formatting import did_you_mean
from anabatic.plan import job_rules
from anabatic.recipes.prechecks import data_files

_STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_SUFFIX = re.compile(r"(#[0-9_]+)?(@[0-9.eE+-]+)?$")
_REFERENCE = re.compile(r"\$(\$|\{([^{}]*)\})")


@dataclass(frozen=True)
class StagePlan:
    """One stage, ready to run."""

    name: str
    command: Command
    folder: Path
    """`<out>/<stage>`."""
    output: Path
    """Where the command writes: its `out`, else `folder`; this is what `${stage}` stands for."""
    job: Any
    """Its settings; None where they are wrong."""
    depends_on: tuple[str, ...]
    """Stages it refers to."""
    key_inputs: dict[str, Any]
    """What its result depends on: settings, version, keys of the stages it needs."""
    cache_key: str


@dataclass(frozen=True)
class StageState:
    """What an earlier run left in a stage's folder."""

    rerun_reason: str
    """Why the stage must run; empty when it is done and unchanged."""
    is_resumable: bool = False
    """The same job was interrupted here."""
    seconds: float = 0.0

    @property
    def is_done(self) -> bool:
        """Done and unchanged."""
        return not self.rerun_reason


def plan_stages(job: PipelineJob, given: dict[str, str]) -> list[StagePlan]:
    """Resolve `${...}` and check every stage.

    Args:
        job: the recipe.
        given: entries of `vars` from the command line.

    Raises:
        ConfigError: an unknown command, name or setting; a reference to a later stage; a variable left empty.
    """
    plans, problems = plan_stages_with_problems(job, given)
    job_rules.raise_problems(problems.values())
    return plans


def plan_stages_with_problems(job: PipelineJob, given: dict[str, str]) -> tuple[list[StagePlan], dict[str, UserError]]:
    """Plan every stage, and continue after one whose settings are wrong: it has no job then, and its error is returned.

    Raises:
        ConfigError: the variables are wrong, and with them all stages.
    """
    values = _resolve_variables(job, given)
    plans: dict[str, StagePlan] = {}
    problems: dict[str, UserError] = {}
    for name, stage in job.stages.items():
        try:
            plans[name] = _plan_stage(name, stage, job, values, plans)
        except UserError as error:
            problems[name] = error
            folder = Path(job.out) / name
            command = command_table.COMMANDS.get(stage.command, command_table.COMMANDS.find_row("run"))
            plans[name] = StagePlan(name, command, folder, folder, None, (), {}, "")
    return list(plans.values()), problems


def _digest_data_files(settings: Any, needs: Sequence[StagePlan]) -> dict[str, str]:
    """Return one digest per source over the names, sizes and times of a stage's data files.

    Files of the stages that it needs are left out: their keys say what they are, also before they are written.
    """
    made = [data_files.absolute_path(str(stage.output)) for stage in needs]
    specs = data_files.list_sources(settings)
    return {
        spec: _digest_source(spec)
        for spec in specs
        if not any(data_files.absolute_path(spec).is_relative_to(folder) for folder in made)
    }


def _digest_source(spec: str) -> str:
    name = os.path.expanduser(spec if os.path.exists(os.path.expanduser(spec)) else _SUFFIX.sub("", spec))
    if name.startswith("stdlib:"):
        return platform.python_version()
    if os.path.isdir(name):
        found = sorted(os.path.join(base, file) for base, _, files in os.walk(name) for file in files)
    else:
        found = sorted(glob.glob(name, recursive=True))
    stats = [(path, os.stat(path)) for path in found if os.path.isfile(path)]
    listed = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16] if listed else ""


def _resolve_variables(job: PipelineJob, given: dict[str, str]) -> dict[str, str]:
    for name in given:
        if name not in job.vars:
            known = ", ".join(job.vars) or "none"
            raise ConfigError(f'no variable "{name}".{did_you_mean(name, job.vars)}', f"vars of this recipe: {known}")
    for name in job.vars:
        if name in job.stages:
            raise ConfigError(f'"{name}" is both a variable and a stage', "rename one of them")
    return {**job.vars, **given}


def _plan_stage(
    name: str, stage: PipelineStage, job: PipelineJob, values: dict[str, str], earlier: dict[str, StagePlan]
) -> StagePlan:
    if not _STAGE_NAME.fullmatch(name):
        raise ConfigError(f'stage name "{name}" cannot be a folder', "use letters, digits, - and _")
    runnable = [known for known in command_table.COMMANDS if known != "run"]
    if stage.command not in runnable:
        guess = did_you_mean(stage.command, runnable)
        hint = f"commands: {', '.join(runnable)}"
        raise ConfigError(f'stages.{name}.command: no command "{stage.command}".{guess}', hint)
    command = command_table.COMMANDS.find_row(stage.command)
    folder = Path(job.out) / name
    resolver = _ReferenceResolver(name, list(job.stages), values, earlier)
    tree = resolver.resolve_references(stage.job, f"stages.{name}.job")
    has_out = "out" in validation.field_types(command.import_job_class())
    if has_out and tree.get("out") is None:
        tree["out"] = str(folder)
    settings = settings_module.build_job(stage.command, tree, f"stages.{name}.job")
    needs = tuple(sorted(resolver.used_stages))
    parts = {
        "command": stage.command,
        "version": __version__,
        "job": settings_module.job_to_dict(settings),
        "files": _digest_data_files(settings, [earlier[need] for need in needs]),
        "needs": {need: earlier[need].cache_key for need in needs},
    }
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    output = Path(tree["out"]) if has_out else folder
    return StagePlan(name, command, folder, output, settings, needs, parts, key)


class _ReferenceResolver:
    """Replaces `${...}` inside the settings of one stage; `$$` is a plain dollar sign."""

    def __init__(self, stage: str, stages: list[str], values: dict[str, str], earlier: dict[str, StagePlan]) -> None:
        self.stage = stage
        self.stages = stages
        self.values = values
        self.earlier = earlier
        self.used_stages: set[str] = set()

    def resolve_references(self, value: Any, where: str) -> Any:
        """Return `value` with every reference replaced, inside lists and sections too."""
        if isinstance(value, dict):
            return {key: self.resolve_references(item, f"{where}.{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [self.resolve_references(item, f"{where}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, str) and "$" in value:
            return self.resolve_text(value, where)
        return value

    def resolve_text(self, value: str, where: str) -> validation.UntypedText:
        """Replace the references of one text; its type is then the one the setting wants."""

        def replace_match(match: re.Match[str]) -> str:
            return "$" if match[1] == "$" else self.lookup_name(match[2], where)

        result = _REFERENCE.sub(replace_match, value)
        if "${" in _REFERENCE.sub("", value):
            raise ConfigError(f'{where} is "{value}": `${{` without `}}`', "write ${name}; $$ is a dollar sign")
        return validation.UntypedText(result)

    def lookup_name(self, name: str, where: str) -> str:
        """Return what `${name}` stands for."""
        if name in self.earlier:
            self.used_stages.add(name)
            return str(self.earlier[name].output)
        if name == self.stage:
            raise ConfigError(f"{where} refers to its own stage, ${{{name}}}", "refer to an earlier stage")
        if name in self.stages:
            raise ConfigError(
                f"{where} refers to ${{{name}}}, a stage that runs later",
                f"move {name} above {self.stage}; stages run in the order of the file",
            )
        if name not in self.values:
            known = [*self.earlier, *self.values]
            hint = f"known here: {', '.join(known)}" if known else "no stage comes before, and vars is empty"
            raise ConfigError(f"{where}: nothing is called ${{{name}}}.{did_you_mean(name, known)}", hint)
        if not self.values[name]:
            raise ConfigError(f"vars.{name} is empty, and {where} needs it", f"give --set {name}=VALUE")
        return self.values[name]


_STATE_REASONS = {
    "done": "",
    "started": "not finished, continues",
    "again": "to be made again",
}


def read_stage_state(stage: StagePlan) -> dict[str, Any] | None:
    """Return the stage.json of an earlier run; None where there is none that can be read."""
    try:
        left = json_reader.read_json_file(stage.folder / "stage.json")
        is_valid = isinstance(left["parts"], dict) and isinstance(left["key"], str) and float(left["seconds"]) >= 0
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return left if is_valid and str(left.get("state")) in _STATE_REASONS else None


def compare_stage_state(stage: StagePlan) -> StageState:
    """Compare a stage with what an earlier run left in its folder."""
    left = read_stage_state(stage)
    if left is None:
        has_state = (stage.folder / "stage.json").is_file()
        return StageState("its stage.json is broken" if has_state else "not done yet")
    word, seconds = left["state"], float(left["seconds"])
    if left["key"] != stage.cache_key:
        return StageState(f"changed: {', '.join(_changed_keys(left['parts'], stage.key_inputs)) or 'key'}")
    lost = [file for file in stage.command.output_files if not (stage.output / file).is_file()]
    if word == "done" and lost:
        return StageState(f"{lost[0]} is missing", is_resumable=any(stage.output.glob("checkpoint-*")), seconds=seconds)
    return StageState(_STATE_REASONS[word], is_resumable=word == "started", seconds=seconds)


def _changed_keys(old: Any, new: dict[str, Any], limit: int = 6) -> list[str]:
    before = settings_module.flatten_settings(old if isinstance(old, dict) else {})
    after = settings_module.flatten_settings(new)
    keys = [key for key in {**before, **after} if before.get(key, ...) != after.get(key, ...)]
    names = [key.removeprefix("job.").replace("needs.", "stage ") for key in keys]
    return names if len(names) <= limit else [*names[:limit], f"{len(names) - limit} more"]
