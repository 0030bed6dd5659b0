"""Rows of words: the source project's JSONL, with or without our keys, and its masked rows."""

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

from anabatic.config.vessels.tracks import TrackSettings
from anabatic.core import json_reader, log
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.json_lines import to_finite_number as finite_number
from anabatic.data.readers.text_and_jsonl import iter_numbered_lines, open_lines
from anabatic.vessels.io.bad_rows import BadRowPolicy
from anabatic.vessels.io.class_labels import require_known_label, resolve_classes
from anabatic.vessels.words.kinematic_features import FEATURE_NAMES
from anabatic.vessels.words.segments import Segment, SegmentSet
from anabatic.vessels.words.vocabulary import (
    SOURCE_CLASSES,
    WordSpec,
    build_vocabulary,
    count_points,
    strip_class_words,
)

_FORMAT_MARKS = (("H3_CHAR_", "char"), ("H3_cell_", "cell"), ("TURN_", "motion"), ("DT_", "compact"))
"""Words that tell the format of a row that does not name it."""
MAX_CLASSES = 10_000
MAX_UNKNOWN_FRACTION = 0.01
"""More unknown words than this are warned of."""


class RejectedRowError(ValueError):
    """What is wrong with a row, and how to fix it."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint


def read_word_rows(
    paths: Sequence[Path], reading: TrackSettings, expect: WordSpec | None, bad: BadRowPolicy
) -> SegmentSet:
    """Read rows of words.

    Raises:
        DataError: a row is broken, of other words than the rest or than `expect`, or outside the classes.
    """
    held: list[tuple[Segment, str, str]] = []
    spec = expect
    for path in paths:
        for number, row in read_objects(path, bad):
            place = f"{path}: line {number}"
            try:
                spec = _resolve_word_spec(row, spec, place)
                segment, name = _parse_segment(row, path, number, reading, bad)
                held.append((segment, name, place))
            except RejectedRowError as error:
                bad.report_row(f"{place}: {error}", error.hint)
    if not held or spec is None:
        raise DataError(f"{paths[0]}: no row of words", 'a row looks like {"text": "YEAR_2021 ...", "label": 0}')
    classes, rows = _label_segments(held, reading, bad)
    _count_unknown(rows, replace(spec, classes=classes), bad)
    return SegmentSet(rows, classes, replace(spec, classes=classes), bad)


def read_objects(path: Path, bad: BadRowPolicy) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the object of each line of a JSONL file.

    Raises:
        DataError: a line is broken, or the file cannot be read.
    """
    try:
        with closing(open_lines(path)) as stream:
            for number, _, line in iter_numbered_lines(stream):
                if isinstance(line, int):
                    bad.report_row(f"{path}: line {number}: {line:,} bytes long", "one segment is a row")
                elif line.strip():
                    row = _parse_object(line)
                    if isinstance(row, dict):
                        yield number, row
                    else:
                        bad.report_row(f"{path}: line {number}: {row}", "write one JSON object a line")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}", "the file is cut short or damaged") from error


def read_prediction_rows(path: Path, bad: BadRowPolicy) -> Iterator[dict[str, Any]]:
    """Yield the rows of predictions.

    Raises:
        DataError: a row has no predicted class; `null` is one that the classifier abstained from.
    """
    for number, row in read_objects(path, bad):
        if "predicted_class" in row and isinstance(row["predicted_class"], (int, type(None))):
            yield row
        else:
            bad.report_row(
                f"{path}: line {number}: no predicted_class", "give rows that `anabatic classify predict` wrote"
            )


def _parse_object(line: bytes) -> dict[str, Any] | str:
    """Return the object, or what is wrong."""
    try:
        row = json_reader.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        return f"broken JSON: {error}"
    return row if isinstance(row, dict) else f"{type(row).__name__}, not an object"


def _resolve_word_spec(row: dict[str, Any], spec: WordSpec | None, place: str) -> WordSpec:
    """Return the words of a row, which must be those of the rows before."""
    text = str(row.get("text") or row.get("original_text") or "")
    name = row.get("words")
    if isinstance(name, str):
        try:
            own = WordSpec.parse(name)
        except (ConfigError, DataError) as error:
            raise DataError(f"{place}: {error}", error.hint) from error
    elif not text.strip():
        return spec or WordSpec()
    else:
        kind = next((kind for mark, kind in _FORMAT_MARKS if mark in text), None)
        if kind is None:
            method = row.get("h3_method", "unknown")
            raise RejectedRowError(
                f"words of no format that is read (h3_method {method})", "make them anew from the AIS files"
            )
        own = WordSpec(kind, spec.resolution if spec is not None and spec.format == kind else 10)
    if spec is not None and spec.spec_name != own.spec_name:
        raise DataError(
            f"{place}: words of {own.spec_name} among words of {spec.spec_name}",
            "write the words anew, all of one format",
        )
    return spec or own


