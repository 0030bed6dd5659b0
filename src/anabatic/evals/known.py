"""Tasks by name, by file, and in groups."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from anabatic.config import check, load, yaml_file
from anabatic.config.task import TEXT_METRICS, EvalTask, TaskData, TaskGroup
from anabatic.core.errors import ConfigError
from anabatic.core.text import did_you_mean
from anabatic.data import tasks as generators
from anabatic.evals import core

_LIMIT = re.compile(r"(.*)#([1-9]\d*)")


@dataclass(frozen=True)
class Planned:
    """A task to be asked.

    Attributes:
        task: it.
        beside: where its file lies; None: it came with us.
        limit: items at most; None: all, or what the command says.
    """

    task: EvalTask
    beside: Path | None = None
    limit: int | None = None


@dataclass(frozen=True)
class Plan:
    """What was asked for: tasks in order, each once, and groups with the names of their tasks."""

    tasks: list[Planned]
    groups: list[TaskGroup]


@functools.cache
def shipped() -> dict[str, Any]:
    """Return the YAML files that come with us, by name, unread."""
    folder = resources.files("anabatic.evals") / "known_tasks"
    return {item.name.removesuffix(".yaml"): item for item in folder.iterdir() if item.name.endswith(".yaml")}


def split(specs: Sequence[str]) -> Iterator[tuple[str, int | None]]:
    """Yield `(name, limit)` of `a,b#200 file.yaml`.

    Raises:
        ConfigError: what stands behind `#` is no number.
    """
    for spec in specs:
        for word in filter(None, (part.strip() for part in spec.split(","))):
            name, mark, _ = word.partition("#")
            found = _LIMIT.fullmatch(word)
            if mark and found is None:
                raise ConfigError(f'tasks: "{word}": what stands behind # is not a number', "write NAME#200")
            yield name, int(found[2]) if found else None


def plan(specs: Sequence[str], folder: Path | None = None) -> Plan:
    """Return the tasks that names, files and groups stand for.

    Args:
        folder: of the user's data sets, where the CORE bundle may lie.

    Raises:
        ConfigError: there is no task of a name, or a file is broken.
    """
    tasks: dict[str, Planned] = {}
    groups: dict[str, TaskGroup] = {}
    for name, limit in split(specs):
        if name == core.NAME:
            bundle = core.find(folder)
            groups[name], inner = core.tasks(bundle)
            tasks |= {one.name: Planned(one, bundle, limit) for one in inner}
        else:
            _add(name, None, limit, tasks, groups, ())
    for group in groups.values():
        _require_alike(group, [tasks[one].task for one in group.tasks])
    return Plan(list(tasks.values()), list(groups.values()))


def _require_alike(group: TaskGroup, inner: Sequence[EvalTask]) -> None:
    """A figure for all is one of shares, or of one and the same measure."""
    counts = sorted({one.counts for one in inner})
    texts = [metric for metric in counts if metric in TEXT_METRICS]
    if group.aggregate == "centred" and texts:
        raise ConfigError(
            f"the group {group.name} is centred, and holds tasks that measure {texts[0]}: that has no chance",
            "write aggregate: none",
        )
    if group.aggregate == "mean" and texts and len(counts) > 1:
        raise ConfigError(
            f"the group {group.name} is a mean of {', '.join(counts)}, which is no figure", "write aggregate: none"
        )


def _add(
    name: str, beside: Path | None, limit: int | None, tasks: dict[str, Planned], groups: dict[str, TaskGroup],
    above: tuple[str, ...],
) -> list[str]:  # fmt: skip
    """Add a task, or those of a group; return the names of the tasks."""
    if name in above:
        raise ConfigError(f"the group {name} holds itself: {' > '.join((*above, name))}", "take it out")
    if name == core.NAME:
        raise ConfigError(
            f"the group {above[-1]} holds {name}, which has a figure of its own", f"ask both: --tasks {above[0]},{name}"
        )
    found, folder = read(name, beside)
    if isinstance(found, EvalTask):
        other = tasks.get(found.name)
        if other is not None and other.task != found:
            raise ConfigError(f"two different tasks are called {found.name}", "give one of them another `name`")
        if other is None or limit is not None:
            tasks[found.name] = Planned(found, folder, limit)
        return [found.name]
    names: list[str] = []
    for inner in found.tasks:
        names += _add(inner, folder, limit, tasks, groups, (*above, name))
    groups[found.name] = TaskGroup(name=found.name, about=found.about, tasks=names, aggregate=found.aggregate)
    return names


def read(name: str, beside: Path | None = None) -> tuple[EvalTask | TaskGroup, Path | None]:
    """Return a task or a group, and the folder of its file.

    Raises:
        ConfigError: there is none of this name, or its file is broken.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        path = path if beside is None or path.is_absolute() else beside / path
        return _made(yaml_file.read(path), path.stem), path.parent
    if name.startswith("task:"):
        return _generated(name.removeprefix("task:")), None
    if name in shipped():
        return _made(yaml_file.parse(shipped()[name].read_text(encoding="utf-8"), f"{name}.yaml"), name), None
    known = sorted([*shipped(), core.NAME])
    raise ConfigError(
        f'there is no task "{name}".{did_you_mean(name, known)}',
        f"give a file NAME.yaml, task:NAME for a generated one, or one of: {', '.join(known)}",
    )


def _generated(name: str) -> EvalTask | TaskGroup:
    """A task of `data.tasks`, asked in conversations; `all` stands for each."""
    if name == "all":
        return TaskGroup(name="task:all", tasks=[f"task:{one}" for one in generators.TASKS], aggregate="none")
    return EvalTask(
        name=generators.find(name)[0].name, kind="generate", data=TaskData(task=name), prompt="{{ question }}",
        answer="{{ answer }}", check="generated", chat=True,
    )  # fmt: skip


def _made(source: yaml_file.Source, name: str) -> EvalTask | TaskGroup:
    cls: type = TaskGroup if "tasks" in source.tree else EvalTask
    where = check.Where(source.where)
    values = check.section(source.tree, cls, where)
    try:
        made: EvalTask | TaskGroup = load.make(cls, {"name": name, **values})
        return made
    except ConfigError as error:
        raise ConfigError(f"{source.origin}: {error}", error.hint) from error
