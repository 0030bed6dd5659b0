"""Several runs next to each other: the settings that differ, and the final figures with the best one marked."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from anabatic.config.loading import settings, yaml_reader
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import format_count, format_size
from anabatic.core.json_reader import to_finite_number
from anabatic.core.language import LocalizedText
from anabatic.monitor.run_data import Points, RunData
from anabatic.train.report.localized_page import MISSING, as_text, describe_duration
from anabatic.train.report.run_facts import read_data_sources

MAX_COMPARED = 8
"""Runs that have a colour of their own."""
IGNORED_SETTINGS = ("out",)
"""Settings that differ between any two runs."""
_MAX_VALUE_CHARS = 200


@dataclass(frozen=True)
class ComparedRow:
    """One setting or figure.

    Attributes:
        values: text of each run, in order; a duration in both languages.
        best: index of the best run; None: no value is better than the others, or several share the best.
    """

    name: str
    values: Sequence[str | LocalizedText]
    best: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the row with English texts."""
        return {"name": self.name, "values": [as_text(value).en for value in self.values], "best": self.best}


@dataclass(frozen=True)
class ComparedRuns:
    """What differs between runs.

    Attributes:
        settings: rows of settings that differ, by dotted key.
        figures: rows of final figures.
    """

    names: list[str]
    settings: list[ComparedRow] = field(default_factory=list)
    figures: list[ComparedRow] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return what the studio's page reads, with English texts."""
        return {
            "names": self.names,
            "settings": [row.as_json() for row in self.settings],
            "figures": [row.as_json() for row in self.figures],
        }


def compare_runs(runs: Sequence[RunData]) -> ComparedRuns:
    """Compare runs by their settings (config.yaml) and their last, best and mean metrics."""
    return ComparedRuns([run.name for run in runs], _compare_settings(runs), _compare_figures(runs))


def _compare_settings(runs: Sequence[RunData]) -> list[ComparedRow]:
    trees = [read_settings(run.config) for run in runs]
    rows = []
    keys = dict.fromkeys(key for tree in trees for key in tree)
    # A torn file differs in nothing, and an evaluation beside trainings not in what it does not have.
    is_whole = [len(tree) >= len(keys) / 2 for tree in trees]
    for key in keys:
        values = [_format_value(tree[key]) if key in tree else MISSING for tree in trees]
        known = {
            value for value, tree, whole in zip(values, trees, is_whole, strict=True) if tree and (whole or key in tree)
        }
        if key not in IGNORED_SETTINGS and len(known) > 1:
            rows.append(ComparedRow(key, values))
    return rows


def read_settings(config: str) -> dict[str, Any]:
    """Return the settings of a config.yaml by dotted key; empty where it cannot be read."""
    try:
        return settings.flatten_settings(yaml_reader.parse_yaml(config, "config.yaml").tree)
    except ConfigError:  # torn or foreign: the run has no known settings
        return {}


def _format_value(value: Any) -> str:
    text = yaml_reader.dump_scalar(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


@dataclass(frozen=True)
class _Figure:
    name: str
    read: Callable[[RunData], float | None]
    format: Callable[[float], str | LocalizedText]
    prefer: Callable[[Sequence[float]], float] | None = None


def _last(key: str) -> Callable[[RunData], float | None]:
    return lambda run: next((value for _, value in reversed(run.curves.get(key, [])) if value is not None), None)


def _extreme(key: str, choose: Callable[[Sequence[float]], float]) -> Callable[[RunData], float | None]:
    def read(run: RunData) -> float | None:
        known = _known_values(run.curves.get(key, []))
        return choose(known) if known else None

    return read


def _median(key: str) -> Callable[[RunData], float | None]:
    return _extreme(key, statistics.median)


def _summary(key: str) -> Callable[[RunData], float | None]:
    return lambda run: to_finite_number(run.summary.get(key))


def _known_values(points: Points) -> list[float]:
    return [value for _, value in points if value is not None]


def _format_number(value: float) -> str:
    return f"{value:#.4g}".rstrip(".")  # with the zeros: columns of numbers of one length


def _format_percent(value: float) -> str:
    return f"{100 * value:.1f} %"


_FIGURES = (
    _Figure("loss", _last("loss"), _format_number),
    _Figure("valid_loss", _extreme("valid_loss", min), _format_number, min),
    _Figure("valid_bpb", _extreme("valid_bpb", min), _format_number, min),
    _Figure("valid_perplexity", _extreme("valid_perplexity", min), _format_number, min),
    _Figure("valid_accuracy", _extreme("valid_accuracy", max), _format_percent, max),
    _Figure("valid_reward", _extreme("valid_reward", max), _format_number, max),
    _Figure("reward", _last("reward"), _format_number),
    _Figure("optimizer steps", lambda run: _last_step(run), lambda value: f"{value:,.0f}"),
    _Figure("training tokens", _last("tokens"), format_count),
    _Figure("tokens per second", _median("tokens_per_s"), format_count, max),
    _Figure("mfu", _median("mfu"), _format_percent, max),
    _Figure("peak memory", _extreme("memory_bytes", max), format_size, min),
    _Figure("training time", _summary("seconds"), describe_duration),
    _Figure("parameters", _summary("params"), format_count),
)


def _last_step(run: RunData) -> float | None:
    return max((step for points in run.curves.values() for step, _ in points), default=None)


def has_comparable_heldout(runs: Sequence[RunData]) -> bool:
    """Return whether held-out figures say which model is better: the runs name the same held-out data, or none."""
    known = {
        (one.heldout, one.heldout_fraction, one.train if one.heldout_fraction is not None else ())
        for one in map(read_data_sources, runs)
        if one is not None and one.heldout
    }
    return len(known) <= 1


def _compare_figures(runs: Sequence[RunData]) -> list[ComparedRow]:
    rows, is_comparable = [], has_comparable_heldout(runs)
    for figure in _FIGURES:
        values = [figure.read(run) for run in runs]
        known = [value for value in values if value is not None]
        if not known:
            continue
        best = None
        is_ranked = is_comparable or not figure.name.startswith("valid_")
        if figure.prefer is not None and is_ranked and len(set(known)) > 1:
            first = figure.prefer(known)
            best = values.index(first) if known.count(first) == 1 else None
        rows.append(
            ComparedRow(figure.name, [MISSING if value is None else figure.format(value) for value in values], best)
        )
    return rows
