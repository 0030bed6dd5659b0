"""The files of a job and their first rows, read before anything heavy is loaded: no torch, well under a second."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from anabatic.core.errors import DataError, UserError
from anabatic.data import asked, spec, tasks
from anabatic.data.document import Columns, Document, Form
from anabatic.data.long_rows import LongRows
from anabatic.data.readers import reader_for

Within = Callable[[str], bool]
"""Whether a path lies where an earlier stage will write."""

_FIRST = 32
_QUESTIONS = 2000
"""Rows of questions whose lengths are looked at."""
_CHARS = 16
"""No tokenizer makes tokens that are longer on average: what has more than so many characters for every token of room
is too long for certain."""
_GUESS = re.compile(r"Did you mean [^?]*\?")
_BUILT_IN = ("task:", "chat:", "stdlib:")
_WHOLE = (".txt", ".md", ".py")
"""Read as one document: nothing can be wrong with a row."""


def check(command: str, job: Any, made: Within) -> Iterator[UserError]:
    """Yield what is wrong with the files that a job reads: not there, not readable, of another form, too long."""
    of = _CHECKS.get(command) or (_of_vessels if command.startswith("classify ") else None)
    for name in sources(job):
        if of is None or made(name):
            continue
        try:
            of(job, name)
        except UserError as error:
            yield error
    try:
        if command in _CLASSES and not job.model.path and not any(map(made, job.data.train)):
            from anabatic.trajectory import choice

            choice.require_choice(job.data.train, job.tracks)
        if command in _WEIGHED:
            spec.parse_all(job.data.train)
    except UserError as error:
        yield error


def absent(job: Any) -> dict[str, str]:
    """Return the files of a job that are not there, and what is to be said of each."""
    found = {}
    for name in sources(job):
        source = spec.parse(name)
        try:
            there = spec.kind(source) != "glob" or bool(glob.glob(os.path.expanduser(source.path), recursive=True))
        except DataError as error:
            if not source.path.startswith(_BUILT_IN):
                guess = _GUESS.search(error.hint)
                found[name] = f"{error}{f'. {guess[0]}' if guess else ''}"
            continue
        if not there:
            found[name] = f"{name}: no such files"
    return found


def sources(job: Any) -> list[str]:
    """Return the files that a job names: `data.train` and `data.valid`, or `data` and `inputs` that are lists."""
    data = getattr(job, "data", None)
    if data is None or isinstance(data, list):
        named = list(data or [])
    else:
        held_out = getattr(data, "valid", ()) if getattr(data, "holds_out", True) else ()  # `none` is no file
        named = [*getattr(data, "train", ()), *held_out]
    inputs = getattr(job, "inputs", None)
    return [*named, *(inputs if isinstance(inputs, list) else ())]


def _of_vessels(job: Any, name: str) -> None:
    from anabatic.trajectory import read  # numpy, which nothing else needs here

    read.files([name])


def _found(job: Any, name: str) -> tuple[spec.Source, list[Path]]:
    source = spec.parse(name)
    if spec.kind(source) == "task":
        tasks.find(source.path.removeprefix("task:"))
    return source, spec.files(source) if spec.kind(source) in ("file", "folder", "glob") else []


def _documents(job: Any, name: str) -> list[Document]:
    """Return the first documents of a source, of its first file alone."""
    _, paths = _found(job, name)
    if not paths or paths[0].name.lower().endswith(_WHOLE):
        return []
    columns = Columns(job.data.text_column, tuple(sorted(job.data.columns.items())))
    reader = reader_for(paths[0])
    assert reader is not None  # `files` keeps only those that have one
    found: list[Document] = []
    form = Form()
    for item in _read(itertools.islice(reader(paths[0], paths[0].name, columns), _FIRST), paths[0]):
        if isinstance(item, Document):
            found, form = [*found, item], item.form
        elif job.data.on_bad_row == "fail":
            item.after(form).fail()
    return found


def _read(items: Iterable[Any], path: Path) -> Iterator[Any]:
    try:
        yield from items
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}", "look at its permissions and its disk") from error


def _pairs(job: Any, name: str) -> None:
    labels = getattr(job, "loss_type", "") == "kto"
    source, paths = _found(job, name)
    rows = _documents(job, name)
    if any(row.messages is None for row in rows) or (paths and paths[0].name.lower().endswith(_WHOLE)):
        wanted = (
            ("answers with labels", "messages and label") if labels else ("pairs of answers", "chosen and rejected")
        )
        raise DataError(f"{source.path} is plain text, not {wanted[0]}", f"name rows of {wanted[1]}")
    for row in rows:
        if row.rejected is None and not (labels and row.label is not None) and job.data.on_bad_row == "fail":
            what = "one answer without a label" if labels else "one answer, where a pair has two"
            hint = '"label" is true or false' if labels else 'a pair is "prompt", "chosen" and "rejected"'
            raise DataError(f"{row.place}: {what}", hint)


def _questions(job: Any, name: str) -> None:
    source, paths = _found(job, name)
    rewards = {each.partition("=")[0] for each in job.rewards}
    room = job.batch.length - 1
    long, rows = LongRows(f"{name}: questions", room, job.data.long_share), 0
    for row in itertools.islice(_asked(job, paths, job.data.columns, job.data.on_bad_row), source.rows or _QUESTIONS):
        rows += 1
        if row.messages is None:
            raise DataError(
                f"{row.place}: plain text, not a question", "give rows with a prompt, query, question or messages"
            )
        if "answer" in rewards and not (row.label or "").strip():
            raise DataError(
                f"{row.place}: the row has no answer, and the reward is `answer`",
                "give rows an answer, or name another reward",
            )
        length = sum(len(turn.get("content") or "") for turn in row.messages) // _CHARS
        if length > room:
            long.add(length, row.place)
    if rows < _QUESTIONS or long.count > max(0.5, long.share) * rows:  # of more rows the first may not be like the rest
        _require(long, rows)


def _require(long: LongRows, rows: int) -> None:
    if long.too_many(rows):
        long.require(rows, "raise batch.seq_len, if the model has the positions")


def _asked(job: Any, paths: list[Path], columns: dict[str, str], on_bad_row: str) -> Iterator[asked.Asked]:
    for item in asked.read([str(path) for path in paths], columns):
        if isinstance(item, asked.Asked):
            yield item
        elif on_bad_row == "fail":
            item.fail()


def _inputs(job: Any, name: str) -> None:
    found = itertools.islice(_asked(job, [Path(name)], job.columns, job.on_bad_row), _FIRST)
    if not any(True for _ in found):
        raise DataError(f"{name}: there is no row", "give files with rows")


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "tokenizer train": _documents,
    "tokenizer eval": _documents,
    "pretrain": _documents,
    "sft": _documents,
    "dpo": _pairs,
    "reward": _pairs,
    "rl": _questions,
    "eval": _documents,
    "infer": _inputs,
}
_WEIGHED = ("pretrain", "sft", "dpo", "reward")
_CLASSES = ("classify train", "classify pretrain")
