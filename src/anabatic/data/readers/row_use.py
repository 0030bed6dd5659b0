"""Find columns that nothing reads, answers that must not be learned, and placeholders that were never filled in."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.formatting import to_printable
from anabatic.data.chat.turn_fields import TEXT_FIELDS, BadRowError
from anabatic.data.readers.document import SKIP_HINT, Document, Message

_METADATA = frozenset(
    {  # fmt: skip
        "_id",
        "ability",
        "annotator",
        "author",
        "authors",
        "category",
        "categories",
        "comment",
        "comments",
        "config",
        "configuration",
        "created",
        "crawl",
        "data_source",
        "dataset",
        "date",
        "difficulty",
        "domain",
        "dump",
        "extra",
        "extra_info",
        "extras",
        "file",
        "filename",
        "generator",
        "guid",
        "hash",
        "id",
        "idx",
        "index",
        "info",
        "key",
        "lang",
        "language",
        "languages",
        "length",
        "level",
        "license",
        "line",
        "link",
        "locale",
        "md5",
        "meta",
        "metadata",
        "model",
        "n",
        "note",
        "notes",
        "origin",
        "part",
        "path",
        "revision",
        "row",
        "seed",
        "sha1",
        "sha256",
        "shard",
        "skill",
        "source",
        "sources",
        "split",
        "subject",
        "subset",
        "subtopic",
        "tag",
        "tags",
        "task",
        "time",
        "timestamp",
        "tokens",
        "topic",
        "topics",
        "turn",
        "type",
        "types",
        "updated",
        "uid",
        "uri",
        "url",
        "urls",
        "uuid",
        "version",
        "warc",
        "year",
    }
)
"""Columns that say where a row is from. No program learns from them, so nothing is said of them."""
_METADATA_PARTS = re.compile(
    r"(?!(?:image|video|audio)_)(?:(?:num|n|len)_\w+|meta\w*|__index_level_\d+__|Unnamed: \d+|"
    r"(?:\w+_)?(?:ids?|idx|index|hash|urls?|path|file|name|language|lang|lang_code|language_(?:score|probability)|"
    r"date|at|time|timestamp|count|length|len|source|type|model|version|license|metadata|info))",
    re.IGNORECASE,
)
_TURN_KEYS = frozenset((*TEXT_FIELDS, "role", "tool_calls", "thinking", "weight", "loss"))
"""Keys of a turn that a template or the loss mask reads."""
_MOST_SHOWN = 12
_MAX_DEPTH = 8
"""Levels of nesting that are looked at; deeper values count as not empty."""
_BLANK_TEXTS = ("", "[]", "{}", "null")


def find_unused(row: Mapping[str, Any], used: Collection[str]) -> tuple[str, ...]:
    """Return the columns of a row that have something in them and are neither `used` nor metadata."""
    return tuple(
        name for name, value in row.items() if name not in used and not is_metadata(name) and _has_content(value)
    )


def find_unused_keys(turns: Iterable[Message]) -> tuple[str, ...]:
    """Return keys of turns that no chat template reads, as `messages[].KEY`."""
    found: dict[str, None] = {}
    for turn in turns:
        for key in turn.keys() - _TURN_KEYS:
            if not is_metadata(key) and _has_content(turn[key]):
                found[f"messages[].{key}"] = None
    return tuple(sorted(found))


def is_metadata(name: str) -> bool:
    """Return whether a column says where a row is from, and nothing that could be learned."""
    return name.lower() in _METADATA or not name or _METADATA_PARTS.fullmatch(name) is not None


def _has_content(value: Any, depth: int = 0) -> bool:
    if isinstance(value, str):
        return value.strip() not in _BLANK_TEXTS
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return depth >= _MAX_DEPTH or any(_has_content(item, depth + 1) for item in value)
    return value is not None


class UnusedColumns:
    """Counts the rows of a source by the columns of theirs that were not used.

    Attributes:
        rows: column -> rows that had something in it.
    """

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}

    def count_names(self, names: Iterable[str], rows: int = 1) -> None:
        """Count rows with these columns."""
        for name in names:
            self.rows[name] = self.rows.get(name, 0) + rows

    def count_documents(self, documents: Iterable[Document]) -> None:
        """Count the columns of documents."""
        for document in documents:
            self.count_names(document.row_format.unused)

    def warn(self, source: str) -> None:
        """Say what was not used, if anything was not."""
        if self.rows:
            log.warn(f"{source}: {self.describe_unused()}")

    def describe_unused(self) -> str:
        """Return the columns with the rows of each, the most frequent first."""
        counted = sorted(self.rows.items(), key=lambda item: -item[1])
        named = [
            f'"{to_printable(name)}" ({rows:,} {"row" if rows == 1 else "rows"})'
            for name, rows in counted[:_MOST_SHOWN]
        ]
        more = f" and {len(counted) - _MOST_SHOWN} more" if len(counted) > _MOST_SHOWN else ""
        return f"columns that were not used: {', '.join(named)}{more}"


def require_good_answer(document: Document) -> None:
    """Make sure that a single answer is not marked as a bad one: `sft` would learn it.

    Raises:
        DataError: it is.
    """
    if document.label is False and document.rejected is None:
        raise DataError(
            f"{document.location}: the answer is marked as a bad one (label or kto_tag is false), and would be learned",
            f"learn from both kinds with `anabatic dpo --loss-type kto`, {SKIP_HINT}",
        )


_PLACEHOLDER = re.compile(r"\{\{ ?(NAME|AUTHOR|name|author) ?\}\}")
_TEMPLATE_TEXT = re.compile(
    r"\{\{(?! ?(?:name|author) ?\}\})|\{%|`|<(?!/?think>)|templat|placeholder|模板|占位", re.IGNORECASE
)
"""Rows about templates have such marks; those of self-cognition sets have none."""


def require_names_put_in(turns: Iterable[Message]) -> None:
    """Refuse the rows of self-cognition sets (ms-swift, LLaMA-Factory) in which `{{NAME}}` is to be replaced.

    Raises:
        BadRowError: the assistant (or the system message) says one of them, and the row is not about templates.
    """
    told = [str(turn.get("content") or "") for turn in turns if turn["role"] != "user"]
    found = dict.fromkeys(match[0] for text in told if "{{" in text for match in _PLACEHOLDER.finditer(text))
    if not found or any(_TEMPLATE_TEXT.search(str(turn.get("content") or "")) for turn in turns):
        return
    names = " and ".join(found)
    edits = " ".join(f"-e 's/{name}/YOUR {name.strip('{} ').upper()}/g'" for name in found)
    raise BadRowError(
        f"the row says {names}, which stands for a name and would be learned as it is",
        f"put the names in first: sed {edits} FILE > OWN_FILE, {SKIP_HINT}",
    )
