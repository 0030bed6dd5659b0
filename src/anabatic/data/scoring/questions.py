"""Questions whose answers can be judged: rows of generated tasks and of files, with what the judge needs to know."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabatic.config.sections.common import SourceData
from anabatic.core import log
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.builtin import synthetic_tasks
from anabatic.data.readers import prompts, sources
from anabatic.data.readers.document import Message, RowIssue, hash_id
from anabatic.data.readers.row_use import UnusedColumns

if TYPE_CHECKING:
    from anabatic.data.vision.picture_tensors import PictureGrid

_FILE_KINDS = ("file", "folder", "glob", "hub")


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        id: `file:line`, or `task:NAME:number`.
        messages: the turns that an answer follows.
        answer: what a right answer says; None: the row does not tell.
        task: the generated task it is of; empty: a row of a file.
        row: the row as the file has it.
        tools: JSON schemas of the functions that may be called.
        pictures: paths and data URIs, in the order of the tags in the turns.
        picture_grids: the same with the rows and columns of their patches, once the prompt is encoded.
    """

    id: str
    messages: list[Message]
    answer: str | None = None
    task: str = ""
    row: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    pictures: tuple[str, ...] = ()
    picture_grids: tuple[PictureGrid, ...] = ()

    @property
    def last_turn_text(self) -> str:
        """The last turn."""
        return str(self.messages[-1]["content"])


def load_questions(
    data: SourceData,
    seed: int,
    held_rows: int,
    judged_columns: Collection[str] | None = None,
    media_folder: str | None = None,
) -> tuple[list[Question], list[Question]]:
    """Return the questions to learn from and those held out.

    Held out are the sources of `data.valid`; without them the test split of generated tasks, and of files
    the share `data.valid_fraction`, chosen by the hash of a row's place.

    Args:
        held_rows: of each generated task that is held out.
        judged_columns: what the judge reads beside the answer; None: it may read all. Of others it is said that they
            were not used.
        media_folder: as of `read_prompts`.

    Raises:
        ConfigError, DataError: a source cannot be read, a row asks nothing, or nothing is left.
    """
    train: list[Question] = []
    heldout: list[Question] = []
    for name in data.train:
        source = sources.parse_source(name)
        rows = _questions_of_source(source, data, "train", seed, judged_columns, media_folder)
        if sources.source_kind(source) == "task":
            train += rows
            heldout += (
                [] if data.valid else _questions_of_source(sources.DataSource(source.path, held_rows), data, "test", 0)
            )
            continue
        apart = _choose_held_out_ids(rows, 0.0 if data.valid else data.valid_fraction)
        train += [row for row in rows if row.id not in apart]
        heldout += [row for row in rows if row.id in apart]
    for name in data.valid:
        heldout += _questions_of_source(sources.parse_source(name), data, "test", 0, judged_columns, media_folder)
    if not train:
        raise DataError("data.train holds no question", "give rows with a prompt, query, question or messages")
    return train, heldout


def _questions_of_source(
    source: sources.DataSource,
    data: SourceData,
    split: synthetic_tasks.Split,
    seed: int,
    judged_columns: Collection[str] | None = None,
    media_folder: str | None = None,
) -> list[Question]:
    kind = sources.source_kind(source)
    if kind == "task":
        name = source.path.removeprefix("task:")
        task_rows = synthetic_tasks.generate_task_rows(name, split, source.rows or synthetic_tasks.DEFAULT_ROWS, seed)
        return [
            Question(f"{source.path}:{number}", list(row.messages[:-1]), row.answer, row.task)
            for number, row in enumerate(task_rows, start=1)
        ]
    if kind not in _FILE_KINDS:
        raise ConfigError(f"{source.path} contains no questions", "give task:NAME, or .jsonl files of questions")
    if source.weight is not None:
        raise ConfigError(f"{source} has a weight, and questions are drawn one after another", "leave @WEIGHT out")
    return _questions_of_files(source, data, judged_columns, media_folder)


def _questions_of_files(
    source: sources.DataSource, data: SourceData, judged_columns: Collection[str] | None, media_folder: str | None
) -> list[Question]:
    found: list[Question] = []
    skipped, unused = 0, UnusedColumns()
    paths = [str(path) for path in sources.list_source_files(source)]
    for item in prompts.read_prompts(paths, data.columns, media_folder):
        if source.rows is not None and len(found) >= source.rows:
            break
        if isinstance(item, RowIssue) or item.messages is None:
            what = item.message if isinstance(item, RowIssue) else f"{item.location}: plain text, not a question"
            if data.on_bad_row == "fail":
                raise DataError(what, "fix the row, or skip such rows with --data.on-bad-row skip")
            skipped += 1
            continue
        found.append(Question(item.id, item.messages, item.answer, "", item.row, item.tools, item.pictures))
        if judged_columns is not None:
            unused.count_names(name for name in item.unused if name not in judged_columns)
    if skipped:
        log.warn(f"{skipped:,} rows ask nothing and were skipped")
    unused.warn(f"data {source}")
    return found


def _choose_held_out_ids(rows: list[Question], fraction: float) -> set[str]:
    """Return the ids with the smallest hashes: exactly the share, at least one of two."""
    num_heldout = 0 if fraction == 0 or len(rows) < 2 else max(1, round(len(rows) * fraction))
    return set(sorted((row.id for row in rows), key=_hash_row_id)[:num_heldout])


def _hash_row_id(name: str) -> bytes:
    # The folder may have another name elsewhere: the same rows are held out.
    return hash_id(Path(name).name)
