"""Figures of an evaluation: as JSON, as Markdown, and as the table that is printed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anabatic.config.task import TEXT_METRICS, TaskGroup
from anabatic.core.formatting import align_columns, format_duration, format_markdown_row
from anabatic.evals.confidence_intervals import Estimate, mean_estimate
from anabatic.evals.item_records import ItemRecord, list_judged
from anabatic.evals.task_runner import TaskResult

_INTERVAL_METHODS = {
    "wilson": "Wilson score interval, 95 %",
    "bootstrap": "percentile bootstrap over items, 1,000 resamples, 95 %",
    "normal": "independent tasks, normal approximation, 95 %",
}
_TEMPLATE_FIELDS = (
    "prompt", "choices", "contexts", "continuation", "answer", "between", "description", "shots_draw", "chat",
    "keep", "system", "shots_between", "shots_same", "stop", "extract", "pattern", "check", "program",
    "tests", "helpers",
)  # fmt: skip


@dataclass(frozen=True)
class GroupTotal:
    """One figure for a group of tasks."""

    group: TaskGroup
    estimate: Estimate


def compute_totals(groups: Sequence[TaskGroup], results: Sequence[TaskResult]) -> list[GroupTotal]:
    """Return the figures of groups that have one: the mean of what counts, or of how far it is from the baseline."""
    by_name = {result.task.name: result for result in results}
    found = []
    for group in groups:
        if group.aggregate == "none":
            continue
        mine = [by_name[name] for name in dict.fromkeys(group.tasks)]
        if group.aggregate == "centred":
            wide = [(1 / (1 - one.chance), one) for one in mine]
            figure = mean_estimate(
                [(one.main_estimate._replace(value=one.centred_score), factor) for factor, one in wide]
            )
        else:
            figure = mean_estimate([(one.main_estimate, 1.0) for one in mine])
        found.append(GroupTotal(group, figure))
    return found


def as_json(results: Sequence[TaskResult], sums: Sequence[GroupTotal], show: int) -> dict[str, Any]:
    """Return the `tasks` and `groups` of eval.json."""
    made: dict[str, Any] = {"tasks": {one.task.name: _task_json(one, show) for one in results}}
    if sums:
        made["groups"] = {
            one.group.name: {"tasks": one.group.tasks, "aggregate": one.group.aggregate, **_estimate_json(one.estimate)}
            for one in sums
        }
    return made


def _task_json(result: TaskResult, show: int) -> dict[str, Any]:
    task = result.task
    made: dict[str, Any] = {"kind": task.kind, "metric": task.main_metric}
    if task.main_metric not in TEXT_METRICS:
        made |= {"accuracy": result.main_estimate.value, "chance": result.chance, "centred": result.centred_score}
    judged = len(list_judged(result.records))
    made |= {"n": judged, "shots": result.shots}
    if judged < len(result.records):
        made["unjudged"] = len(result.records) - judged
    made["metrics"] = {name: _estimate_json(figure) for name, figure in result.estimates.items()}
    made["template"] = template_settings(result)
    made |= {
        "cut": result.num_truncated,
        "empty": result.num_empty,
        "known": result.num_cached,
        "seconds": round(result.seconds, 3),
    }
    if result.groups:
        made["by_group"] = result.groups
    if task.kind == "generate":
        made["examples"] = [_example_json(record) for record in result.records[:show]]
    return made


def template_settings(result: TaskResult) -> dict[str, Any]:
    """Return what of a task decides how it is asked."""
    task = result.task
    if task.kind != "generate":
        return {
            name: value
            for name in _TEMPLATE_FIELDS[: _TEMPLATE_FIELDS.index("stop")]
            if (value := getattr(task, name)) not in ("", None, [], False)
        }
    return {name: value for name in _TEMPLATE_FIELDS if (value := getattr(task, name)) not in ("", None, [], False)}


def _estimate_json(figure: Estimate) -> dict[str, Any]:
    return {"value": figure.value, "low": figure.low, "high": figure.high, "interval": _INTERVAL_METHODS[figure.method]}


def _example_json(record: ItemRecord) -> dict[str, Any]:
    return {**{key: record[key] for key in ("prompt", "reply", "answer")}, "correct": record["right"]["exact"]}


def _format_number(metric: str, value: float) -> str:
    if value != value or math.isinf(value):
        return "-"
    return f"{value:.1%}" if metric not in TEXT_METRICS else f"{value:.4g}"


def _build_rows(results: Sequence[TaskResult], sums: Sequence[GroupTotal]) -> list[list[str]]:
    rows = [["task", "metric", "value", "95 %", "baseline", "items", "shots"]]
    for one in results:
        metric, figure = one.task.main_metric, one.main_estimate
        chance = _format_number(metric, one.chance) if metric not in TEXT_METRICS else "-"
        interval = f"{_format_number(metric, figure.low)} to {_format_number(metric, figure.high)}"
        rows.append(
            [
                one.task.name,
                metric,
                _format_number(metric, figure.value),
                interval,
                chance,
                f"{len(list_judged(one.records)):,}",
            ]
            + [str(one.shots)]
        )
    for total in sums:
        figure = total.estimate
        interval = f"{figure.low:.4f} to {figure.high:.4f}"
        named = f"{total.group.name} ({len(total.group.tasks)})"
        rows.append([named, total.group.aggregate, f"{figure.value:.4f}", interval, "-", "", ""])
    return rows


def format_table(results: Sequence[TaskResult], sums: Sequence[GroupTotal], show: int) -> str:
    """Return what is printed: a row for each task and group, then replies."""
    lines = align_columns(_build_rows(results, sums), range(2, 7))
    for one in results:
        if one.task.kind == "generate":
            lines += [_format_reply(one.task.name, record) for record in one.records[:show]]
    return "\n".join(lines) + "\n"


def _format_reply(name: str, record: ItemRecord) -> str:
    why = (
        f"the answer is {_shorten_text(record['answer'], 60)}"
        if record["answer"]
        else _shorten_text(record.get("note", ""), 60)
    )
    mark = "right" if record["right"]["exact"] else f"wrong, {why}"
    return f"{name}: {_shorten_text(record['prompt'], 160)} -> {_shorten_text(record['reply'], 160)} ({mark})"


def _shorten_text(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def format_markdown(title: str, about: Sequence[str], results: Sequence[TaskResult], sums: Sequence[GroupTotal]) -> str:
    """Return a page: the table, what was asked, and how sure the figures are."""
    rows = _build_rows(results, sums)
    lines = [f"# {title}", "", *about, ""]
    lines += [
        format_markdown_row(rows[0]),
        format_markdown_row(["---"] * 2 + ["--:"] * 5),
        *map(format_markdown_row, rows[1:]),
    ]
    used = dict.fromkeys([one.main_estimate.method for one in results] + [total.estimate.method for total in sums])
    lines += ["", "Intervals: " + "; ".join(f"{name}: {_INTERVAL_METHODS[name]}" for name in used) + ".", ""]
    for one in results:
        lines += _format_section(one)
    return "\n".join(lines).rstrip() + "\n"


def _format_section(result: TaskResult) -> list[str]:
    task = result.task
    said = [f"{len(result.records):,} items", f"{result.shots} examples before each", format_duration(result.seconds)]
    said += [f"{result.num_truncated:,} cut on the left"] if result.num_truncated else []
    said += [f"{result.num_empty:,} replies empty"] if result.num_empty else []
    said += [f"{result.num_cached:,} answers known from before"] if result.num_cached else []
    others = [f"{name} {_format_number(name, figure.value)}" for name, figure in result.estimates.items()]
    lines = [
        f"## {task.name}",
        "",
        *([task.about, ""] if task.about else []),
        f"{', '.join(said)}. {', '.join(others)}.",
    ]
    lines += ["", "```yaml"] + [f"{name}: {value!r}" for name, value in template_settings(result).items()] + ["```", ""]
    if result.groups:
        lines += [format_markdown_row(["part", task.main_metric, "items"]), format_markdown_row(["---", "--:", "--:"])]
        for name, one in result.groups.items():
            lines.append(
                format_markdown_row([name, _format_number(task.main_metric, one[task.main_metric]), f"{one['n']:,}"])
            )
        lines.append("")
    return lines
