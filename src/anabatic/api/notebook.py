"""Progress of a training below the cell of a Jupyter notebook that runs it: one line of HTML that changes."""

from __future__ import annotations

import html
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anabatic.core import json_reader
from anabatic.core.callbacks import Callback
from anabatic.core.formatting import format_count, format_duration
from anabatic.core.paths import RunFolder

Show = Callable[[str], None]
"""Shows HTML in place of what it showed before."""


def find_display() -> Show | None:
    """Return what shows HTML below the running cell; None: this is no notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if type(shell).__name__ != "ZMQInteractiveShell":  # of Jupyter's kernel; a terminal cannot change what is above
        return None
    display: Any = importlib.import_module("IPython.display")
    handle: list[Any] = []

    def show_html(text: str) -> None:
        page = display.HTML(text)
        if handle:
            handle[0].update(page)
        else:
            handle.append(display.display(page, display_id=True))

    return show_html


class NotebookProgress(Callback):
    """Shows steps, loss, held-out loss, speed and remaining time of a training.

    Args:
        show: shows HTML in place of what it showed before.
    """

    def __init__(self, show: Show) -> None:
        self._show = show
        self._steps = 0
        self._step = 0
        self._name = ""
        self._words: dict[str, str] = {}

    def on_start(self, folder: Path, config: dict[str, Any]) -> None:
        """Read how many steps there will be."""
        self._name = folder.name
        for event in json_reader.read_json_lines(RunFolder(folder).events):
            if event.get("event") in ("start", "resume") and isinstance(event.get("steps"), int):
                self._steps, self._step = event["steps"], event.get("step") or 0
        self._draw("training")

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        """Show a step."""
        self._step = step
        for key, label, write in _FIGURES:
            if isinstance(value := metrics.get(key), (int, float)):
                self._words[key] = f"{label} {write(value)}".strip()
        self._draw("training")

    def on_eval(self, step: int, metrics: dict[str, Any]) -> None:
        """Show the held-out loss."""
        if isinstance(loss := metrics.get("valid_loss"), (int, float)):
            self._words["valid_loss"] = f"held-out loss {loss:.4f}"
        self._draw("training")

    def on_end(self, step: int) -> None:
        """Show that it is over."""
        self._words.pop("eta_s", None)
        self._draw("finished")

    def _draw(self, state: str) -> None:
        label = html.escape(f"{self._name}: {state}, step {self._step} of {self._steps}")
        bar = f'<progress max="{max(1, self._steps)}" value="{self._step}" aria-label="{label}"></progress>'
        self._show(f"<div>{bar} {label} &middot; {html.escape(' · '.join(self._words.values()))}</div>")


_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", lambda value: f"{value:.4f}"),
    ("reward", "reward", lambda value: f"{value:.3f}"),
    ("tokens_per_s", "", lambda value: f"{format_count(value)} tokens/s"),
    ("eta_s", "", lambda value: f"{format_duration(value)} left"),
)
"""Key of a row -> what is shown of it."""
