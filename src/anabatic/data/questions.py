"""Questions whose answers can be judged: rows of generated tasks and of files, with what the judge needs to know."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabatic.config.shared import Data
from anabatic.core import log
from anabatic.core.errors import ConfigError, DataError
from anabatic.data import asked, spec, tasks
from anabatic.data.document import Message, Problem

_FILES = ("file", "folder", "glob")


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        id: `file:line`, or `task:NAME:number`.
        messages: the turns that an answer follows.
        answer: what a right answer says; None: the row does not tell.
        task: the generated task it is of; empty: a row of a file.
        row: the row as the file has it.
    """

    id: str
    messages: list[Message]
    answer: str | None = None
    task: str = ""
    row: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The last turn."""
        return str(self.messages[-1]["content"])


def read(data: Data, seed: int, held_rows: int) -> tuple[list[Question], list[Question]]:
    """Return the questions to learn from and those held out.

    Held out are the sources of `data.valid`; without them the test split of generated tasks, and of files the share
    `data.valid_fraction`, chosen by the hash of a row's place.

    Args:
        held_rows: of each generated task that is held out.

    Raises:
        ConfigError, DataError: a source cannot be read, a row asks nothing, or nothing is left.
    """
    train: list[Question] = []
    held: list[Question] = []
    for name in data.train:
        source = spec.parse(name)
        rows = _rows(source, data, "train", seed)
        if spec.kind(source) == "task":
            train += rows
            held += [] if data.valid else _rows(spec.Source(source.path, held_rows), data, "test", 0)
            continue
        apart = _apart(rows, 0.0 if data.valid else data.valid_fraction)
        train += [row for row in rows if row.id not in apart]
        held += [row for row in rows if row.id in apart]
    for name in data.valid:
        held += _rows(spec.parse(name), data, "test", 0)
    if not train:
        raise DataError("data.train holds no question", "give rows with a prompt, query, question or messages")
    return train, held


def _rows(source: spec.Source, data: Data, split: tasks.Split, seed: int) -> list[Question]:
    kind = spec.kind(source)
    if kind == "task":
        name = source.path.removeprefix("task:")
        drawn = tasks.rows(name, split, source.rows or tasks.DEFAULT_ROWS, seed)
        return [
            Question(f"{source.path}:{number}", list(row.messages[:-1]), row.answer, row.task)
            for number, row in enumerate(drawn, start=1)
        ]
    if kind not in _FILES:
        raise ConfigError(f"{source.path} asks no questions", "give task:NAME, or .jsonl files of questions")
    if source.weight is not None:
        raise ConfigError(f"{source} has a weight, and questions are drawn one after another", "leave @WEIGHT out")
    return _of_files(spec.files(source), data, source.rows)


def _of_files(paths: Sequence[Path], data: Data, most: int | None) -> list[Question]:
    found: list[Question] = []
    skipped = 0
    for item in asked.read([str(path) for path in paths], data.columns):
        if most is not None and len(found) >= most:
            break
        if isinstance(item, Problem) or item.messages is None:
            what = item.message if isinstance(item, Problem) else f"{item.place}: plain text, not a question"
            if data.on_bad_row == "fail":
                raise DataError(what, "mend the row, or pass over such rows with --data.on-bad-row skip")
            skipped += 1
            continue
        found.append(Question(item.id, item.messages, item.label, row=item.row))
    if skipped:
        log.warn(f"{skipped:,} rows ask nothing and were passed over")
    return found


def _apart(rows: list[Question], fraction: float) -> set[str]:
    """Return the ids with the smallest hashes: exactly the share, at least one of two."""
    wanted = 0 if fraction == 0 or len(rows) < 2 else max(1, round(len(rows) * fraction))
    return set(sorted((row.id for row in rows), key=_digest)[:wanted])


def _digest(name: str) -> bytes:
    # The folder may have another name elsewhere: the same rows are held out all the same.
    return hashlib.blake2b(Path(name).name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
