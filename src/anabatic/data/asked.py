"""Rows that ask for an answer: conversations, questions and texts, without what a row itself answers."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabatic.core import json_text
from anabatic.core.errors import DataError
from anabatic.core.text import did_you_mean
from anabatic.data.document import Columns, Message, Problem
from anabatic.data.formats import question
from anabatic.data.readers import numbered_lines, open_lines
from anabatic.data.rows import listed, no_media, renamed
from anabatic.data.tables import no_key_twice
from anabatic.data.turn_fields import BadRow, encodable, kind_of

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt")
_HINT = "mend the row, or pass over such rows with --on-bad-row skip"
_ASKING = ("prompt", "query", "question", "instruction", "text")
_LABELS = ("response", "output", "completion", "answer", "label")


@dataclass(frozen=True)
class Asked:
    """One row.

    Attributes:
        id: `file:line`, the file as it was named.
        messages: turns that an answer follows; None: `text` is to be continued.
        label: what the row itself answers.
        row: as the file has it, columns renamed.
    """

    id: str
    messages: list[Message] | None
    text: str = ""
    tools: list[dict[str, Any]] | None = None
    label: str | None = None
    row: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """File and line for messages."""
        file, _, line = self.id.rpartition(":")
        return f"{file}: line {line}"


def read(files: list[str], columns: dict[str, str]) -> Iterator[Asked | Problem]:
    """Yield the rows of files, or what is wrong with one, in bounded memory. Blank lines ask nothing.

    Raises:
        DataError: a file is not there, cannot be read to its end, or is of another kind.
    """
    paths = [_checked(file) for file in files]
    names = Columns("text", tuple(sorted(columns.items())))
    for file, path in zip(files, paths, strict=True):
        number = 0
        try:
            with closing(open_lines(path)) as stream:
                for number, _, line in numbered_lines(stream):
                    found = _row(file, path, number, line, names)
                    if found is not None:
                        yield found
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: cannot be read after line {number}: {error}", "write the file again") from error


def _checked(file: str) -> Path:
    path = Path(file).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        near = did_you_mean(path.name, [one.name for one in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise DataError(f"{path} {what}.{near}", f"name files that end in {', '.join(ENDINGS)}")
    if not path.name.lower().endswith(ENDINGS):
        raise DataError(f"{path} is of another kind", f"name files that end in {', '.join(ENDINGS)}")
    return path


def _row(file: str, path: Path, number: int, line: bytes | int, columns: Columns) -> Asked | Problem | None:
    place = f"{path}: line {number}"
    if isinstance(line, int):
        return Problem(f"{place}: {line:,} bytes long", "split the row")
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        if not text.strip():
            return None
        if path.name.lower().endswith(".txt"):
            said = text.rstrip("\r\n")
            return Asked(f"{file}:{number}", [{"role": "user", "content": said}], said)
        return _of(json_text.loads(text, no_key_twice), f"{file}:{number}", columns)
    except UnicodeDecodeError as error:
        return Problem(f"{place}: invalid UTF-8 at byte {error.start} of the line", _HINT)
    except BadRow as error:
        return Problem(f"{place}: {error}", error.hint or _HINT)
    except ValueError as error:
        return Problem(f"{place}: broken JSON: {error}", f"write one JSON object a line; {_HINT}")


def _of(row: Any, name: str, columns: Columns) -> Asked:
    if not isinstance(row, dict):
        raise BadRow(f"the row is {kind_of(row)}, not an object")
    row = renamed(row, columns)
    no_media(row, "--on-bad-row skip")
    label = next((label for key in _LABELS if (label := _label(row.get(key))) is not None), None)
    asked = question(row)
    if asked is None:
        text = row.get("text")
        if not isinstance(text, str) or not text:
            empty = next((key for key in _ASKING if row.get(key) == ""), None)
            if empty:
                raise BadRow(f'column "{empty}" is empty: nothing is asked')
            raise BadRow(
                f"nothing is asked: no messages, conversations, prompt, query, question, instruction or text;"
                f" the row has {listed(row)}"
            )
        return Asked(name, None, encodable(text, 'column "text"'), label=label, row=row)
    turns = asked.messages
    if turns[-1]["role"] == "assistant":
        turns, label = turns[:-1], str(turns[-1]["content"])
    if not turns or turns[-1]["role"] in ("system", "developer"):
        raise BadRow("no user's turn comes before the answer")
    return Asked(name, turns, str(turns[-1]["content"]), asked.tools, label, row)


def _label(value: Any) -> str | None:
    """Return a text, or a number as one."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) else None
