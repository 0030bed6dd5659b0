"""Rows of words: the source project's JSONL, with or without the extra keys of this project, and its masked rows."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from anabatic.core import json_reader, log
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.json_reader import to_finite_number as finite_number
from anabatic.data.readers.file_formats import iter_numbered_lines, open_lines
from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.io.class_labels import require_known_label, resolve_classes
from anabatic_vessels.io.column_names import list_names
from anabatic_vessels.io.track import UNREADABLE_ROWS, BadRowPolicy
from anabatic_vessels.words.kinematic_features import FEATURE_NAMES
from anabatic_vessels.words.segments import Segment, SegmentSet
from anabatic_vessels.words.vocabulary import (
    SOURCE_CLASSES,
    WordSpec,
    build_vocabulary,
    count_points,
    strip_class_words,
)

_FORMAT_MARKS = (("H3_CHAR_", "char"), ("H3_cell_", "cell"), ("TURN_", "motion"), ("DT_", "compact"))
"""Word prefixes that identify the format of a row without the key `words`."""
_KNOWN_KEYS = frozenset(
    ("text", "original_text", "input_text", "labels", "label", "original_label", "true_label", "class", "vessel")
    + ("source_file", "start", "window", "words", "features", "place", "h3_method", "segment_length")
)
"""Keys of rows of words, also those of the source project that are not needed."""
_NO_VESSEL = "rows that name no vessel (each is taken for one of its own)"
MAX_CLASSES = 10_000
MAX_UNKNOWN_FRACTION = 0.01
"""Fraction of unknown words above which a warning is logged."""


class RejectedRowError(ValueError):
    """A row is invalid; `hint` says how to fix it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def read_word_rows(
    paths: Sequence[Path], settings: TrackSettings, expected_spec: WordSpec | None, bad_rows: BadRowPolicy
) -> SegmentSet:
    """Read rows of words.

    Raises:
        DataError: a row is broken, its words differ from the other rows or `expected_spec`, or its class is unknown.
    """
    parsed: list[tuple[Segment, str, str]] = []
    spec = expected_spec
    for path in paths:
        unused, before = Counter[str](), bad_rows.counts.copy()
        for line_number, row in read_objects(path, bad_rows):
            location = f"{path}: line {line_number}"
            if "predicted_class" not in row:
                unused.update(row.keys() - _KNOWN_KEYS)
            try:
                spec = _resolve_word_spec(row, spec, location)
                segment, name = _parse_segment(row, path, line_number, settings, bad_rows)
                parsed.append((segment, name, location))
            except RejectedRowError as error:
                bad_rows.report_row(f"{location}: {error}", error.hint)
        if unused:
            keys = [f"{key} ({count:,} rows)" for key, count in sorted(unused.items())]
            log.warn(f"{path}: {len(unused)} keys are not used: {list_names(keys)}")
        for reason in (UNREADABLE_ROWS, _NO_VESSEL):
            if count := bad_rows.counts[reason] - before[reason]:
                log.warn(f"{path}: {count:,} {reason}")
    if not parsed or spec is None:
        raise DataError(f"{paths[0]}: no row of words", 'a row looks like {"text": "YEAR_2021 ...", "label": 0}')
    classes, rows = _label_segments(parsed, settings, bad_rows)
    _count_unknown(rows, replace(spec, classes=classes), bad_rows)
    return SegmentSet(rows, classes, replace(spec, classes=classes), bad_rows)


