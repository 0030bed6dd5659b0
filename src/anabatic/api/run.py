"""A run folder as an object: its metrics, samples and checkpoints, and the model that came out of it."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabatic.core import json_reader
from anabatic.core.errors import ConfigError
from anabatic.monitor.run_data import CONFIG_FILE, METRICS_FILE, RunFiles

_SUMMARY_HINT = "resume the run: it writes the file anew at its end"

if TYPE_CHECKING:
    from anabatic.infer.dialogue import Dialogue


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Return the run in a folder, running or finished.

    Raises:
        ConfigError: the folder holds no run.
    """
    files = RunFiles(Path(folder).expanduser())
    if not files.has_any(METRICS_FILE, CONFIG_FILE):
        raise ConfigError(f"{files.root} holds no run: no metrics.jsonl, no config.yaml", "give the folder after --out")
    return Run(files.root)


class Run:
    """A training, running or finished. Files are read when they are asked for; nothing is kept but a loaded model.

    Args:
        folder: run folder.
        command: name of the command that trained; default: found by its settings.
    """

    def __init__(self, folder: str | os.PathLike[str], command: str = "") -> None:
        self.folder = Path(folder)
        self.command = command
        self._files = RunFiles(self.folder)
        self._opened = ExitStack()
        self._dialogue: Dialogue | None = None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl`, oldest first; `kind` is train, eval or sample. `pandas.DataFrame` reads them."""
        return list(self.read_metrics())

    def read_metrics(self, kind: str = "") -> Iterator[dict[str, Any]]:
        """Iterate over the rows of `metrics.jsonl`; a line that is still being written is left out.

        Args:
            kind: only rows of this kind.
        """
        return self._files.iter_metrics(kind)

    @property
    def config(self) -> dict[str, Any]:
        """The resolved settings."""
        from anabatic.config.loading import yaml_reader

        return yaml_reader.read_yaml(self._files.config).tree

    @property
    def summary(self) -> dict[str, Any]:
        """Return what `summary.json` says: final figures, `finished`; empty while the run has none.

        Raises:
            DataError: the file is damaged.
        """
        path = self._files.summary
        return json_reader.read_own_object(path, _SUMMARY_HINT) if path.is_file() else {}

    @property
    def is_finished(self) -> bool:
        """The training came to its end."""
        return self.summary.get("finished") is True

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        """The checkpoints, as `anabatic checkpoint list --json` prints them."""
        from anabatic.train.checkpoint import listing

        return listing.list_checkpoints(self.folder)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Texts that the model wrote during the training: rows of `metrics.jsonl` of the kind `sample`."""
        return list(self.read_metrics("sample"))

    @property
    def report(self) -> Path:
        """The report, an HTML file.

        Raises:
            ConfigError: there is none yet.
        """
        if not self._files.report.is_file():
            raise ConfigError(f"{self._files.report} does not exist", "it is written when the run ends")
        return self._files.report

    def chat(self, message: str, **options: Any) -> str:
        """Return the model's answer; the conversation continues with the next call.

        Args:
            message: what the user says.
            options: settings of `anabatic chat`, for example `system=...` or `sampling={"temperature": 0}`; they start
                a new conversation.

        Raises:
            UserError: the message is no text, the model cannot be used, or the message is too long for it.
        """
        if not isinstance(message, str):
            raise ConfigError(f"the message is of type {type(message).__name__}", 'give text: run.chat("...")')
        if self._dialogue is None or options:
            self._open_dialogue(options)
        assert self._dialogue is not None
        return "".join(self._dialogue.answer_message(message))

    def _open_dialogue(self, options: dict[str, Any]) -> None:
        from anabatic.api.job_functions import make_tree
        from anabatic.config.loading import command_table, settings, validation
        from anabatic.recipes.chat import session

        self.close()
        tree = make_tree(command_table.COMMANDS.find_row("chat"), {"model": str(self.folder), **options})
        job = settings.load_job("chat", [], tree, validation.SettingNamer())
        self._dialogue = self._opened.enter_context(session.open_dialogue(job))

    def resume(self, **options: Any) -> Run:
        """Continue a training that was stopped, from its newest checkpoint, and return the run.

        Args:
            options: settings that leave the result as it is, for example `device` or `save`; others are refused.

        Raises:
            ConfigError: the folder does not say which command it is of.
            UserError: a setting is wrong.
            Failure: the training failed.
        """
        from anabatic.api.job_functions import run_command
        from anabatic.config.loading import command_table

        found = None if self.command else command_table.find_training_command(self.config)
        command = found.name if found else self.command
        if not command:
            message = f"{self._files.config} does not have the settings of any command of this version"
            raise ConfigError(message, "call the function that trained it again")
        self.close()
        run = run_command(command, self._files.config, **options)
        assert run is not None
        return run

    def close(self) -> None:
        """Free the model that `chat` has loaded."""
        self._dialogue = None
        self._opened.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        losses = [row["loss"] for row in self.read_metrics("train") if "loss" in row]
        state = "finished" if self.is_finished else "not finished"
        progress = f"loss {losses[0]:.3f} to {losses[-1]:.3f}" if losses else "no steps"
        return f"Run({str(self.folder)!r}: {state}, {progress})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        final = {name: value for name, value in self.summary.items() if isinstance(value, (int, float, str))}
        cells = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>" for name, value in final.items()
        )
        return f"<p>{html.escape(repr(self))}</p><table>{cells}</table>"
