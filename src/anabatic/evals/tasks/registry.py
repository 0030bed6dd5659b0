"""Tasks by name, by file, and in groups."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from anabatic.config.loading import settings, validation, yaml_reader
from anabatic.config.task import TEXT_METRICS, EvalTask, TaskData, TaskGroup
from anabatic.core import plugins
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean
from anabatic.data.builtin import synthetic_tasks as generators
from anabatic.evals.tasks import core_suite

_LIMITED_NAME = re.compile(r"(.*)#([1-9]\d*)")


@dataclass(frozen=True)
class PlannedTask:
    """A task to be asked.

    Attributes:
        task: it.
        task_folder: where its file lies; None: it came with us.
        limit: items at most; None: all, or what the command says.
    """

    task: EvalTask
    task_folder: Path | None = None
    limit: int | None = None


@dataclass(frozen=True)
class EvalPlan:
    """Requested evaluation: tasks in order, each once, and groups with the names of their tasks."""

    tasks: list[PlannedTask]
    groups: list[TaskGroup]


@functools.cache
def list_shipped_tasks() -> dict[str, Any]:
    """Return the YAML files that come with us, by name, unread."""
    folder = resources.files("anabatic.evals") / "known_tasks"
    return {item.name.removesuffix(".yaml"): item for item in folder.iterdir() if item.name.endswith(".yaml")}


def split_task_names(specs: Sequence[str]) -> Iterator[tuple[str, int | None]]:
    """Yield `(name, limit)` of `a,b#200 file.yaml`.

    Raises:
        ConfigError: what stands behind `#` is no number.
    """
    for spec in specs:
        for word in filter(None, (part.strip() for part in spec.split(","))):
            name, mark, _ = word.partition("#")
            found = _LIMITED_NAME.fullmatch(word)
            if mark and found is None:
                raise ConfigError(f'tasks: "{word}": the part after # is not a number', "write NAME#200")
            yield name, int(found[2]) if found else None


def plan_tasks(specs: Sequence[str], folder: Path | None = None) -> EvalPlan:
    """Return the tasks that names, files and groups stand for.

    Args:
        folder: of the user's data sets, where the CORE bundle may lie.

    Raises:
        ConfigError: there is no task of a name, or a file is broken.
    """
    tasks: dict[str, PlannedTask] = {}
    groups: dict[str, TaskGroup] = {}
    for name, limit in split_task_names(specs):
        if name == core_suite.CORE_NAME:
            bundle = core_suite.find_bundle(folder)
            groups[name], inner = core_suite.load_tasks(bundle)
            tasks |= {one.name: PlannedTask(one, bundle, limit) for one in inner}
        else:
            _add_task(name, None, limit, tasks, groups, ())
    for group in groups.values():
        _require_same_metric(group, [tasks[one].task for one in group.tasks])
    return EvalPlan(list(tasks.values()), list(groups.values()))


def _require_same_metric(group: TaskGroup, inner: Sequence[EvalTask]) -> None:
    """A figure for all is one of shares, or of one and the same measure."""
    counts = sorted({one.main_metric for one in inner})
    texts = [metric for metric in counts if metric in TEXT_METRICS]
    if group.aggregate == "centred" and texts:
        raise ConfigError(
            f"the group {group.name} is centred, and holds tasks that measure {texts[0]}: that has no baseline",
            "write aggregate: none",
        )
    if group.aggregate == "mean" and texts and len(counts) > 1:
        raise ConfigError(
            f"the group {group.name} is a mean of {', '.join(counts)}, which is no figure", "write aggregate: none"
        )


def _add_task(
    name: str,
    beside: Path | None,
    limit: int | None,
    tasks: dict[str, PlannedTask],
    groups: dict[str, TaskGroup],
    above: tuple[str, ...],
) -> list[str]:
    """Add a task, or those of a group; return the names of the tasks."""
    if name in above:
        raise ConfigError(f"the group {name} holds itself: {' > '.join((*above, name))}", "take it out")
    if name == core_suite.CORE_NAME:
        raise ConfigError(
            f"the group {above[-1]} holds {name}, which has its own figure", f"ask both: --tasks {above[0]},{name}"
        )
    found, folder = read_task(name, beside)
    if isinstance(found, EvalTask):
        other = tasks.get(found.name)
        if other is not None and other.task != found:
            raise ConfigError(f"two different tasks are called {found.name}", "give one of them another `name`")
        if other is None or limit is not None:
            tasks[found.name] = PlannedTask(found, folder, limit)
        return [found.name]
    names: list[str] = []
    for inner in found.tasks:
        names += _add_task(inner, folder, limit, tasks, groups, (*above, name))
    groups[found.name] = TaskGroup(name=found.name, about=found.about, tasks=names, aggregate=found.aggregate)
    return names


def read_task(name: str, beside: Path | None = None) -> tuple[EvalTask | TaskGroup, Path | None]:
    """Return a task or a group, and the folder of its file.

    Raises:
        ConfigError: there is none of this name, or its file is broken.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        path = path if beside is None or path.is_absolute() else beside / path
        return _parse_task(yaml_reader.read_yaml(path), path.stem), path.parent
    if name.startswith("task:"):
        return _make_generated_task(name.removeprefix("task:")), None
    if name in list_shipped_tasks():
        return _parse_task(
            yaml_reader.parse_yaml(list_shipped_tasks()[name].read_text(encoding="utf-8"), f"{name}.yaml"), name
        ), None
    if (file := _find_plugin_task(name)) is not None:
        return _parse_task(yaml_reader.read_yaml(file), name), file.parent
    known = sorted([*list_shipped_tasks(), core_suite.CORE_NAME, *plugins.list_plugins("anabatic.tasks")])
    raise ConfigError(
        f'there is no task "{name}".{did_you_mean(name, known)}',
        f"give a file NAME.yaml, task:NAME for a generated one, or one of: {', '.join(known)}",
    )


def _find_plugin_task(name: str) -> Path | None:
    """Return the file of a plug-in of the group `anabatic.tasks`: a path, or a function that returns one.

    Raises:
        ConfigError: the plug-in cannot be imported, or has no path.
    """
    found = plugins.load_plugin("anabatic.tasks", name)
    if found is None:
        return None
    try:
        return Path(os.fspath(found() if callable(found) else found))
    except Exception as error:  # a third party's function may raise anything
        raise ConfigError(
            f'the plug-in task "{name}" gives no path of a YAML file: {type(error).__name__}: {error}',
            "update or uninstall its package",
        ) from error


def _make_generated_task(name: str) -> EvalTask | TaskGroup:
    """A task of `data.synthetic_tasks`, asked in conversations; `all` stands for each."""
    if name == "all":
        return TaskGroup(name="task:all", tasks=[f"task:{one}" for one in generators.TASKS], aggregate="none")
    return EvalTask(
        name=generators.get_tasks(name)[0].name,
        kind="generate",
        data=TaskData(task=name),
        prompt="{{ question }}",
        answer="{{ answer }}",
        check="generated",
        chat=True,
    )


def _parse_task(source: yaml_reader.YamlSource, name: str) -> EvalTask | TaskGroup:
    cls: type = TaskGroup if "tasks" in source.tree else EvalTask
    where = validation.SettingNamer(source.format_location)
    values = validation.check_section(source.tree, cls, where)
    try:
        made: EvalTask | TaskGroup = settings.make_settings(cls, {"name": name, **values})
        return made
    except ConfigError as error:
        raise ConfigError(f"{source.origin}: {error}", error.hint) from error
