"""Run folders as the page of runs asks for them: a list, curves of a bounded length, what else a run has written.

Reading takes a while; the server does it in a thread of its own, one question at a time.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from anabatic.core import jsonl
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.paths import RunFolder
from anabatic.monitor.runs import RunReader
from anabatic.train import checkpoint_list, report
from anabatic.train.report_charts import downsample, smooth
from anabatic.train.report_read import Points, Rows, read_run

DEPTH = 4
MOST_FOLDERS = 5000
MOST_RUNS = 200
MOST_OPEN = 16
"""Runs whose curves are kept in memory."""
MOST_POINTS = 1000
"""Of a curve, in an answer."""
HELD_POINTS = 4096
"""Of a curve, in memory."""
READ_BYTES = 4 << 20
"""Of a file of metrics, at once: about a quarter of a second. The page asks again until it has all."""
LOG_BYTES = 64 << 10
SCAN_SECONDS = 5.0

_NOISY = ("loss", "accuracy", "grad_norm", "tokens_per_s", "mfu", "device_util_pct_mean", "device_power_w_mean")
_LOG = re.compile(r"rank-(\d+)\.log")
_NO_RUNS = ("best_model", "final_model", "checkpoint-")
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass
class _Found:
    folder: Path
    name: str
    reader: RunReader


class _Followed:
    """The rows of one run, thinned where they are many."""

    def __init__(self, folder: Path) -> None:
        self._file = jsonl.Follower(RunFolder(folder).metrics, most=READ_BYTES)
        self._token = ""
        self.rows = Rows()

    def read(self) -> None:
        """Read what is new, as much of it as is read at once."""
        anew, rows = self._file.read()
        if anew:
            self.rows, self._token = Rows(), secrets.token_hex(4)
        for row in rows:
            self.rows.take(row)
        held = self.rows
        for key, points in held.columns.items():
            if len(points) > HELD_POINTS:
                held.columns[key] = dict(downsample(sorted(points.items()), HELD_POINTS // 2))
        held.samples, held.draws = _every_second(held.samples), _every_second(held.draws)
        held.evaluations = _every_second(held.evaluations)

    @property
    def version(self) -> str:
        """What was read, in a word: another word after anything new."""
        return f"{self._token}.{self._file.offset}"

    @property
    def share(self) -> float:
        """Of the file that was read, 0 to 1."""
        return self._file.offset / (self._file.offset + self._file.behind) if self._file.behind else 1.0


class Runs:
    """All runs below a folder. A run is asked for by its id from `listing`; nothing that is asked becomes a path.

    Args:
        root: an existing folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._found: dict[str, _Found] = {}
        self._left_out = 0
        self._scanned = float("-inf")
        self._followed: OrderedDict[str, _Followed] = OrderedDict()

    def listing(self) -> dict[str, Any]:
        """Return `runs`, those that run first, then the latest, and `left_out`, how many more there are."""
        if time.monotonic() - self._scanned > SCAN_SECONDS:
            self._scan()
            self._scanned = time.monotonic()
        rows = []
        for key, found in list(self._found.items()):
            try:
                run = found.reader.read()
            except (ConfigError, OSError):  # the folder has just gone, or may not be read
                del self._found[key]
                continue
            known = run.figures()
            rows.append(
                {
                    "id": key, "name": found.name, "state": run.state, "why": run.why, "steps": run.total_steps,
                    "age_s": run.age_s, "valid_loss": run.valid.get("valid_loss"),
                    **{name: known.get(name) for name in ("step", "loss", "tokens_per_s", "eta_s")},
                }
            )  # fmt: skip
        rows.sort(key=_order)
        return {"runs": rows, "left_out": self._left_out}

    def curves(self, key: str, have: str = "") -> dict[str, Any]:
        """Return the curves of a run.

        Args:
            have: the version that the reader has; when there is nothing new, no curves are returned.

        Returns:
            `version`, `share` of the file that was read so far, and `curves`: by name `steps`, `values` and, for a
            noisy one, `smooth`; each a pair of lists of about `MOST_POINTS` numbers.

        Raises:
            KeyError: no listed run has this id.
        """
        followed = self._follow(key)
        answer: dict[str, Any] = {"version": followed.version, "share": followed.share}
        if have != followed.version:
            answer["curves"] = {name: _curve(name, points) for name, points in followed.rows.curves().items() if points}
        return answer

    def about(self, key: str) -> dict[str, Any]:
        """Return what a run has written beside its curves: facts, samples, events, config, checkpoints, logs, notes.

        Raises:
            KeyError: no listed run has this id.
        """
        found = self._found[key]
        followed = self._follow(key)
        run = read_run(found.folder, found.name, followed.rows)
        try:
            rows = checkpoint_list.rows(found.folder, followed.rows.evaluations.values())
            checkpoints = [{name: value for name, value in row.items() if name != "path"} for row in rows]
        except (DataError, OSError):  # there is none, or one is just being removed
            checkpoints = []
        logs = [{"rank": rank, "bytes": path.stat().st_size} for rank, path in _logs(found.folder)]
        return {**report.story(run), "checkpoints": checkpoints, "logs": logs, "notes": run.notes}

    def log(self, key: str, rank: int) -> str:
        """Return the end of the log of one rank.

        Raises:
            KeyError: no listed run has this id, or it has no such log.
        """
        path = dict(_logs(self._found[key].folder))[rank]
        with open(path, "rb") as file:
            start = max(0, path.stat().st_size - LOG_BYTES)
            file.seek(start)
            text = file.read(LOG_BYTES).decode("utf-8", "replace")
        return text.partition("\n")[2] if start else text

    def report(self, key: str) -> str:
        """Return the report of a run as it is now, as HTML.

        Raises:
            KeyError: no listed run has this id.
        """
        found = self._found[key]
        return report.run_page(found.folder, read_run(found.folder, found.name, self._follow(key).rows))

    def _follow(self, key: str) -> _Followed:
        followed = self._followed.get(key) or _Followed(self._found[key].folder)
        self._followed[key] = followed
        self._followed.move_to_end(key)
        while len(self._followed) > MOST_OPEN:
            self._followed.popitem(last=False)
        followed.read()
        return followed

    def _scan(self) -> None:
        folders = sorted(_folders(self._root), reverse=True)
        self._left_out = max(0, len(folders) - MOST_RUNS)
        found = {}
        for _, folder in folders[:MOST_RUNS]:
            name = str(folder.relative_to(self._root)) if folder != self._root else folder.resolve().name
            key = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
            try:
                found[key] = self._found.get(key) or _Found(folder, name, RunReader(folder, rows=20))
            except ConfigError:  # it has gone since
                continue
        self._found = found


