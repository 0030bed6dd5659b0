"""The state of the studio in one SQLite file: queued and finished jobs, notes and tags of runs."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from anabatic.core import json_reader, log
from anabatic.core.errors import DataError

_SCHEMA_VERSION = 1
_DAMAGE_HINT = "free space on its disk; if it is damaged, move it away to start with an empty queue: runs stay"
_MAX_INTEGER = 2**63 - 1
"""Largest integer of SQLite."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    command TEXT NOT NULL,
    name TEXT NOT NULL,
    recipe TEXT NOT NULL,
    out TEXT NOT NULL,
    folder TEXT NOT NULL,
    state TEXT NOT NULL,
    position REAL NOT NULL,
    devices TEXT NOT NULL DEFAULT '[]',
    pid INTEGER NOT NULL DEFAULT 0,
    process_start INTEGER NOT NULL DEFAULT 0,
    exit_code INTEGER,
    message TEXT NOT NULL DEFAULT '',
    created REAL NOT NULL,
    started REAL,
    ended REAL
);
CREATE TABLE IF NOT EXISTS notes (
    run TEXT PRIMARY KEY,
    text TEXT NOT NULL,
    tags TEXT NOT NULL,
    changed REAL NOT NULL
);
"""

QUEUED, RUNNING, STOPPING = "queued", "running", "stopping"
FINISHED, FAILED, STOPPED, LOST = "finished", "failed", "stopped", "lost"
ACTIVE_STATES = (RUNNING, STOPPING)
ENDED_STATES = (FINISHED, FAILED, STOPPED, LOST)


@dataclass(frozen=True)
class JobRecord:
    """One job of the queue.

    Attributes:
        recipe: YAML of its settings, as written by the user.
        out: its run folder, or the folder or file that it writes; may be empty.
        folder: working directory, which relative paths in the recipe start from.
        state: queued, running, stopping, finished, failed, stopped, or lost (its process ended while no studio ran,
            without an exit code).
        position: order in the queue.
        devices: indices of its devices; empty on the processor.
        pid, process_start: its process and the start of that process in clock ticks after boot; 0: none.
        message: why it waits or failed.
        created, started, ended: Unix times.
    """

    id: int
    command: str
    name: str
    recipe: str
    out: str
    folder: str
    state: str = QUEUED
    position: float = 0.0
    devices: list[int] = field(default_factory=list)
    pid: int = 0
    process_start: int = 0
    exit_code: int | None = None
    message: str = ""
    created: float = 0.0
    started: float | None = None
    ended: float | None = None


@dataclass(frozen=True)
class RunNote:
    """The user's notes about a run."""

    text: str = ""
    tags: tuple[str, ...] = ()


_Item = TypeVar("_Item", int, str)


