"""The files of one run folder, read when they are asked for, of any size, also half written.

A file that is missing reads as empty, a torn line is skipped, and a link is not followed where its text would be shown:
it may lead to any file of whoever serves the runs.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anabatic.core import json_reader
from anabatic.core.json_reader import to_finite_number
from anabatic.core.paths import RunFolder

METRICS_FILE, EVENTS_FILE, CONFIG_FILE, SUMMARY_FILE = "metrics.jsonl", "events.jsonl", "config.yaml", "summary.json"
EVALUATION_FILE = "eval.json"
PIPELINE_FILE = "pipeline.jsonl"
MAX_UNIX_TIME = 253_402_300_799.0
"""End of the year 9999 in Unix time."""
MAX_LOG_BYTES = 64 << 10
"""Of the end of a log."""
MAX_BAD_STEPS, MAX_BAD_ROWS = 200, 50
_RANK_LOG = re.compile(r"rank-(\d+)\.log")


class RunFiles(RunFolder):
    """The files of one run folder, or of a pipeline; nothing is kept."""

    def has_any(self, *names: str) -> bool:
        """True when the folder has one of these files."""
        return any((self.root / name).is_file() for name in names)

    def iter_metrics(self, kind: str = "") -> Iterator[dict[str, Any]]:
        """Yield the rows of `metrics.jsonl`, oldest first.

        Args:
            kind: train, eval or sample; empty: all.
        """
        for row in json_reader.read_json_lines(self.metrics):
            if not kind or row.get("kind") == kind:
                yield row

    def read_events(self) -> list[dict[str, Any]]:
        """Return the rows of `events.jsonl`, oldest first."""
        return list(json_reader.read_json_lines(self.events))

    def read_object(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file; empty if there is none.

        Raises:
            ValueError: the file is damaged; without a text: it holds another type.
        """
        path = self.root / name
        if not path.is_file():
            return {}
        value = json_reader.loads(path.read_text(encoding="utf-8", errors="replace"))
        if not isinstance(value, dict):
            raise ValueError
        return value

    @property
    def is_finished(self) -> bool:
        """True when the summary says that the run is complete."""
        try:
            return self.summary.is_file() and json_reader.read_json_file(self.summary).get("finished") is True
        except (OSError, ValueError, AttributeError):
            return False

    @property
    def is_locked(self) -> bool:
        """True when a process of this machine holds the folder; taking the lock would be in the way of a start."""
        try:
            inode = (self.root / ".lock").stat().st_ino
            table = Path("/proc/locks").read_text(encoding="utf-8")
        except OSError:
            return False
        return any(
            "FLOCK" in words and words[-3].rpartition(":")[2] == str(inode)
            for line in table.splitlines()
            if len(words := line.split()) > 6
        )

    def read_settings_text(self) -> str:
        """Return the text of `config.yaml`, or of a stage's settings; empty if there is none."""
        for path in (self.config, self.root / "stage.yaml"):
            if path.is_file() and not path.is_symlink():
                return path.read_text(encoding="utf-8", errors="replace")
        return ""

    def read_stage_rows(self) -> list[dict[str, Any]]:
        """Return the rows of a pipeline about its stages, oldest first."""
        rows = json_reader.read_json_lines(self.root / PIPELINE_FILE)
        return [row for row in rows if row.get("event") == "stage"]

    def find_newest_checkpoint(self) -> str:
        """Return the name of the newest checkpoint, whole or not; empty: none."""
        saved = [path.name for path in self.root.glob("checkpoint-*") if path.is_dir()]
        return max(saved, key=lambda name: (len(name), name), default="")

    def find_rank_logs(self) -> dict[int, Path]:
        """Return the log of each rank."""
        found = [(match, path) for path in self.root.iterdir() if (match := _RANK_LOG.fullmatch(path.name))]
        return dict(sorted((int(match[1]), path) for match, path in found if path.is_file() and not path.is_symlink()))

    def read_log_end(self, rank: int) -> str:
        """Return the last lines of the log of one rank.

        Raises:
            KeyError: there is no such log.
        """
        path = self.find_rank_logs()[rank]
        with open(path, "rb") as file:
            start = max(0, path.stat().st_size - MAX_LOG_BYTES)
            file.seek(start)
            text = file.read(MAX_LOG_BYTES).decode("utf-8", "replace")
        return text.partition("\n")[2] if start else text

    def read_bad_steps(self) -> list[dict[str, Any]]:
        """Return the last steps that were spikes or not finite: step, reason, loss, grad_norm, their rows as texts."""
        path = self.root / "bad_steps.jsonl"
        steps: deque[dict[str, Any]] = deque(maxlen=MAX_BAD_STEPS)
        for entry in () if path.is_symlink() else json_reader.read_json_lines(path):
            step = to_finite_number(entry.get("step"))
            if step is not None:
                figures = {name: to_finite_number(entry.get(name)) for name in ("loss", "grad_norm")}
                rows = _list_rows(entry)
                steps.append({"step": step, "reason": str(entry.get("reason", "")), **figures, "rows": rows})
        return list(steps)


def _list_rows(entry: dict[str, Any]) -> list[str]:
    ranks = entry.get("ranks")
    rows = [
        f"{row.get('source')}#{row.get('row')}"
        for rank in (ranks if isinstance(ranks, list) else [])
        if isinstance(rank, dict) and isinstance(rank.get("rows"), list)
        for row in rank["rows"]
        if isinstance(row, dict)
    ]
    return list(dict.fromkeys(rows))[:MAX_BAD_ROWS]


def parse_time(value: object) -> float | None:
    """Return a Unix time that a calendar can show, None for anything else."""
    known = to_finite_number(value)
    return known if known is not None and 0 <= known <= MAX_UNIX_TIME else None