def _folders(root: Path) -> list[tuple[float, Path]]:
    """Return every folder with a run, and when the run wrote last."""
    found = []
    for count, (name, inside, files) in enumerate(os.walk(root)):
        folder = Path(name)
        written = [folder / one for one in ("metrics.jsonl", "events.jsonl") if one in files]
        times = [path.stat().st_mtime for path in written if path.exists()]
        if times:
            found.append((max(times), folder))
        deep = len(folder.relative_to(root).parts) >= DEPTH
        inside[:] = [] if deep else [one for one in inside if not one.startswith((".", *_NO_RUNS))]
        if count >= MOST_FOLDERS:
            break
    return found


def _order(row: dict[str, Any]) -> tuple[bool, float, str]:
    runs = row["state"].startswith("running")
    return not runs, 0.0 if runs or row["age_s"] is None else row["age_s"], row["name"]


def _logs(folder: Path) -> list[tuple[int, Path]]:
    """Return (rank, file); a link may point anywhere and is left out."""
    every = [(match, path) for path in folder.iterdir() if (match := _LOG.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in every if path.is_file() and not path.is_symlink())


def _curve(name: str, points: Points) -> dict[str, Any]:
    if name == "time":  # Unix time has more digits than are kept
        first = next((value for _, value in points if value is not None), 0.0)
        points = [(step, None if value is None else value - first) for step, value in points]
    curve: dict[str, Any] = {"points": _columns(downsample(points, MOST_POINTS))}
    if name in _NOISY:
        curve["smooth"] = _columns(downsample(smooth(points), MOST_POINTS))
    return curve


def _columns(points: Points) -> list[list[float | None]]:
    return [[step for step, _ in points], [None if value is None else float(f"{value:.6g}") for _, value in points]]


def _every_second(held: dict[_Key, _Value]) -> dict[_Key, _Value]:
    return held if len(held) <= HELD_POINTS else dict(list(held.items())[::2])
