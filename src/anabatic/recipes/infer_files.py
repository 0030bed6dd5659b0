"""The files of `anabatic infer`: each process writes its part line by line, and one puts them together at the end.

A part begins with what the job is, so that no other job goes on with it. It survives whatever ends the process: what
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

from anabatic.core import json_text, log
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.jsonl import JsonlWriter
from anabatic.core.paths import cannot_write, file_atomic

_WAIT = 0.1
_START_OVER = "give the same settings, or start over with --resume never"


class Part:
    """The lines that one process writes.

    Attributes:
        lines: rows that are answered or passed over.
        finished: there is nothing left to do for this process.
    """

    def __init__(self, out: Path, job: dict[str, Any], rank: int, ranks: int, resume: Literal["auto", "never"]) -> None:
        self._path, self._done = _path(out, rank, ranks), _done(out, rank, ranks)
        self.lines = 0
        if resume == "never":
            for stale in [self._path, self._done]:
                stale.unlink(missing_ok=True)
        elif out.exists():
            raise ConfigError(f"{out} is there already", "choose another -o, or start over with --resume never")
        parts = [one.name for one in out.parent.glob(f"{glob.escape(out.name)}.part-*")]
        others = [name for name in parts if not name.removesuffix(".done").endswith(f"-of-{ranks}")]
        if others and resume == "auto":
            raise ConfigError(
                f"{others[0]} was begun by another number of processes than {ranks}", f"use as many; or {_START_OVER}"
            )
        self.finished = self._done.is_file()
        kept = self._done if self.finished else self._path
        known = _known(kept) if kept.is_file() else None
        if known is not None:
            self._require(job, known[0])
            self.lines = known[1]
            log.info(f"going on after {self.lines:,} rows in {kept}")
        if not self.finished:
            self._writer = _writer(self._path)
            if known is None:
                self._writer.write({"job": job})

    def _require(self, job: dict[str, Any], before: dict[str, Any]) -> None:
        now = json_text.loads(json.dumps(job))
        changed = [key for key in now if now[key] != before.get(key)]
        if changed:
            was, is_now = before.get(changed[0]), now[changed[0]]
            raise ConfigError(f"{self._path} was begun with {changed[0]} = {was}, now it is {is_now}", _START_OVER)

    def write(self, line: dict[str, Any]) -> None:
        """Add a line; it is on its way to the disk when this returns."""
        self._writer.write(line)
        self.lines += 1

    def close(self) -> None:
        """Close the file; a part without a row is none."""
        self._writer.close()
        if not self.lines and not self.finished:
            self._path.unlink(missing_ok=True)

    def finish(self) -> None:
        """Say that all rows of this process are in its part."""
        os.replace(self._path, self._done)
        self.finished = True


def _path(out: Path, rank: int, ranks: int) -> Path:
    return out.with_name(f"{out.name}.part-{rank}-of-{ranks}")


def _done(out: Path, rank: int, ranks: int) -> Path:
    return out.with_name(f"{out.name}.part-{rank}-of-{ranks}.done")


def _writer(path: Path) -> JsonlWriter:
    try:
        return JsonlWriter(path)
    except OSError as error:
        raise cannot_write(path, error) from error


def _known(path: Path) -> tuple[dict[str, Any], int] | None:
    """Return what a part was begun with, and how many rows it holds; a line torn by a crash is cut off. None: it holds
    nothing whole."""
    whole = lines = 0
    job: dict[str, Any] | None = None
    with open(path, "rb+") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            if job is None:
                job = _begun(path, line)
            else:
                lines += 1
            whole += len(line)
        file.truncate(whole)
    return None if job is None else (job, lines)


def _begun(path: Path, line: bytes) -> dict[str, Any]:
    """Return what the first line of a part says that it was begun with."""
    try:
        job = json_text.loads(line)["job"]
    except (ValueError, KeyError, TypeError):
        job = None
    if not isinstance(job, dict):
        raise ConfigError(f"{path} is no part of answers, and stands where one is written", _START_OVER)
    return job


def merge(out: Path, ranks: int, beat: Callable[[], None]) -> tuple[int, list[str]]:
    """Wait for all parts, write them in the order of their rows, and remove them.

    Returns:
        The number of answers, and what was wrong with the rows that were passed over.
    """
    parts = [_done(out, rank, ranks) for rank in range(ranks)]
    while not all(part.is_file() for part in parts):
        time.sleep(_WAIT)
        beat()
    rows, skipped = 0, []
    with file_atomic(out, "choose another -o") as file:
        for line in _in_order(parts):
            del line["row"]
            if "skipped" in line:
                skipped.append(line["skipped"])
                continue
            rows += 1
            file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
    for part in parts:
        part.unlink()
    return rows, skipped


def _in_order(parts: list[Path]) -> Iterator[dict[str, Any]]:
    """The lines of all parts: row n is in part n modulo their number."""
    files = [open(part, encoding="utf-8") for part in parts]  # noqa: SIM115 - closed below
    try:
        for file in files:
            file.readline()  # what the job is
        while True:
            for file in files:
                line = file.readline()
                if not line:
                    return
                try:
                    row = json_text.loads(line)
                except ValueError as error:
                    raise DataError(f"{file.name} is damaged: {error}", _START_OVER) from error
                yield row
    finally:
        for file in files:
            file.close()
