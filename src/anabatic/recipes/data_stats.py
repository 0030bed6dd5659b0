"""`anabatic data stats`: rows, lengths, languages and duplicates of data."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice

import numpy as np

from anabatic.config.data_commands import DataStatsJob
from anabatic.config.sections.common import Data
from anabatic.core import json_reader, log
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.formatting import escape_control_characters, format_size
from anabatic.core.progress import ProgressMeter
from anabatic.data.inspection.duplicates import DuplicateIndex
from anabatic.data.inspection.languages import LanguageSample
from anabatic.data.inspection.row_text import get_turn_text, read_row_text
from anabatic.data.readers import sources
from anabatic.data.readers.document import Document, RowIssue, SkippedRows
from anabatic.data.readers.row_use import UnusedColumns
from anabatic.data.vision.row_objects import split_objects

TokenCounter = Callable[[Sequence[Document]], Iterator[tuple[int, int]]]
"""Rows -> tokens and target tokens of each."""
_BATCH_ROWS = 256
_QUANTILES = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True)
class LengthSummary:
    """Lengths of rows: their sum, mean and quantiles."""

    total: int
    mean: float
    min: int
    median: int
    p90: int
    p99: int
    max: int

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> LengthSummary:
        """Sum up at least one length; quantiles are lengths that occur (nearest rank)."""
        ordered = np.sort(np.asarray(lengths, np.int64))
        ranks = {name: max(0, int(np.ceil(share * len(ordered))) - 1) for name, share in _QUANTILES.items()}
        total = int(ordered.sum())
        return cls(total, total / len(ordered), **{name: int(ordered[rank]) for name, rank in ranks.items()})


@dataclass
class SourceStats:
    """What one source holds.

    Attributes:
        formats: format of rows -> how many were read so; text files have none.
        kinds: text, conversation, pair -> rows.
        num_bytes: UTF-8 bytes of what rows say.
        characters, turns, pictures, tokens: of a row; turns of conversations and pictures of rows that have some
            alone, tokens with a model.
        num_learned: target tokens, with a model.
        num_too_long: rows of more than `seq_len` tokens.
        roles: role -> turns.
        languages: code of ISO 639 -> share of the rows; None: not identified.
        exact_duplicates, near_duplicates: rows that repeat an earlier row of this source or one before it.
        longest: file and row of the longest row.
        unused: column -> rows that had something in it that nothing reads.
        bad_rows: rows that could not be read or rendered, and the first few messages.
    """

    source: str
    rows: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0
    characters: LengthSummary | None = None
    turns: LengthSummary | None = None
    pictures: LengthSummary | None = None
    tokens: LengthSummary | None = None
    num_learned: int | None = None
    num_too_long: int | None = None
    roles: dict[str, int] = field(default_factory=dict)
    languages: dict[str, float] | None = None
    exact_duplicates: int = 0
    near_duplicates: int | None = None
    longest: str = ""
    unused: dict[str, int] = field(default_factory=dict)
    bad_rows: int = 0
    bad_row_examples: list[str] = field(default_factory=list)


def run(job: DataStatsJob) -> int:
    """Print the figures.

    Raises:
        ConfigError, DataError: a source, the tokenizer or the template cannot be used.
    """
    stats = measure_sources(job)
    if job.json:
        tree = {"sources": [asdict(one) for one in stats]}
        sys.stdout.write(json.dumps(json_reader.replace_nonfinite(tree), ensure_ascii=False) + "\n")
    else:
        sys.stdout.write("\n".join(_format_stats(one, job) for one in stats))
    return 0


def measure_sources(job: DataStatsJob) -> list[SourceStats]:
    """Return the figures of each source.

    Raises:
        ConfigError, DataError: as `run`.
    """
    count_tokens = _make_token_counter(job)
    index = DuplicateIndex(job.near)
    measured, starts = [], []
    data = replace(job.data, media=job.data.media or "")
    with ProgressMeter("reading data") as meter:
        for source in sources.parse_sources(job.inputs):
            starts.append(index.num_texts)
            measured.append(_SourceMeasurement(source, count_tokens, index).measure_source(data, job.seq_len, meter))
    near = index.find_near_duplicates() if job.near else {}
    for start, stop, stats in zip(starts, [*starts[1:], index.num_texts], measured, strict=True):
        stats.exact_duplicates = sum(start <= number < stop for number in index.exact_duplicates)
        stats.near_duplicates = sum(start <= number < stop for number in near) if job.near else None
    return measured


def _make_token_counter(job: DataStatsJob) -> TokenCounter | None:
    if job.model is None:
        return None
    from anabatic.recipes import row_tokens  # imports torch

    rows = row_tokens.RowTokenizer(job.model, job.chat_template)
    return lambda batch: row_tokens.count_tokens(batch, rows)


class _SourceMeasurement:
    """Reads one source."""

    def __init__(self, source: sources.DataSource, count_tokens: TokenCounter | None, index: DuplicateIndex) -> None:
        self._source, self._count_tokens, self._index = source, count_tokens, index
        self._stats = SourceStats(str(source))
        self._skipped = SkippedRows(quiet=True)
        self._unused = UnusedColumns()
        self._languages = LanguageSample()
        self._characters, self._turns, self._tokens = array("q"), array("q"), array("q")
        self._pictures = array("q")
        self._num_learned = 0
        self._longest = 0

    def measure_source(self, data: Data, seq_len: int | None, meter: ProgressMeter) -> SourceStats:
        """Return the figures, without those of duplicates."""
        stats = self._stats
        documents = sources.read_documents(self._source, replace(data, on_bad_row="skip"), skips=self._skipped)
        while batch := list(islice(documents, _BATCH_ROWS)):
            self._unused.count_documents(batch)
            meter.add_chars(sum(map(self._add_row, batch)))
            if self._count_tokens is not None:
                self._add_tokens(batch, self._count_tokens)
        stats.bad_rows, stats.bad_row_examples = self._skipped.count, self._skipped.examples
        stats.unused = self._unused.rows
        self._unused.warn(stats.source)
        stats.characters = LengthSummary.from_lengths(self._characters)
        if self._turns:
            stats.turns = LengthSummary.from_lengths(self._turns)
        if self._pictures:
            stats.pictures = LengthSummary.from_lengths(self._pictures)
        if self._tokens:
            stats.tokens, stats.num_learned = LengthSummary.from_lengths(self._tokens), self._num_learned
            stats.num_too_long = None if seq_len is None else sum(length > seq_len for length in self._tokens)
        stats.languages = self._identify_languages()
        return stats

    def _add_row(self, document: Document) -> int:
        """Count a row; return its characters."""
        stats, text = self._stats, read_row_text(document)
        messages = document.messages or []
        kind = "text" if not messages else "conversation" if document.rejected is None else "pair"
        form = [document.row_format.name] if document.row_format.name else []
        for counts, names in (
            (stats.kinds, [kind]),
            (stats.formats, form),
            (stats.roles, [str(turn.get("role")) for turn in messages]),
        ):
            for name in names:
                counts[name] = counts.get(name, 0) + 1
        if messages:
            self._turns.append(len(messages))
        if shown := split_objects(document.pictures)[0]:
            self._pictures.append(len(shown))
        said = "".join(map(get_turn_text, messages)) or text.text
        if not stats.rows or len(said) > self._longest:
            stats.longest, self._longest = document.location, len(said)
        stats.rows += 1
        stats.num_bytes += len(said.encode("utf-8", "surrogatepass"))
        self._characters.append(len(said))
        self._languages.add_text(text.text)
        self._index.add_row(text)
        return len(said)

    def _add_tokens(self, batch: Sequence[Document], count_tokens: TokenCounter) -> None:
        try:
            counts = list(count_tokens(batch))
        except DataError:
            counts = list(chain.from_iterable(self._count_or_skip(document, count_tokens) for document in batch))
        self._tokens.extend(total for total, _ in counts)
        self._num_learned += sum(learned for _, learned in counts)

    def _count_or_skip(self, document: Document, count_tokens: TokenCounter) -> list[tuple[int, int]]:
        try:
            return list(count_tokens([document]))
        except DataError as error:
            self._skipped.record_issue(RowIssue(str(error), error.hint))
            return []

    def _identify_languages(self) -> dict[str, float] | None:
        try:
            return self._languages.identify_languages()
        except ConfigError as error:
            log.warn(f"languages are not identified: {error}\nhint: {error.hint}")
            return None


def _format_stats(stats: SourceStats, job: DataStatsJob) -> str:
    forms = ", ".join(f"{count:,} {name}" for name, count in stats.formats.items())
    kinds = ", ".join(_count_of(count, kind) for kind, count in stats.kinds.items())
    lines = [
        f"{escape_control_characters(stats.source)}: {kinds}, {format_size(stats.num_bytes)}"
        + (f" (rows: {forms})" if forms else "")
    ]
    if stats.bad_rows:
        lines.append(f"  bad rows    {stats.bad_rows:,}; first: {escape_control_characters(stats.bad_row_examples[0])}")
    lines += ["", "                      total       mean      min   median      90%      99%      max"]
    for name in ("characters", "turns", "pictures", "tokens"):
        one: LengthSummary | None = getattr(stats, name)
        if one is not None:
            figures = f"{one.min:>8,} {one.median:>8,} {one.p90:>8,} {one.p99:>8,} {one.max:>8,}"
            lines.append(f"  {name:<12} {one.total:>13,} {one.mean:>10,.1f} {figures}")
    lines += ["", f"  longest     {escape_control_characters(stats.longest)}"]
    if stats.num_learned is not None and stats.tokens is not None:
        lines.append(f"  learned     {stats.num_learned:,} tokens ({_percent(stats.num_learned, stats.tokens.total)})")
    if stats.num_too_long is not None:
        share = _percent(stats.num_too_long, stats.rows)
        lines.append(
            f"  too long    {_count_of(stats.num_too_long, 'row')} ({share}) with more than {job.seq_len:,} tokens"
        )
    if stats.roles:
        lines.append("  roles       " + ", ".join(f"{role} {count:,}" for role, count in stats.roles.items()))
    if stats.languages is not None:
        lines.append("  languages   " + ", ".join(f"{code} {share:.1%}" for code, share in stats.languages.items()))
    exact, share = _count_of(stats.exact_duplicates, "row"), _percent(stats.exact_duplicates, stats.rows)
    repeated = f"{exact} ({share}) the same as an earlier one"
    if stats.near_duplicates is not None:
        repeated += f"; {stats.near_duplicates:,} more ({_percent(stats.near_duplicates, stats.rows)}) nearly the same"
    return "\n".join([*lines, f"  duplicates  {repeated}"]) + "\n"


def _count_of(count: int, kind: str) -> str:
    return f"{count:,} {kind}{'s' if count != 1 else ''}"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0%"
