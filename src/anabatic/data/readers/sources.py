"""Data sources: the spec `PATH[#ROWS][@WEIGHT]`, its files, and their documents in bounded memory and in an order set
by names alone.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

from anabatic.config.sections.common import Data
from anabatic.core import log, plugins
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.formatting import did_you_mean
from anabatic.data.builtin import stdlib
from anabatic.data.readers.document import (
    SKIP_HINT,
    ColumnMapping,
    Document,
    Message,
    RowFormat,
    RowIssue,
    SkippedRows,
    is_held_out,
)
from anabatic.data.readers.file_formats import READERS, get_reader
from anabatic.data.readers.row_parsing import locate_media
from anabatic.hub import datasets
from anabatic.hub.dataset_name import (
    SCHEMES,
    is_bare_name,
    is_dataset_spec,
    parse_name,
    read_scheme_variable,
    split_spec,
)

__all__ = [
    "Document",
    "SkippedRows",
    "DataSource",
    "read_documents",
    "chain_documents",
    "list_source_files",
    "is_held_out",
    "source_kind",
    "parse_source",
    "parse_sources",
]

Split = Literal["train", "test"]

_DocumentItems = Iterator["Document | RowIssue"]


def map_columns(data: Data, level_field: str) -> ColumnMapping:
    """Return which column of a file holds what."""
    return ColumnMapping(
        data.text_column, tuple(sorted(data.columns.items())), level_field, getattr(data, "media", None)
    )


def _read_files(source: DataSource, data: Data, split: Split, level_field: str) -> _DocumentItems:
    columns = map_columns(data, level_field)
    for path, name in iter_named_files(source):
        reader = get_reader(path)
        assert reader is not None  # only files that have one are listed
        try:
            yield from reader(path, name, locate_media(columns, path))
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}", "look at its permissions and its disk") from error


def _read_task(source: DataSource, data: Data, split: Split, level_field: str) -> _DocumentItems:
    from anabatic.data.builtin import synthetic_tasks

    name = source.path.partition(":")[2]
    return _number_conversations(source, synthetic_tasks.generate_task_conversations(name, source.rows, split=split))


def _read_stdlib_chat(source: DataSource, data: Data, split: Split, level_field: str) -> _DocumentItems:

    return _number_conversations(source, stdlib.generate_conversations(source.rows))


def _number_conversations(source: DataSource, conversations: Iterator[list[Message]]) -> _DocumentItems:
    for row, messages in enumerate(conversations, start=1):
        yield Document(None, messages, f"{source.path}:{row}")


_SOURCE_READERS: dict[str, Callable[[DataSource, Data, Split, str], _DocumentItems]] = {
    "file": _read_files,
    "folder": _read_files,
    "glob": _read_files,
    "hub": _read_files,
    "stdlib": lambda *given: stdlib.read_source_documents(),
    "docs": lambda *given: stdlib.read_doc_documents(),
    "task": _read_task,
    "chat": _read_stdlib_chat,
}


def read_documents(
    source: DataSource,
    data: Data,
    *,
    split: Split = "train",
    skips: SkippedRows | None = None,
    level_field: str = "",
    max_documents: int | None = None,
) -> Iterator[Document]:
    """Yield a source's documents, in an order that depends only on the names of its files.

    Memory is bounded by one row, or one text file, at a time. Empty files, blank lines and empty texts hold
    no document.

    Args:
        source: what to read.
        data: names the text column and says what happens to a bad row.
        split: `train` or `test` rows of a generated task; other sources are the same for both.
        level_field: column of a file's rows that names their level of difficulty.
        skips: receives the rows skipped under `on_bad_row: skip`; they are also reported as a warning.
        max_documents: no more are wanted: of a data set of a hub, the disk needs room for the files read alone.

    Raises:
        DataError: a path, a file or (under `on_bad_row: fail`) a row cannot be used, or there is no
            document at all.
    """
    skips = SkippedRows() if skips is None else skips
    skipped_before, found = skips.count, 0
    kind = source_kind(source)
    is_partial = kind == "hub" and max_documents is not None and source.rows is None
    read_source = replace(source, rows=max_documents) if is_partial else source
    items = _SOURCE_READERS[kind](read_source, data, split, level_field)
    for found, document in enumerate(select_good_rows(items, data, skips), start=1):
        yield document
        if found == max_documents:
            return
        if found == source.rows:
            break
    report_skipped(source, found, skips, skips.count - skipped_before)


def select_good_rows(items: _DocumentItems, data: Data, skips: SkippedRows) -> Iterator[Document]:
    """Yield the documents; a bad row is an error or counted in `skips`, as `data.on_bad_row` says.

    Raises:
        DataError: a bad row under `on_bad_row: fail`.
    """
    form = RowFormat()
    for item in items:
        if isinstance(item, RowIssue):
            item = item.explain_against_format(form)
            if data.on_bad_row == "fail":
                item.raise_error()
            skips.record_issue(item)
            continue
        form = item.row_format
        yield item


def report_skipped(source: DataSource, found: int, skips: SkippedRows, skipped: int) -> None:
    """Warn of skipped rows and of missing ones, once the whole source was read.

    Raises:
        DataError: there is no document at all.
    """
    first = f"; first: {skips.examples[0]}" if skipped else ""
    if not found:
        reason = f"all {skipped:,} rows are bad{first}" if skipped else "its files hold no rows"
        hint = skips.hint.removesuffix(f", {SKIP_HINT}") if skipped else ""
        raise DataError(
            f"{source.path}: no document: {reason}", hint or "give text, or rows with a text column or messages"
        )
    if skipped and not skips.quiet:
        log.warn(f"{source.path}: skipped {skipped:,} bad rows of {found + skipped:,}{first}")
    if source.rows is not None and found < source.rows:
        log.warn(f"{source.path}: {source.rows:,} rows were asked for, it holds {found:,}")


def chain_documents(sources: list[DataSource], data: Data) -> Iterator[Document]:
    """Chain the documents of several sources."""
    return chain.from_iterable(read_documents(source, data) for source in sources)


_SPEC_PATTERN = re.compile(r"(?P<path>.+?)(?:#(?P<rows>[^#@/.]*))?(?:@(?P<weight>[^@/]*))?", re.DOTALL)
_BUILT_IN_PATTERN = re.compile(r"(?P<scheme>[a-z][a-z0-9_]+):(?P<name>.*)", re.DOTALL)
_HUB_BEGINNINGS = tuple(f"{scheme}:" for scheme in SCHEMES)
_SPEC_USAGE = "write PATH[#ROWS][@WEIGHT], such as corpus.jsonl#2000@0.5"


@dataclass(frozen=True)
class DataSource:
    """One entry of `data.train` or `data.valid`.

    Attributes:
        path: a file, a folder, a glob, a data set of a hub (`hf:OWNER/NAME`), or a built-in source such as `stdlib:`.
        rows: take only the first so many documents.
        weight: share of the tokens, above 0, at most 1; `None` shares what the others leave.
    """

    path: str
    rows: int | None = None
    weight: float | None = None

    def __str__(self) -> str:
        rows = "" if self.rows is None else f"#{self.rows}"
        return f"{self.path}{rows}" + ("" if self.weight is None else f"@{self.weight:g}")


def parse_source(spec: str) -> DataSource:
    """Read `PATH[#ROWS][@WEIGHT]`. A path that exists as written, `#` and `@` included, is taken as written.

    Raises:
        ConfigError: no path, rows that are not a whole number from 1, a weight that is not a share.
    """
    spec = spec.strip()
    if "\x00" in spec:
        raise ConfigError(f"the data source {spec!r} holds a NUL character, which no path has", _SPEC_USAGE)
    if os.path.exists(os.path.expanduser(spec)):
        return DataSource(spec)
    if is_dataset_spec(spec):
        name, rows, weight = split_spec(spec)
        return DataSource(str(name), _parse_row_limit(spec, rows), _parse_weight(spec, weight))
    match = _SPEC_PATTERN.fullmatch(spec)
    if match is None:
        raise ConfigError(f'the data source "{spec}" names no path', _SPEC_USAGE)
    scheme = read_scheme_variable() if _may_be_on_hub(match["path"]) else None
    path = match["path"] if scheme is None else f"{scheme}:{match['path']}"
    return DataSource(path, _parse_row_limit(spec, match["rows"]), _parse_weight(spec, match["weight"]))


def _may_be_on_hub(path: str) -> bool:
    """Return whether `OWNER/NAME` can only be a data set of a hub: no such folder, and no file that would be read."""
    return is_bare_name(path) and get_reader(Path(path)) is None


def _parse_row_limit(spec: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-9][0-9_]*", text) or int(text) < 1:
        raise ConfigError(
            f'"{text}" in "{spec}" is not a number of rows', f"{_SPEC_USAGE}; ROWS is a whole number from 1"
        )
    return int(text)


def _parse_weight(spec: str, text: str | None) -> float | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]*\.?[0-9]+(?:[eE]-?[0-9]+)?", text) or not 0.0 < float(text) <= 1.0:
        raise ConfigError(f'"{text}" in "{spec}" is not a share', f"{_SPEC_USAGE}; WEIGHT is above 0 and at most 1")
    return float(text)


def parse_sources(specs: list[str]) -> list[DataSource]:
    """Parse several specs and check that their weights fit into one whole.

    Raises:
        ConfigError: as `parse_source`; or the weights exceed 1, leave nothing for sources without one, or
            leave a gap.
    """
    sources = [parse_source(spec) for spec in specs]
    weights = [source.weight for source in sources if source.weight is not None]
    total = sum(weights)
    free = len(sources) - len(weights)
    if total > 1.0 + 1e-6:
        raise ConfigError(f"the weights of the data sources add up to {total:g}, more than 1", "lower some of them")
    if weights and free and total > 1.0 - 1e-6:
        raise ConfigError(f"the weights leave nothing for {free} data sources without one", "lower some of them")
    if weights and not free and total < 1.0 - 1e-6:
        raise ConfigError(
            f"the weights of the data sources add up to {total:g}, less than 1",
            f"raise them to 1, or leave out one weight: that source takes the other {1 - total:g}",
        )
    return sources


def names_hub_data(specs: Iterable[str]) -> bool:
    """Return whether a source may be a data set of a hub, by its beginning alone."""
    return any(spec.startswith(_HUB_BEGINNINGS) for spec in specs)


def source_kind(source: DataSource) -> str:
    """Return `file`, `folder`, `glob`, `hub`, `stdlib`, `docs`, `task` or `chat`.

    Raises:
        DataError: nothing is there, or the built-in source is unknown.
    """
    path = Path(source.path).expanduser()
    if os.path.isdir(path):
        return "folder"
    if os.path.exists(path):
        return "file"
    if is_dataset_spec(source.path):
        return "hub"
    built_in = _BUILT_IN_PATTERN.fullmatch(source.path)
    if built_in:
        return _built_in_kind(source, built_in["scheme"], built_in["name"])
    if glob.has_magic(source.path):
        return "glob"
    if os.path.islink(path):
        raise DataError(f"{source.path}: a link to {os.readlink(path)}, which is not there", "fix the link")
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    where = f"the folder {path.parent} is not there either" if not path.parent.is_dir() else "look at the path"
    near = did_you_mean(path.name, siblings) or _suggest_files(path.parent, siblings)
    on_hub = f" A data set of a hub is hf:{source} or ms:{source}." if _may_be_on_hub(source.path) else ""
    raise DataError(f"{source.path}: no such file or folder", f"{where}.{near}{on_hub}")


def _suggest_files(folder: Path, names: list[str]) -> str:
    """Name some files that could be meant."""
    readable = sorted(name for name in names if get_reader(Path(name)) and not name.startswith("."))
    some = ", ".join(readable[:5]) + (f" and {len(readable) - 5} more" if len(readable) > 5 else "")
    return f" There are {some} in {folder}" if len(readable) > 1 else f" There is {some} in {folder}" if some else ""


def _built_in_kind(source: DataSource, scheme: str, name: str) -> str:
    exact = {"stdlib:": "stdlib", "stdlib:docs": "docs", "chat:stdlib": "chat"}
    if source.path in exact:
        return exact[source.path]
    if scheme == "task" and name:
        return "task"
    known = [*exact, "task:NAME", "hf:OWNER/NAME", "ms:OWNER/NAME"]
    raise DataError(
        f'"{source.path}" is neither a file nor a built-in source',
        f"built in are {', '.join(known)}.{did_you_mean(source.path, known)}",
    )


NamedFiles = list[tuple[Path, str]]


def list_source_files(source: DataSource) -> list[Path]:
    """Return the sorted files that a source reads; none for generated conversations.

    Raises:
        DataError: the folder or glob holds no file that can be read.
    """
    return [path for path, _ in list_named_files(source)]


def list_named_files(source: DataSource) -> NamedFiles:
    """Return `list_source_files` with their names relative to the source, which are the first half of document ids.

    Files of a hub that are not in the cache are downloaded.
    """
    kind = source_kind(source)
    return list(iter_named_files(source)) if kind == "hub" else _FILE_FINDERS[kind](source)


def iter_named_files(source: DataSource) -> Iterator[tuple[Path, str]]:
    """Yield what `list_named_files` returns; a file of a hub is downloaded when its turn comes."""
    if source_kind(source) == "hub":
        yield from datasets.iter_local_files(resolve_hub_source(source), reads_all=source.rows is None)
    else:
        yield from list_named_files(source)


def resolve_hub_source(source: DataSource, is_check: bool = False) -> datasets.DatasetSnapshot:
    """Return the files of a source whose kind is `hub`; arguments as of `datasets.resolve_dataset`."""
    return datasets.resolve_dataset(parse_name(source.path), is_check)


def _single_file(source: DataSource) -> NamedFiles:
    path = Path(source.path).expanduser()
    if not path.is_file():
        raise DataError(f"{path}: not a regular file", "a pipe or a device cannot be read twice: write it to a file")
    if get_reader(path) is None:
        raise DataError(f'{path}: unknown extension "{path.suffix}"', _extensions_hint(path))
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty (0 bytes)", "give a file with text")
    return [(path, path.name)]


def _extensions_hint(path: Path) -> str:
    known = [*READERS, *plugins.list_plugins("anabatic.readers")]
    return f"files are read by extension: {', '.join(known)}.{did_you_mean(path.suffix.lower(), known)}"


def _folder_files(source: DataSource) -> NamedFiles:
    base = Path(source.path).expanduser()
    found = [path for folder, names in _walk_visible(base) for name in names if (path := Path(folder, name)).is_file()]
    return _filter_readable(source, base, found)


def _walk_visible(base: Path) -> Iterator[tuple[str, list[str]]]:
    def raise_data_error(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}", "change its permissions or name other files") from error

    for folder, folders, names in os.walk(base, onerror=raise_data_error):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        yield folder, [name for name in names if not name.startswith(".")]


def _glob_files(source: DataSource) -> NamedFiles:
    pattern = os.path.expanduser(source.path)
    fixed = Path(pattern)
    while glob.has_magic(str(fixed)):
        fixed = fixed.parent
    found = [Path(path) for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
    if not found:
        raise DataError(
            f"{source.path}: no file matches",
            f"the pattern starts from {fixed.absolute()}; ** enters folders",
        )
    return _filter_readable(source, fixed, found)


def _filter_readable(source: DataSource, base: Path, found: list[Path]) -> NamedFiles:
    """Keep what has a reader, sorted by relative name; say how many files were left."""
    relative_paths = [(path, path.relative_to(base).as_posix()) for path in found if get_reader(path)]
    others = sorted({path.suffix or path.name for path in found if not get_reader(path)})
    if not relative_paths:
        contents = f"{len(found)} other files ({', '.join(others[:8])})" if found else "no files at all"
        raise DataError(
            f"{source.path}: no file with text, {contents}", f"files are read by extension: {', '.join(READERS)}"
        )
    if others:
        log.debug(f"{source.path}: skipped {len(found) - len(relative_paths)} files ({', '.join(others[:8])})")
    return sorted(relative_paths, key=lambda item: item[1])


def _stdlib_files(source: DataSource) -> NamedFiles:
    return [(path, path.name) for path in stdlib.list_stdlib_files()]


def _no_files(source: DataSource) -> NamedFiles:
    return []


_FILE_FINDERS: dict[str, Callable[[DataSource], NamedFiles]] = {
    "file": _single_file,
    "folder": _folder_files,
    "glob": _glob_files,
    "stdlib": _stdlib_files,
    "docs": _stdlib_files,
    "task": _no_files,
    "chat": _no_files,
}
