"""Figures of an evaluation: as JSON, as Markdown, and as the table that is printed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anabatic.config.task import TEXT_METRICS, TaskGroup
from anabatic.core.text import duration
from anabatic.evals.ask import Result
from anabatic.evals.records import Record
from anabatic.evals.statistics import Figure, mean_of

_METHODS = {
    "wilson": "Wilson score interval, 95 %",
    "bootstrap": "percentile bootstrap over items, 1,000 resamples, 95 %",
    "normal": "independent tasks, normal approximation, 95 %",
}
_TEMPLATE = (
    "prompt", "choices", "contexts", "continuation", "answer", "between", "description", "shots_draw", "chat",
    "keep", "system", "shots_between", "shots_same", "stop", "extract", "pattern", "check", "program",
    "tests", "helpers",
)  # fmt: skip


@dataclass(frozen=True)
class Total:
    """One figure for a group of tasks."""

    group: TaskGroup
    figure: Figure


def totals(groups: Sequence[TaskGroup], results: Sequence[Result]) -> list[Total]:
    """Return the figures of groups that have one: the mean of what counts, or of how far it is from chance."""
    by_name = {result.task.name: result for result in results}
    found = []
    for group in groups:
        if group.aggregate == "none":
            continue
        mine = [by_name[name] for name in dict.fromkeys(group.tasks)]
        if group.aggregate == "centred":
            wide = [(1 / (1 - one.chance), one) for one in mine]
            figure = mean_of([(one.figure._replace(value=one.centred), factor) for factor, one in wide])
        else:
            figure = mean_of([(one.figure, 1.0) for one in mine])
        found.append(Total(group, figure))
    return found


def as_json(results: Sequence[Result], sums: Sequence[Total], show: int) -> dict[str, Any]:
    """Return the `tasks` and `groups` of eval.json."""
    made: dict[str, Any] = {"tasks": {one.task.name: _task_json(one, show) for one in results}}
    if sums:
        made["groups"] = {
            one.group.name: {"tasks": one.group.tasks, "aggregate": one.group.aggregate, **_figure_json(one.figure)}
            for one in sums
        }
    return made


def _task_json(result: Result, show: int) -> dict[str, Any]:
    task = result.task
    made: dict[str, Any] = {"kind": task.kind, "metric": task.counts}
    if task.counts not in TEXT_METRICS:
        made |= {"accuracy": result.figure.value, "chance": result.chance, "centred": result.centred}
    made |= {"n": len(result.records), "shots": result.shots}
    made["metrics"] = {name: _figure_json(figure) for name, figure in result.figures.items()}
    made["template"] = template_of(result)
    made |= {"cut": result.cut, "empty": result.empty, "known": result.known, "seconds": round(result.seconds, 3)}
    if result.groups:
        made["by_group"] = result.groups
    if task.kind == "generate":
        made["examples"] = [_example(record) for record in result.records[:show]]
    return made


def template_of(result: Result) -> dict[str, Any]:
    """Return what of a task decides how it is asked."""
    task = result.task
    if task.kind != "generate":
        return {
            name: value
            for name in _TEMPLATE[: _TEMPLATE.index("stop")]
            if (value := getattr(task, name)) not in ("", None, [], False)
        }
    return {name: value for name in _TEMPLATE if (value := getattr(task, name)) not in ("", None, [], False)}


def _figure_json(figure: Figure) -> dict[str, Any]:
    return {"value": figure.value, "low": figure.low, "high": figure.high, "interval": _METHODS[figure.method]}


def _example(record: Record) -> dict[str, Any]:
    return {**{key: record[key] for key in ("prompt", "reply", "answer")}, "correct": record["right"]["exact"]}


def _number(metric: str, value: float) -> str:
    if value != value or math.isinf(value):
        return "-"
    return f"{value:.1%}" if metric not in TEXT_METRICS else f"{value:.4g}"


def _rows(results: Sequence[Result], sums: Sequence[Total]) -> list[list[str]]:
    rows = [["task", "metric", "value", "95 %", "chance", "items", "shots"]]
    for one in results:
        metric, figure = one.task.counts, one.figure
        chance = _number(metric, one.chance) if metric not in TEXT_METRICS else "-"
        interval = f"{_number(metric, figure.low)} to {_number(metric, figure.high)}"
        rows.append(
            [one.task.name, metric, _number(metric, figure.value), interval, chance, f"{len(one.records):,}"]
            + [str(one.shots)]
        )
    for total in sums:
        figure = total.figure
        interval = f"{figure.low:.4f} to {figure.high:.4f}"
        named = f"{total.group.name} ({len(total.group.tasks)})"
        rows.append([named, total.group.aggregate, f"{figure.value:.4f}", interval, "-", "", ""])
    return rows


def table(results: Sequence[Result], sums: Sequence[Total], show: int) -> str:
    """Return what is printed: a row for each task and group, then replies."""
    rows = _rows(results, sums)
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        padded = zip(row, widths, range(len(row)), strict=True)
        cells = [cell.ljust(width) if at < 2 else cell.rjust(width) for cell, width, at in padded]
        lines.append("  ".join(cells).rstrip())
    for one in results:
        if one.task.kind == "generate":
            lines += [_spoken(one.task.name, record) for record in one.records[:show]]
    return "\n".join(lines) + "\n"


def _spoken(name: str, record: Record) -> str:
    why = f"the answer is {_short(record['answer'], 60)}" if record["answer"] else _short(record.get("note", ""), 60)
    mark = "right" if record["right"]["exact"] else f"wrong, {why}"
    return f"{name}: {_short(record['prompt'], 160)} -> {_short(record['reply'], 160)} ({mark})"


def _short(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def markdown(title: str, about: Sequence[str], results: Sequence[Result], sums: Sequence[Total]) -> str:
    """Return a page: the table, what was asked, and how sure the figures are."""
    rows = _rows(results, sums)
    lines = [f"# {title}", "", *about, ""]
    lines += [_line(rows[0]), _line(["---"] * 2 + ["--:"] * 5), *map(_line, rows[1:])]
    used = dict.fromkeys([one.figure.method for one in results] + [total.figure.method for total in sums])
    lines += ["", "Intervals: " + "; ".join(f"{name}: {_METHODS[name]}" for name in used) + ".", ""]
    for one in results:
        lines += _section(one)
    return "\n".join(lines).rstrip() + "\n"


def _section(result: Result) -> list[str]:
    task = result.task
    said = [f"{len(result.records):,} items", f"{result.shots} examples before each", duration(result.seconds)]
    said += [f"{result.cut:,} cut on the left"] if result.cut else []
    said += [f"{result.empty:,} replies empty"] if result.empty else []
    said += [f"{result.known:,} answers known from before"] if result.known else []
    others = [f"{name} {_number(name, figure.value)}" for name, figure in result.figures.items()]
    lines = [
        f"## {task.name}",
        "",
        *([task.about, ""] if task.about else []),
        f"{', '.join(said)}. {', '.join(others)}.",
    ]
    lines += ["", "```yaml"] + [f"{name}: {value!r}" for name, value in template_of(result).items()] + ["```", ""]
    if result.groups:
        lines += [_line(["part", task.counts, "items"]), _line(["---", "--:", "--:"])]
        for name, one in result.groups.items():
            lines.append(_line([name, _number(task.counts, one[task.counts]), f"{one['n']:,}"]))
        lines.append("")
    return lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
