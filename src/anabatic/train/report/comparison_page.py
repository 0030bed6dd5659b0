"""Several runs on one page: a column per run for final figures and settings, and their curves in one chart each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from anabatic.core.errors import ConfigError
from anabatic.core.language import Language, LocalizedText, choose_language
from anabatic.core.paths import write_atomic
from anabatic.core.svg_plot import format_short_count
from anabatic.monitor.run_data import (
    CONFIG_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    RunData,
    RunFiles,
    read_run,
    smooth_points,
)
from anabatic.train.report.charts import (
    Chart,
    Curve,
    FigureCard,
    draw_chart,
    format_four_digits,
    format_percent,
    format_three_digits,
    make_figure_card,
)
from anabatic.train.report.comparison import MAX_COMPARED, compare_runs, has_comparable_heldout, read_settings
from anabatic.train.report.localized_page import get_text, join_texts, render_page
from anabatic.train.report.page import describe_notes
from anabatic.train.report.run_facts import describe_data, read_data_sources

FIRST_COLOUR = 11
"""Class of the first run's colour in report.css."""
_RUN_FILES = (METRICS_FILE, EVENTS_FILE, CONFIG_FILE, SUMMARY_FILE)
_CURVES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "train_loss", format_four_digits),
    ("valid_loss", "valid_loss", format_four_digits),
    ("reward", "train_reward", format_three_digits),
    ("valid_reward", "valid_reward", format_three_digits),
    ("valid_bpb", "valid_bpb", format_four_digits),
    ("valid_accuracy", "valid_accuracy", format_percent),
    ("lr", "lr", format_three_digits),
    ("grad_norm", "grad_norm", format_three_digits),
    ("tokens_per_s", "tokens_per_s", format_short_count),
)
"""Key of the curve, word of its chart, value as text."""
NUM_MAIN = 4
"""The first of them are drawn large: what was learned."""


def require_run_folders(folders: Sequence[Path]) -> None:
    """Make sure that each folder holds a run of its own.

    Raises:
        ConfigError: there are too many, one is no run folder or the folder of a pipeline, or one is given twice.
    """
    if len(folders) > MAX_COMPARED:
        raise ConfigError(f"{len(folders)} runs, at most {MAX_COMPARED} can be compared", "leave some out")
    seen: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder", "name the folder of a run: anabatic report runs/mine")
        if (before := seen.get(folder.resolve())) is not None:
            raise ConfigError(f"{before} and {folder} are the same run", "name each run once")
        seen[folder.resolve()] = folder
        if not RunFiles(folder).has_any(*_RUN_FILES):
            stages = sorted({path.parent.name for path in folder.glob("*/metrics.jsonl")})
            hint = f"name its stages, for example {folder / stages[0]}" if stages else "name the folder of a run"
            raise ConfigError(f"{folder} holds none of {', '.join(_RUN_FILES)}", hint)


def write_comparison(folders: Sequence[Path], path: Path, language: Language | None = None) -> Path:
    """Write the comparison of several run folders to `path` and return it.

    Raises:
        ConfigError: as `require_run_folders`.
        Failure: the file cannot be written.
    """
    require_run_folders(folders)
    runs = [read_run(folder, name) for folder, name in zip(folders, choose_names(folders), strict=True)]
    write_atomic(path, render_comparison(runs, folders, language))
    return path


def choose_names(folders: Sequence[Path]) -> list[str]:
    """Return a name per folder: as many of its last parts as tell it from the others."""
    parts = [folder.resolve().parts for folder in folders]
    names = []
    for own in parts:
        size = 1
        while size < len(own) and sum(other[-size:] == own[-size:] for other in parts) > 1:
            size += 1
        names.append(str(Path(*own[-size:])))
    return names


def render_comparison(runs: Sequence[RunData], folders: Sequence[Path], language: Language | None = None) -> str:
    """Return the page that compares runs.

    Args:
        runs: up to `MAX_COMPARED`, with the names to show.
        folders: of the runs.
        language: that the page is written in, before it asks the browser for the reader's; None: the locale's.
    """
    compared = compare_runs(runs)
    sources = [read_data_sources(run) for run in runs]
    panels = _build_panels(runs)
    described = [describe_data(data) if data else None for data in sources]
    known_data = {text for text in described if text is not None}
    shared = next(iter(known_data)) if len(known_data) == 1 else None
    known_settings = sum(bool(read_settings(run.config)) for run in runs)
    return render_page(
        "comparison.html.j2",
        language or choose_language(None, os.environ),
        title=" · ".join(run.name for run in runs),
        heading=get_text("compared_runs"),
        count=len(runs),
        notes=[
            *[(run.name, note) for run in runs for note in _list_notes(run)],
            *([] if has_comparable_heldout(runs) else [("", get_text("compared.heldout_differs"))]),
        ],
        runs=[
            {
                "name": run.name,
                "colour": FIRST_COLOUR + index,
                "folder": str(folder),
                "data": described[index] if shared is None else None,
                "warning": get_text("data.other_kind") if shared is None and data and data.is_other_kind else None,
            }
            for index, (run, folder, data) in enumerate(zip(runs, folders, sources, strict=True))
        ],
        shared_data=shared,
        shared_warning=get_text("data.other_kind")
        if shared is not None and any(data is not None and data.is_other_kind for data in sources)
        else None,
        figures=[(get_text(f"figure.{row.name}"), row) for row in compared.figures],
        settings=compared.settings,
        no_settings=None
        if compared.settings
        else get_text("compared.same" if known_settings > 1 else "compared.no_settings"),
        main=[panel for panel in panels[:NUM_MAIN] if isinstance(panel, Chart)],
        charts=[panel for panel in panels[NUM_MAIN:] if isinstance(panel, Chart)],
        cards=[panel for panel in panels if isinstance(panel, FigureCard)],
    )


def _list_notes(run: RunData) -> list[LocalizedText]:
    notes = describe_notes(run)
    if not any(run.curves.values()):
        notes.append(get_text("compared.no_metrics"))
    if not read_settings(run.config):
        notes.append(get_text("compared.no_config"))
    return notes


def _build_panels(runs: Sequence[RunData]) -> list[Chart | FigureCard | None]:
    every = [step for run in runs for points in run.curves.values() for step, _ in points]
    common: dict[str, Any] = {"steps": (min(every), max(every)) if every else None}
    panels: list[Chart | FigureCard | None] = []
    for key, word, write in _CURVES:
        lines = [
            Curve(run.name, _prepare_points(key, run), _choose_style(key), FIRST_COLOUR + index)
            for index, run in enumerate(runs)
        ]
        title = get_text(f"chart.{word}")
        chart = make_figure_card(title, lines, write) or draw_chart(title, lines, write, **common)
        if isinstance(chart, Chart):
            values = join_texts([get_text("compared.value", name=path.name, value=path.last) for path in chart.paths])
            chart.last = ""  # of one run alone
            chart.label = get_text("compared.label", title=title, values=values)
        panels.append(chart)
    return panels


def _choose_style(key: str) -> str:
    return "points" if key.startswith("valid_") else "line"


def _prepare_points(key: str, run: RunData) -> list[tuple[int, float | None]]:
    points = run.curves.get(key, [])
    return points if key.startswith("valid_") or key == "lr" else smooth_points(points)