class StudioStore:
    """The database. Safe to use from several threads.

    Args:
        path: file, created if it does not exist.

    Raises:
        DataError: the file is not a database of a studio, or of a newer version.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.RLock()
        try:
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        except sqlite3.OperationalError as error:  # it is a folder, or may not be read
            raise DataError(f"{path} cannot be used: {error}", _DAMAGE_HINT) from error
        self._connection.row_factory = sqlite3.Row
        try:
            self._create_tables(path)
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise DataError(f"{path} cannot be used: {error}", _DAMAGE_HINT) from error
        except DataError:
            self._connection.close()
            raise

    def _create_tables(self, path: Path) -> None:
        # No write-ahead log: it needs shared memory, which network file systems lack (sqlite.org/wal.html).
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version > _SCHEMA_VERSION:
            raise DataError(
                f"{path} has version {version}, this program knows {_SCHEMA_VERSION}",
                "update anabatic, or move the file away to start with an empty queue",
            )
        self._connection.executescript(_SCHEMA)
        self._connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")

    @contextmanager
    def _use(self) -> Iterator[sqlite3.Connection]:
        """Give the connection to this thread alone.

        Raises:
            DataError: the file is damaged, or the disk is full.
        """
        with self._lock:
            try:
                yield self._connection
            except (sqlite3.Error, TypeError) as error:  # a value of another kind than its column
                raise DataError(f"{self._path} cannot be used: {error}", _DAMAGE_HINT) from error

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    def add_job(self, command: str, name: str, recipe: str, out: str, folder: str) -> JobRecord:
        """Append a job to the queue."""
        with self._use() as connection:
            (last,) = connection.execute("SELECT coalesce(max(position), 0) FROM jobs").fetchone()
            cursor = connection.execute(
                "INSERT INTO jobs (command, name, recipe, out, folder, state, position, created)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (command, name, recipe, out, folder, QUEUED, last + 1, time.time()),
            )
            return self.get_job(int(cursor.lastrowid or 0))

    def get_job(self, job_id: int) -> JobRecord:
        """Return a job.

        Raises:
            KeyError: there is none with this id.
        """
        if job_id > _MAX_INTEGER:
            raise KeyError(job_id)
        with self._use() as connection:
            row = connection.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
            if row is None:
                raise KeyError(job_id)
            return _to_job(row)

    def list_jobs(self, states: Iterable[str] = ()) -> list[JobRecord]:
        """Return the jobs in queue order; `states`: only these."""
        wanted = tuple(states)
        marks = ", ".join("?" * len(wanted))
        where = f" WHERE state IN ({marks})" if wanted else ""
        with self._use() as connection:
            rows = connection.execute(f"SELECT * FROM jobs{where} ORDER BY position, id", wanted).fetchall()
            return [_to_job(row) for row in rows]

    def update_job(self, job: JobRecord, **changes: Any) -> JobRecord:
        """Write changed fields of a job; return it with them."""
        changed = replace(job, **changes)
        values = {name: json.dumps(value) if name == "devices" else value for name, value in changes.items()}
        assignments = ", ".join(f"{name} = ?" for name in values)
        with self._use() as connection:
            connection.execute(f"UPDATE jobs SET {assignments} WHERE id = ?", (*values.values(), job.id))
        return changed

    def remove_job(self, job_id: int) -> None:
        """Remove a job from the list; its run folder stays."""
        with self._use() as connection:
            connection.execute("DELETE FROM jobs WHERE id = ?", (job_id,))

    def get_notes(self) -> dict[str, RunNote]:
        """Return run -> note."""
        with self._use() as connection:
            rows = connection.execute("SELECT run, text, tags FROM notes").fetchall()
            return {row["run"]: RunNote(str(row["text"]), tuple(_read_list(row, "tags", str))) for row in rows}

    def set_note(self, run: str, note: RunNote) -> None:
        """Write the note of a run; an empty one removes it."""
        with self._use() as connection:
            if not note.text and not note.tags:
                connection.execute("DELETE FROM notes WHERE run = ?", (run,))
                return
            connection.execute(
                "INSERT INTO notes (run, text, tags, changed) VALUES (?, ?, ?, ?) ON CONFLICT (run) DO UPDATE SET "
                "text = excluded.text, tags = excluded.tags, changed = excluded.changed",
                (run, note.text, json.dumps(note.tags), time.time()),
            )


def _to_job(row: sqlite3.Row) -> JobRecord:
    return JobRecord(**{**dict(row), "devices": _read_list(row, "devices", int)})


def _read_list(row: sqlite3.Row, column: str, kind: type[_Item]) -> list[_Item]:
    """Return the list in a column; empty, with a warning, where the file was damaged."""
    try:
        found = json_reader.loads(row[column])
        if isinstance(found, list) and all(type(item) is kind for item in found):
            return found
        error = f"not a list of {kind.__name__}"
    except (ValueError, TypeError) as damage:
        error = str(damage)
    log.warn(f"the database of the studio is damaged: {column} of a row cannot be read ({error}) and are left out")
    return []
