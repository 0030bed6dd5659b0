"""A source as parts of similar size, each read by itself; one after the other they give the documents of the source."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from anabatic.config.sections.common import Data
from anabatic.core import json_reader
from anabatic.core.errors import DataError
from anabatic.core.paths import write_atomic
from anabatic.data.readers.document import WHOLE_FILE, Document, FilePiece, RowIssue, SkippedRows
from anabatic.data.readers.file_formats import PIECE_READERS, get_reader
from anabatic.data.readers.file_pieces import cut_file
from anabatic.data.readers.holdout import SplitRule
from anabatic.data.readers.row_parsing import locate_media
from anabatic.data.readers.sources import (
    DataSource,
    list_named_files,
    map_columns,
    resolve_hub_source,
    select_good_rows,
    source_kind,
)
from anabatic.hub import datasets

MAX_PART_BYTES = 2**27
MIN_PART_BYTES = 2**21
_PARTS_PER_READER = 8
"""Parts for each that reads them, so that all end at nearly the same time."""
_PLAN_VERSION = 1


class SourcePiece(NamedTuple):
    """A file of a source, or a piece of it.

    Attributes:
        path: of the file; empty: a file of a hub, each machine has its own copy.
        name: relative to the source.
    """

    path: str
    name: str
    piece: FilePiece
    num_bytes: int


@dataclass(frozen=True)
class PartPlan:
    """The parts of a source.

    Attributes:
        parts: each with its pieces; none: the source is read as a whole.
        rule: what is held out; None: nothing.
    """

    parts: tuple[tuple[SourcePiece, ...], ...] = ()
    rule: SplitRule | None = None

    def count_bytes(self, number: int) -> int:
        """Return the bytes of a part in its files."""
        return sum(piece.num_bytes for piece in self.parts[number])

    def save(self, path: Path) -> None:
        """Write the plan as JSON."""
        rule = None
        if self.rule is not None:
            rule = {**asdict(self.rule), "chosen": None if self.rule.chosen is None else sorted(self.rule.chosen)}
        write_atomic(path, json.dumps({"version": _PLAN_VERSION, "rule": rule, "parts": self.parts}))

    @classmethod
    def load(cls, path: Path) -> PartPlan:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: there is none.
            DataError: it is damaged or of another version.
        """
        try:
            stored = json_reader.loads(path.read_text(encoding="utf-8"))
            if stored["version"] != _PLAN_VERSION:
                raise ValueError(f"version {stored['version']}")
            rule = stored["rule"]
            if rule is not None:
                chosen = None if rule["chosen"] is None else frozenset(rule["chosen"])
                rule = SplitRule(rule["fraction"], chosen, rule["cuts_texts"])
            parts = tuple(
                tuple(SourcePiece(file, name, FilePiece(*piece), size) for file, name, piece, size in part)
                for part in stored["parts"]
            )
            return cls(parts, rule)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: cannot be read ({error})", "delete the folder; it is made again") from error


def cut_source(source: DataSource, readers: int, advance: Callable[[], None]) -> tuple[tuple[SourcePiece, ...], ...]:
    """Cut a source into parts for some readers; none where it is small, generated, or limited to its first rows.

    `advance` is called often.

    Raises:
        DataError: a file cannot be read.
    """
    kind = source_kind(source)
    if source.rows is not None or kind not in ("file", "folder", "glob", "hub"):
        return ()
    if kind == "hub":
        files = [SourcePiece("", file.path, WHOLE_FILE, file.size) for file in resolve_hub_source(source).files]
    else:
        files = [
            SourcePiece(str(path.absolute()), name, WHOLE_FILE, path.stat().st_size)
            for path, name in list_named_files(source)
        ]
    total = sum(file.num_bytes for file in files)
    part_bytes = min(MAX_PART_BYTES, max(MIN_PART_BYTES, total // (_PARTS_PER_READER * readers)))
    parts: list[list[SourcePiece]] = []
    room = 0
    for file in files:
        for piece in _cut_pieces(file, part_bytes, advance):
            if room <= 0:
                parts.append([])
                room = part_bytes
            parts[-1].append(piece)
            room -= piece.num_bytes
    return tuple(map(tuple, parts)) if len(parts) > 1 else ()


def _cut_pieces(file: SourcePiece, part_bytes: int, advance: Callable[[], None]) -> list[SourcePiece]:
    if not file.path or get_reader(Path(file.path)) not in PIECE_READERS.values():
        return [file]
    try:
        pieces = cut_file(Path(file.path), part_bytes, advance)
    except OSError as error:
        raise DataError(f"{file.path}: {error.strerror or error}", "look at its permissions and its disk") from error
    return [file._replace(piece=piece, num_bytes=file.num_bytes // len(pieces)) for piece in pieces]


def read_part(
    source: DataSource, part: tuple[SourcePiece, ...], data: Data, level_field: str, skips: SkippedRows
) -> Iterator[Document]:
    """Yield the documents of a part; arguments as of `sources.read_documents`.

    Raises:
        DataError: a file or (under `on_bad_row: fail`) a row cannot be used.
    """
    return select_good_rows(_read_pieces(source, part, data, level_field), data, skips)


def _read_pieces(
    source: DataSource, part: tuple[SourcePiece, ...], data: Data, level_field: str
) -> Iterator[Document | RowIssue]:
    columns = map_columns(data, level_field)
    for file in part:
        path = Path(file.path) if file.path else _fetch_hub_file(source, file.name)
        try:
            if file.piece == WHOLE_FILE:
                reader = get_reader(path)
                assert reader is not None  # only files that have one are listed
                yield from reader(path, file.name, locate_media(columns, path))
            else:
                yield from PIECE_READERS[path.suffix.lower()](path, file.name, locate_media(columns, path), file.piece)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}", "look at its permissions and its disk") from error


def _fetch_hub_file(source: DataSource, name: str) -> Path:
    snapshot = resolve_hub_source(source)
    wanted = tuple(file for file in snapshot.files if file.path == name)
    path, _ = next(datasets.iter_local_files(replace(snapshot, files=wanted), reads_all=False))
    return path
