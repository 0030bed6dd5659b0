"""`anabatic data check`: bad rows, duplicates and leaks between training and held-out rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from anabatic.config.data_commands import DataCheckJob
from anabatic.core.errors import DataError
from anabatic.core.formatting import escape_control_characters, to_printable
from anabatic.core.paths import write_atomic
from anabatic.core.progress import ProgressMeter
from anabatic.data.chat.rendering import validate_conversation
from anabatic.data.inspection.duplicates import DuplicateIndex
from anabatic.data.inspection.leaks import LeakIndex
from anabatic.data.inspection.row_text import RowText, read_row_text
from anabatic.data.readers import sources
from anabatic.data.readers.document import Document, RowIssue, SkippedRows
from anabatic.data.readers.holdout import Split, select_split
from anabatic.data.readers.row_use import UnusedColumns
from anabatic.data.vision.picture_rules import MAX_RATIO
from anabatic.data.vision.row_objects import place_objects, split_objects
from anabatic.data.vision.row_pictures import place_pictures
from anabatic.data.vision.video_files import check_source, describe_source

FindingKind = Literal["bad row", "leak", "contradiction", "duplicate", "near duplicate"]
_ERRORS: tuple[FindingKind, ...] = ("bad row", "leak")
_SHOWN = 3
"""Findings of a kind that are printed."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a row.

    Attributes:
        location: file and row.
        other: file and row of the training row that it repeats or is given away by.
        similarity: of a near duplicate, the estimated Jaccard similarity; of a leak of the kind `same text`,
            the share of the held-out row's n-grams that training rows have.
        message: of a bad row, what is wrong; of a leak, what is the same.
    """

    kind: FindingKind
    location: str
    other: str = ""
    similarity: float | None = None
    message: str = ""


@dataclass
class CheckResult:
    """What a check found.

    Attributes:
        held_out: where the held-out rows come from; empty: none are held out.
        num_rejected: training rows whose single answer is marked as a bad one.
    """

    num_training: int = 0
    num_held_out: int = 0
    held_out: str = ""
    num_rejected: int = 0
    findings: list[Finding] = field(default_factory=list)

    def of_kind(self, kind: FindingKind) -> list[Finding]:
        """Return the findings of a kind."""
        return [finding for finding in self.findings if finding.kind == kind]


def run(job: DataCheckJob) -> int:
    """Print what was found; return 1 if there are bad rows or leaks (with `strict`: anything).

    Raises:
        ConfigError, DataError: a source cannot be read.
        Failure: the findings cannot be written.
    """
    result = check_sources(job)
    if job.findings is not None:
        lines = "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in result.findings)
        write_atomic(Path(job.findings).expanduser(), lines, "name another file with --findings")
    if job.json:
        sys.stdout.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")
    else:
        sys.stdout.write("\n".join(_format_result(result, job)) + "\n")
    wrong = result.findings if job.strict else [one for one in result.findings if one.kind in _ERRORS]
    return 1 if wrong else 0


def check_sources(job: DataCheckJob) -> CheckResult:
    """Return what is wrong with the sources.

    Raises:
        ConfigError, DataError: a source cannot be read, or has no good row.
    """
    with ProgressMeter("reading data") as meter:
        return _Check(job, meter).check_rows()


class _Check:
    def __init__(self, job: DataCheckJob, meter: ProgressMeter) -> None:
        self._job, self._meter = job, meter
        self._data = replace(job.data, on_bad_row="skip", media=job.data.media or "")
        self._result = CheckResult()
        self._bad: dict[str, None] = {}
        self._leaks, self._held_out_locations = LeakIndex(), list[str]()
        self._duplicates, self._locations = DuplicateIndex(job.near), list[str]()
        self._first_answers: dict[int, int] = {}

    def check_rows(self) -> CheckResult:
        result, data = self._result, self._data
        training, held_out = sources.parse_sources(self._job.inputs), sources.parse_sources(data.valid)
        shares = data.valid_fraction if not held_out else 0.0
        for source in held_out:
            for document in self._read_good_rows(source, "test"):
                self._add_held_out(document)
        for source in training if shares else ():
            for document in self._read_good_rows(source, "train", "valid"):
                self._add_held_out(document)
        self._leaks.start_training_rows()
        for source in training:
            unused = UnusedColumns()
            for document in self._read_good_rows(source, "train", "train" if shares else None):
                self._add_training(document)
                unused.count_documents([document])
            unused.warn(str(source))
        result.num_training, result.num_held_out = len(self._locations), len(self._held_out_locations)
        if held_out:
            result.held_out = ", ".join(map(str, held_out))
        elif shares:
            result.held_out = f"data.valid_fraction {shares:g} of the training sources"
        result.findings += [*self._find_leaks(), *self._find_duplicates()]
        return result

    def _read_good_rows(
        self, source: sources.DataSource, split: Literal["train", "test"], side: Split | None = None
    ) -> Iterator[Document]:
        """Yield the rows of a source, or of its training or held-out side; bad ones become findings, once each."""

        def read() -> Iterator[Document]:
            recorder = _BadRowRecorder(self._add_bad_row)
            for document in sources.read_documents(source, self._data, split=split, skips=recorder):
                if fault := _find_conversation_fault(document):
                    self._add_bad_row(RowIssue(fault, "", document.location))
                else:
                    yield document

        if side is None:
            return read()
        return select_split(read, self._data.valid_fraction, side)

    def _add_bad_row(self, issue: RowIssue) -> None:
        if issue.message not in self._bad:
            self._bad[issue.message] = None
            self._result.findings.append(Finding("bad row", issue.location, message=issue.message))

    def _add_held_out(self, document: Document) -> None:
        self._leaks.add_held_out(self._read_text(document))
        self._held_out_locations.append(document.location)

    def _add_training(self, document: Document) -> None:
        text, row = self._read_text(document), len(self._locations)
        self._locations.append(document.location)
        self._result.num_rejected += document.label is False and document.rejected is None
        self._leaks.add_training(row, text)
        first = self._duplicates.add_row(text)
        if text.question and document.rejected is None:
            key = text.hash_whole(text.question)
            earlier = self._first_answers.setdefault(key, row)
            if first == row and earlier != row:
                self._result.findings.append(Finding("contradiction", document.location, self._locations[earlier]))

    def _read_text(self, document: Document) -> RowText:
        text = read_row_text(document)
        self._meter.add_chars(len(text.text))
        return text

    def _find_leaks(self) -> Iterator[Finding]:
        for leak in self._leaks.find_leaks():
            held_out, training = self._held_out_locations[leak.row], self._locations[leak.train_row]
            share = round(leak.share, 3) if leak.kind == "same text" else None
            yield Finding("leak", held_out, training, share, leak.kind)

    def _find_duplicates(self) -> Iterator[Finding]:
        for row, first in self._duplicates.exact_duplicates.items():
            yield Finding("duplicate", self._locations[row], self._locations[first])
        near = self._duplicates.find_near_duplicates(self._job.similarity) if self._job.near else {}
        for row, (first, similarity) in near.items():
            yield Finding("near duplicate", self._locations[row], self._locations[first], round(similarity, 3))


def _format_rows(count: int) -> str:
    return f"{count:,} {'row' if count == 1 else 'rows'}"


class _BadRowRecorder(SkippedRows):
    """Calls `record` for every bad row."""

    def __init__(self, record: Callable[[RowIssue], None]) -> None:
        super().__init__(quiet=True)
        self._record = record

    def record_issue(self, problem: RowIssue) -> None:
        """Count one and record it."""
        super().record_issue(problem)
        self._record(problem)


def _find_conversation_fault(document: Document) -> str:
    """Return why a training would refuse a conversation; empty: it would not."""
    pictures, objects = split_objects(document.pictures)
    try:
        if document.pictures:
            place_objects(document.messages or [], objects, document.location)
            place_pictures(document.messages or [], pictures, document.location, [""] * len(pictures))
        for picture in pictures:
            sides = check_source(picture)
            if max(sides) > MAX_RATIO * min(sides):
                what = f"{describe_source(picture)}: one side is more than {MAX_RATIO} times the other"
                raise DataError(f"{document.location}: {what}", "cut the picture")
        for messages in (document.messages, document.rejected):
            if messages is not None:
                validate_conversation(messages, document.location)
    except DataError as error:
        return str(error) if str(error).startswith(document.location) else f"{document.location}: {error}"
    return ""


def _format_result(result: CheckResult, job: DataCheckJob) -> Iterator[str]:
    held_out = f"{result.num_held_out:,} held out ({result.held_out})" if result.held_out else "none held out"
    rows, held = result.num_training, result.num_held_out
    yield f"{_format_rows(rows)} of training data, {held_out}"
    num_read = rows + held + len(result.of_kind("bad row"))
    yield from _format_kind(
        result, "bad row", num_read, "cannot be used", "fix them, or skip them: --data.on-bad-row skip"
    )
    yield from _format_kind(
        result,
        "leak",
        held,
        "held out, but given away by training rows",
        "take the held-out row or the training row out: otherwise the validation loss is too good",
    )
    yield from _format_kind(
        result, "contradiction", rows, "ask what an earlier row asks, and answer otherwise", "keep the better answer"
    )
    yield from _format_kind(result, "duplicate", rows, "repeat an earlier row", "take them out")
    yield from _format_kind(result, "near duplicate", rows, "nearly repeat an earlier row", "look at some of them")
    if result.num_rejected:
        rejected = f"{_format_rows(result.num_rejected)} marked as bad answers (label or kto_tag is false)"
        yield f"note: {rejected}: `dpo --loss-type kto` learns from them, `sft` refuses them"
    if not result.held_out:
        yield "note: no rows are held out, so leaks were not looked for; name held-out data with --held-out"
    if len(result.findings) > _SHOWN and job.findings is None:
        yield "hint: --findings FILE writes all of them, with file and row"
    if not result.findings:
        yield "ok: nothing found"


def _format_kind(result: CheckResult, kind: FindingKind, whole: int, what: str, fix: str) -> Iterator[str]:
    found = result.of_kind(kind)
    if not found:
        return
    level = "error" if kind in _ERRORS else "warning"
    share = f" ({len(found) / whole:.1%})" if whole else ""
    yield f"{level}: {_format_rows(len(found))}{share}: {what}"
    for one in found[:_SHOWN]:
        if kind == "bad row":
            yield f"  {to_printable(one.message)}"
        else:
            share = "" if one.similarity is None else f"{one.similarity:.0%}"
            details = ", ".join(filter(None, (one.message, share)))
            pair = escape_control_characters(f"{one.location} <- {one.other}")
            yield f"  {pair}" + (f" ({details})" if details else "")
    if len(found) > _SHOWN:
        yield f"  and {len(found) - _SHOWN:,} more"
    yield f"hint: {fix}"
