"""What is said of every source: its rows, what they were taken for, and what was cut or left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from anabatic.core import log
from anabatic.core.formatting import format_count, format_size
from anabatic.data.chat.loss_mask import TruncationStrategy
from anabatic.data.readers.document import Document
from anabatic.data.readers.long_rows import LongRowCounter
from anabatic.data.shards.reader import ShardSet
from anabatic.data.shards.writer import DocumentCounts


class FormatCounter:
    """Counts the rows of each format while they are read.

    Attributes:
        format_counts: name of a format -> `rows` and the `columns` that some of them had.
    """

    def __init__(self) -> None:
        self.format_counts: dict[str, dict[str, Any]] = {}

    def count_documents(
        self, documents: Iterable[Document], counts: DocumentCounts, unread: Callable[[], int]
    ) -> Iterator[Document]:
        """Yield `documents`; at the end `counts` receives the rows that were skipped while reading."""
        for document in documents:
            name, columns = document.row_format
            found = self.format_counts.get(name)
            if found is None:
                found = self.format_counts[name] = {"rows": 0, "columns": []}
            found["rows"] += 1
            found["columns"] += [column for column in columns if column not in found["columns"]]
            yield document
        counts.unread = unread()


_DROP_REASONS = {
    "unread": "bad rows passed over",
    "empty": "empty documents passed over",
    "bad": "malformed conversations passed over",
    "truncated": "conversations too long and cut",
    "split": "conversations too long and split",
    "too_long": "conversations too long and left out",
    "unlearned": "conversations dropped, nothing to learn in what is left",
}


_DROP_ADVICE = {
    "unread": "data.on_bad_row: fail names the first of them",
    "bad": "data.on_bad_row: fail names the first of them",
    "truncated": "raise batch.seq_len to keep more, as far as the model has positions",
    "too_long": "raise batch.seq_len to keep more, as far as the model has positions",
}
_OTHERWISE: dict[TruncationStrategy, str] = {
    "delete": "cut them with --truncation-strategy right",
    "right": "nothing to learn is in what is kept of them: keep their ends with --truncation-strategy left",
    "left": "nothing to learn is in what is kept of them: keep their beginnings with --truncation-strategy right",
    "split": "nothing to learn is in their parts",
}
"""What else can be done about long conversations."""
_ADVICE_FRACTION = 0.05
"""Share of the rows whose loss is worth advice."""


def log_dataset_summary(shards: ShardSet, cached: bool) -> None:
    """Say in one line what a source holds, a warning where something was cut or left out."""
    kept = "conversations" if shards.is_chat else "documents"
    parts = [_describe_formats(shards.meta["formats"], kept)]
    if shards.is_chat:
        parts.append(f"{format_count(shards.num_tokens)} tokens, {format_size(shards.num_bytes)} of text learned")
    else:
        parts.append(f"{format_count(shards.num_tokens)} tokens, {format_size(shards.num_bytes)} of text")
    if shards.meta["split"] == "train" and (held_out := shards.counts["held_out"]):
        parts.append(f"{held_out:,} held out")
    read = max(1, sum(shards.counts[name] for name in ("documents", "empty", "bad", "unread", "too_long")))
    lost = [f"{n:,} {words} ({n / read:.1%})" for name, words in _DROP_REASONS.items() if (n := shards.counts[name])]
    if longest := shards.counts.get("longest"):
        lost.append(f"the longest has {longest:,} tokens")
    much = [advice for name, advice in _DROP_ADVICE.items() if shards.counts[name] > _ADVICE_FRACTION * read]
    parts += lost + much[-1:]
    line = f"data {shards.name} ({shards.meta['split']}): {'; '.join(parts)}"
    (log.warn if lost else log.info)(line + (" (from the cache)" if cached else ""))
    log.debug(f"{shards.name} lies in {shards.path}")


def require_few_too_long(
    sets: Iterable[ShardSet], seq_len: int, max_fraction: float, too_long: TruncationStrategy
) -> None:
    """Make sure that not too many conversations were left out because they are too long.

    Args:
        too_long: what was done with long ones; those that are cut before the assistant speaks are left out, too.

    Raises:
        DataError: of a source more than the share were, and more than one.
    """
    for shards in sets:
        read = sum(shards.counts[name] for name in ("documents", "empty", "bad", "unread", "too_long"))
        long = LongRowCounter(f"data {shards.name}", seq_len, max_fraction)
        long.count, long.longest_tokens = shards.counts["too_long"], shards.counts.get("longest", 0)
        if long.exceeds_limit(read):
            long.check_fraction(read, _OTHERWISE[too_long])


def _describe_formats(formats: dict[str, dict[str, Any]], kept: str) -> str:
    """`1,200 rows as alpaca (instruction, input, output)`; of several formats each with its count."""
    descriptions = [
        f"{one['rows']:,} rows as {name} ({', '.join(one['columns'])})" if name else f"{one['rows']:,} {kept}"
        for name, one in sorted(formats.items(), key=lambda item: -item[1]["rows"])
    ]
    return " + ".join(descriptions) or f"0 {kept}"