def _parse_segment(
    row: dict[str, Any], path: Path, number: int, reading: TrackSettings, bad: BadRowPolicy
) -> tuple[Segment, str]:
    """Return the segment and its class as text (`label:...`), empty where the label is a number or missing."""
    text = row.get("text", row.get("original_text"))
    if not isinstance(text, str) or not text.strip():
        raise RejectedRowError(
            "no text", 'a row looks like {"text": "YEAR_2021 ...", "label": 0, "source_file": "a.csv"}'
        )
    stripped = 0
    if not reading.keep_class_word:
        text, stripped = strip_class_words(text)
    bad.counts["class words taken out"] += stripped
    source = str(row.get("source_file") or "")
    vessel = str(row.get("vessel") or Path(source).stem)
    if not vessel:
        bad.counts["rows that name no vessel (each is taken for one of its own)"] += 1
        vessel = f"{path.name}:{number}"
    label, name = _parse_label(row)
    words = text.split()
    points = count_points(words)
    features, pair = _parse_numbers(row, "features", len(FEATURE_NAMES)), _parse_numbers(row, "place", 2)
    place = None if pair is None else (pair[0], pair[1])
    start = row.get("start") if isinstance(row.get("start"), int) else None
    window = row["window"] if type(row.get("window")) is int else 0
    own = (" ".join(words), label, vessel, source, start, points, features, number, place, window)
    return Segment(*own), name


def _parse_numbers(row: dict[str, Any], key: str, count: int) -> tuple[float, ...] | None:
    """Return a list of numbers of a row; null stands for one that is not known."""
    found = row.get(key)
    if found is None:
        return None
    numbers = isinstance(found, list) and all(one is None or type(one) in (int, float) for one in found)
    if not numbers or len(found) != count:
        what = f"{len(found)} numbers" if numbers else "no list of numbers"
        raise RejectedRowError(f"{key}: {what}, expected {count}", "make the rows anew with `anabatic classify words`")
    known = map(finite_number, found)
    return tuple(math.nan if one is None else one for one in known)


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
    whole = None if label is None else int(label)
    return whole, f"label:{name}" if isinstance(name, str) else ""


def _label_segments(
    held: list[tuple[Segment, str, str]], reading: TrackSettings, bad: BadRowPolicy
) -> tuple[tuple[str, ...], list[Segment]]:
    """Give every row its position in one list of classes."""
    named: dict[str, str] = {}
    for _, name, place in held:
        if name:
            named.setdefault(name, place)
    numbered = _find_numbered_classes(held)
    if reading.classes or not numbered:
        texts = dict(named)
        classes, found = resolve_classes(texts, reading, bad)
    else:
        classes, found = numbered, {f"label:{name}": name for name in numbered}
    positions = {name: index for index, name in enumerate(classes)}
    rows = []
    for segment, name, place in held:
        label = positions.get(found.get(name, "")) if name else segment.label
        if label is None:
            bad.counts["rows without a label"] += 1
        else:
            require_known_label(label, classes, place)
        rows.append(replace(segment, label=label))
    return classes, rows


def class_of(row: dict[str, Any]) -> str | None:
    """Return what names the class of a row, as `class_labels.resolve_classes` takes it; empty: nothing that can be read
    does.

    None: it is a number in a list of several classes.
    """
    try:
        label, name = _parse_label(row)
    except RejectedRowError:
        return ""
    return None if label or label == 0 and not name else name


def _find_numbered_classes(held: list[tuple[Segment, str, str]]) -> tuple[str, ...]:
    """Return the classes that rows with a number and a name spell out; empty: there are none."""
    names: dict[int, str] = {}
    for segment, name, place in held:
        if segment.label is None or not name:
            continue
        known = names.setdefault(segment.label, name.partition(":")[2])
        if known != name.partition(":")[2]:
            raise DataError(
                f'{place}: label {segment.label} is "{name.partition(":")[2]}" here and "{known}" before',
                "files of two class lists: name one with --tracks.classes",
            )
    if not names:
        return ()
    if all(label < len(SOURCE_CLASSES) and SOURCE_CLASSES[label] == name for label, name in names.items()):
        return SOURCE_CLASSES
    return tuple(names.get(label, f"class_{label}") for label in range(max(names) + 1))


def _count_unknown(rows: list[Segment], spec: WordSpec, bad: BadRowPolicy) -> None:
    known, total, unknown = set(build_vocabulary(spec)), 0, Counter[str]()
    for row in rows:
        words = row.text.split()
        total += len(words)
        if not known.issuperset(words):
            unknown.update(word for word in words if word not in known)
    bad.counts["words that are not in the vocabulary"] += unknown.total()
    if unknown.total() > total * MAX_UNKNOWN_FRACTION:
        common = ", ".join(f"{word} ({count:,})" for word, count in unknown.most_common(3))
        log.warn(f"{unknown.total():,} of {total:,} words are not in the vocabulary of {spec.spec_name}: {common}")