def read_objects(path: Path, bad_rows: BadRowPolicy) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the object of each line of a JSONL file.

    Raises:
        DataError: a line is broken, or the file cannot be read.
    """
    try:
        with closing(open_lines(path)) as stream:
            for line_number, _, line in iter_numbered_lines(stream):
                if isinstance(line, int):
                    bad_rows.report_row(f"{path}: line {line_number}: {line:,} bytes long", "one segment is a row")
                elif line.strip():
                    row = _parse_object(line)
                    if isinstance(row, dict):
                        yield line_number, row
                    else:
                        bad_rows.report_row(f"{path}: line {line_number}: {row}", "write one JSON object a line")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}", "the file is cut short or damaged") from error


def read_prediction_rows(path: Path, bad_rows: BadRowPolicy) -> Iterator[dict[str, Any]]:
    """Yield the rows of predictions.

    Raises:
        DataError: a row has no predicted class; `null` means that the classifier abstained.
    """
    for line_number, row in read_objects(path, bad_rows):
        if "predicted_class" in row and isinstance(row["predicted_class"], (int, type(None))):
            yield row
        else:
            bad_rows.report_row(
                f"{path}: line {line_number}: no predicted_class", "give rows that `anabatic classify predict` wrote"
            )


def _parse_object(line: bytes) -> dict[str, Any] | str:
    """Return the object, or an error message."""
    try:
        row = json_reader.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        return f"broken JSON: {error}"
    return row if isinstance(row, dict) else f"{type(row).__name__}, not an object"


def _resolve_word_spec(row: dict[str, Any], spec: WordSpec | None, location: str) -> WordSpec:
    """Return the word spec of a row, which must match that of the previous rows."""
    text = str(row.get("text") or row.get("original_text") or "")
    name = row.get("words")
    if isinstance(name, str):
        try:
            row_spec = WordSpec.parse(name)
        except (ConfigError, DataError) as error:
            raise DataError(f"{location}: {error}", error.hint) from error
    elif not text.strip():
        return spec or WordSpec()
    else:
        format_name = next((format_name for mark, format_name in _FORMAT_MARKS if mark in text), None)
        if format_name is None:
            method = row.get("h3_method", "unknown")
            raise RejectedRowError(
                f"words of no format that is read (h3_method {method})", "make them anew from the AIS files"
            )
        row_spec = WordSpec(format_name, spec.resolution if spec is not None and spec.format == format_name else 10)
    if spec is not None and spec.spec_name != row_spec.spec_name:
        raise DataError(
            f"{location}: words of {row_spec.spec_name} among words of {spec.spec_name}",
            "write the words anew, all of one format",
        )
    return spec or row_spec


def _parse_segment(
    row: dict[str, Any], path: Path, line_number: int, settings: TrackSettings, bad_rows: BadRowPolicy
) -> tuple[Segment, str]:
    """Return the segment and its class as text (`label:...`), empty if the label is a number or missing."""
    text = row.get("text", row.get("original_text"))
    if not isinstance(text, str) or not text.strip():
        raise RejectedRowError(
            "no text", 'a row looks like {"text": "YEAR_2021 ...", "label": 0, "source_file": "a.csv"}'
        )
    stripped = 0
    if not settings.keep_class_word:
        text, stripped = strip_class_words(text)
    bad_rows.counts["class words taken out"] += stripped
    source = str(row.get("source_file") or "")
    vessel = str(row.get("vessel") or Path(source).stem)
    if not vessel:
        bad_rows.counts[_NO_VESSEL] += 1
        vessel = f"{path.name}:{line_number}"
    label, name = _parse_label(row)
    words = text.split()
    points = count_points(words)
    features, pair = _parse_numbers(row, "features", len(FEATURE_NAMES)), _parse_numbers(row, "place", 2)
    position = None if pair is None else (pair[0], pair[1])
    start = row.get("start") if isinstance(row.get("start"), int) else None
    window = row["window"] if type(row.get("window")) is int else 0
    fields = (" ".join(words), label, vessel, source, start, points, features, line_number, position, window)
    return Segment(*fields), name


def _parse_numbers(row: dict[str, Any], key: str, count: int) -> tuple[float, ...] | None:
    """Return a list of numbers of a row; null becomes NaN."""
    values = row.get(key)
    if values is None:
        return None
    is_number_list = isinstance(values, list) and all(value is None or type(value) in (int, float) for value in values)
    if not is_number_list or len(values) != count:
        description = f"{len(values)} numbers" if is_number_list else "no list of numbers"
        raise RejectedRowError(
            f"{key}: {description}, expected {count}", "make the rows anew with `anabatic classify words`"
        )
    finite = map(finite_number, values)
    return tuple(math.nan if value is None else value for value in finite)


def _parse_label(row: dict[str, Any]) -> tuple[int | None, str]:
    label = row.get("label", row.get("original_label", row.get("true_label")))
    name = row.get("class")
    if isinstance(label, str):
        return None, f"label:{label}"
    if isinstance(label, bool) or (label is not None and not isinstance(label, (int, float))):
        raise RejectedRowError(
            f"label {json.dumps(label)[:40]} is no number and no name", "labels are class numbers or names"
        )
    if isinstance(label, float) and not label.is_integer():
        raise RejectedRowError(f"label {label} is no whole number", "labels are class numbers or names")
    if label is not None and not 0 <= label < MAX_CLASSES:
        raise RejectedRowError(f"label {label!r:.40} is no class", f"classes count from 0 to {MAX_CLASSES - 1:,}")
    class_index = None if label is None else int(label)
    return class_index, f"label:{name}" if isinstance(name, str) else ""


def _label_segments(
    parsed: list[tuple[Segment, str, str]], settings: TrackSettings, bad_rows: BadRowPolicy
) -> tuple[tuple[str, ...], list[Segment]]:
    """Set the label of every row to its index in one list of classes."""
    location_by_name: dict[str, str] = {}
    for _, name, location in parsed:
        if name:
            location_by_name.setdefault(name, location)
    numbered_classes = _find_numbered_classes(parsed)
    if settings.classes or not numbered_classes:
        texts = dict(location_by_name)
        classes, class_by_text = resolve_classes(texts, settings, bad_rows)
    else:
        classes, class_by_text = numbered_classes, {f"label:{name}": name for name in numbered_classes}
    index_by_class = {name: index for index, name in enumerate(classes)}
    rows = []
    for segment, name, location in parsed:
        label = index_by_class.get(class_by_text.get(name, "")) if name else segment.label
        if label is None:
            bad_rows.counts["rows without a label"] += 1
        else:
            require_known_label(label, classes, location)
        rows.append(replace(segment, label=label))
    return classes, rows


def class_of(row: dict[str, Any]) -> str | None:
    """Return the class text of a row for `class_labels.resolve_classes`; empty: no readable class.

    None: the class is a number in a list of several classes.
    """
    try:
        label, name = _parse_label(row)
    except RejectedRowError:
        return ""
    return None if label or label == 0 and not name else name


def _find_numbered_classes(parsed: list[tuple[Segment, str, str]]) -> tuple[str, ...]:
    """Return the classes of rows that have both a label number and a name; empty: there are none."""
    names: dict[int, str] = {}
    for segment, name, location in parsed:
        if segment.label is None or not name:
            continue
        previous = names.setdefault(segment.label, name.partition(":")[2])
        if previous != name.partition(":")[2]:
            raise DataError(
                f'{location}: label {segment.label} is "{name.partition(":")[2]}" here and "{previous}" before',
                "files of two class lists: name one with --tracks.classes",
            )
    if not names:
        return ()
    if all(label < len(SOURCE_CLASSES) and SOURCE_CLASSES[label] == name for label, name in names.items()):
        return SOURCE_CLASSES
    return tuple(names.get(label, f"class_{label}") for label in range(max(names) + 1))


def _count_unknown(rows: list[Segment], spec: WordSpec, bad_rows: BadRowPolicy) -> None:
    vocabulary, total, unknown = set(build_vocabulary(spec)), 0, Counter[str]()
    for row in rows:
        words = row.text.split()
        total += len(words)
        if not vocabulary.issuperset(words):
            unknown.update(word for word in words if word not in vocabulary)
    bad_rows.counts["words that are not in the vocabulary"] += unknown.total()
    if unknown.total() > total * MAX_UNKNOWN_FRACTION:
        common = ", ".join(f"{word} ({count:,})" for word, count in unknown.most_common(3))
        log.warn(f"{unknown.total():,} of {total:,} words are not in the vocabulary of {spec.spec_name}: {common}")
