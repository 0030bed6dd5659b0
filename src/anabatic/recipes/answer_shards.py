"""The files of `anabatic infer`: each process writes its part line by line, and one puts them together at the end.

A part begins with what the job is, so that no other job continues with it. It survives whatever ends the process: what
was answered is not asked again.
"""

from __future__ import annotations

import glob
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from anabatic.core import json_reader, log
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.json_reader import JsonlWriter
from anabatic.core.paths import make_write_error, open_atomic_file

_POLL_SECONDS = 0.1
_START_OVER_HINT = "give the same settings, or start over with --resume never"


class AnswerShard:
    """The lines that one process writes.

    Attributes:
        num_rows: rows that are answered or skipped.
        is_finished: there is nothing left to do for this process.
    """

    def __init__(self, out: Path, job: dict[str, Any], rank: int, ranks: int, resume: Literal["auto", "never"]) -> None:
        self._path, self._finished_path = _shard_path(out, rank, ranks), _finished_shard_path(out, rank, ranks)
        self.num_rows = 0
        if resume == "never":
            for stale in [self._path, self._finished_path]:
                stale.unlink(missing_ok=True)
        elif out.exists():
            raise ConfigError(f"{out} is there already", "choose another -o, or start over with --resume never")
        parts = [one.name for one in out.parent.glob(f"{glob.escape(out.name)}.part-*")]
        others = [name for name in parts if not name.removesuffix(".done").endswith(f"-of-{ranks}")]
        if others and resume == "auto":
            raise ConfigError(
                f"{others[0]} was begun by another number of processes than {ranks}",
                f"use as many; or {_START_OVER_HINT}",
            )
        self.is_finished = self._finished_path.is_file()
        kept = self._finished_path if self.is_finished else self._path
        known = _read_shard_state(kept) if kept.is_file() else None
        if known is not None:
            self._require_same_job(job, known[0])
            self.num_rows = known[1]
            log.info(f"going on after {self.num_rows:,} rows in {kept}")
        if not self.is_finished:
            self._writer = _open_writer(self._path)
            if known is None:
                self._writer.write({"job": job})

    def _require_same_job(self, job: dict[str, Any], before: dict[str, Any]) -> None:
        now = json_reader.loads(json.dumps(job))
        changed = [key for key in now if now[key] != before.get(key)]
        if changed:
            was, is_now = before.get(changed[0]), now[changed[0]]
            raise ConfigError(f"{self._path} was begun with {changed[0]} = {was}, now it is {is_now}", _START_OVER_HINT)

    def write_row(self, line: dict[str, Any]) -> None:
        """Add a line; it is on its way to the disk when this returns."""
        self._writer.write(line)
        self.num_rows += 1

    def close(self) -> None:
        """Close the file; a part without a row is none."""
        self._writer.close()
        if not self.num_rows and not self.is_finished:
            self._path.unlink(missing_ok=True)

    def mark_finished(self) -> None:
        """Say that all rows of this process are in its part."""
        os.replace(self._path, self._finished_path)
        self.is_finished = True


def _shard_path(out: Path, rank: int, ranks: int) -> Path:
    return out.with_name(f"{out.name}.part-{rank}-of-{ranks}")


def _finished_shard_path(out: Path, rank: int, ranks: int) -> Path:
    return out.with_name(f"{out.name}.part-{rank}-of-{ranks}.done")


def _open_writer(path: Path) -> JsonlWriter:
    try:
        return JsonlWriter(path)
    except OSError as error:
        raise make_write_error(path, error) from error


def _read_shard_state(path: Path) -> tuple[dict[str, Any], int] | None:
    """Return what a part was begun with, and how many rows it holds; a line torn by a crash is cut off. None: it holds
    nothing whole."""
    complete_bytes = lines = 0
    job: dict[str, Any] | None = None
    with open(path, "rb+") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            if job is None:
                job = _parse_shard_header(path, line)
            else:
                lines += 1
            complete_bytes += len(line)
        file.truncate(complete_bytes)
    return None if job is None else (job, lines)


def _parse_shard_header(path: Path, line: bytes) -> dict[str, Any]:
    """Return what the first line of a part says that it was begun with."""
    try:
        job = json_reader.loads(line)["job"]
    except (ValueError, KeyError, TypeError):
        job = None
    if not isinstance(job, dict):
        raise ConfigError(f"{path} is no part of answers, and stands where one is written", _START_OVER_HINT)
    return job


def merge_shards(out: Path, ranks: int, beat: Callable[[], None]) -> tuple[int, list[str]]:
    """Wait for all parts, write them in the order of their rows, and remove them.

    Returns:
        The number of answers, and what was wrong with the rows that were skipped.
    """
    parts = [_finished_shard_path(out, rank, ranks) for rank in range(ranks)]
    while not all(part.is_file() for part in parts):
        time.sleep(_POLL_SECONDS)
        beat()
    rows, skipped = 0, []
    with open_atomic_file(out, "choose another -o") as file:
        for line in _read_in_row_order(parts):
            del line["row"]
            if "skipped" in line:
                skipped.append(line["skipped"])
                continue
            rows += 1
            file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
    for part in parts:
        part.unlink()
    return rows, skipped


def _read_in_row_order(parts: list[Path]) -> Iterator[dict[str, Any]]:
    """Yield the lines of all parts in the order of the rows: row n is in part n modulo the number of parts."""
    files = [open(part, "rb") for part in parts]  # noqa: SIM115 - closed below
    try:
        for file in files:
            file.readline()  # what the job is
        while True:
            for file in files:
                try:
                    line = file.readline()
                    row = json_reader.loads(line) if line else None
                    if line and not (isinstance(row, dict) and "row" in row):
                        raise ValueError("a line is no answer")
                except ValueError as error:
                    raise DataError(f"{file.name} is damaged: {error}", _START_OVER_HINT) from error
                if row is None:
                    return
                yield row
    finally:
        for file in files:
            file.close()
