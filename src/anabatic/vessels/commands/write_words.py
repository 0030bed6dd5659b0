"""`anabatic classify words`: AIS files become rows of words."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from anabatic import __version__
from anabatic.config.vessels.words import ClassifyWordsJob
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.formatting import format_duration
from anabatic.core.paths import open_atomic_file, resolve_output_file, write_atomic
from anabatic.vessels.io.bad_rows import BadRowPolicy
from anabatic.vessels.io.track_collection import open_tracks
from anabatic.vessels.words.segment_reader import AIS_SUFFIXES, WORD_SUFFIXES, find_files
from anabatic.vessels.words.segments import as_line, iter_segments, make_word_spec
from anabatic.vessels.words.vocabulary import WordSpec

OTHER_FILE_HINT = "choose another file with --out FILE"


def run(job: ClassifyWordsJob) -> None:
    """Write the rows and the report, both whole or not at all.

    Raises:
        DataError: a file is no AIS file, a row cannot be read, or no segment is left; names file and line.
        Failure: the file or the temporary folder cannot be written, or a library is missing.
    """
    started, reading = time.monotonic(), job.tracks
    bad = BadRowPolicy(reading.on_bad_row == "skip")
    if words := [name for name in job.inputs if name.lower().endswith(WORD_SUFFIXES)]:
        raise DataError(f"{words[0]} holds words already", "give AIS tables (.csv, .parquet) or sentences (.nmea)")
    inputs = find_files(job.inputs, AIS_SUFFIXES)
    out = resolve_output_file(job.out, "words.jsonl")
    with open_tracks(inputs, reading, bad) as tracks, open_atomic_file(out, OTHER_FILE_HINT) as file:
        spec = make_word_spec(reading, tracks.classes)
        per_class: dict[str, int] = dict.fromkeys((*spec.classes, "no class"), 0)
        number_of_words = number_of_points = 0
        for segment in iter_segments(tracks, reading, spec, bad):
            file.write(as_line(segment, spec, job.source_keys).encode() + b"\n")
            number_of_words += segment.text.count(" ") + 1
            number_of_points += segment.points
            per_class["no class" if segment.label is None else spec.classes[segment.label]] += 1
        if not bad.counts["segments"]:
            raise DataError(
                f"no segment of {reading.min_points} points or more in {len(inputs)} files", _explain_no_segments(bad)
            )
    report = _build_report(inputs, spec, bad, per_class, number_of_words / number_of_points)
    write_atomic(
        out.with_suffix(".report.json"), json.dumps(report, indent=2, ensure_ascii=False) + "\n", OTHER_FILE_HINT
    )
    _log_report(report, out, time.monotonic() - started)


def _explain_no_segments(bad: BadRowPolicy) -> str:
    met = ", ".join(f"{count:,} {what}" for what, count in bad.counts.items() if count)
    return f"lower --tracks.min-points or raise --tracks.gap-minutes; met: {met}"


def _build_report(
    inputs: list[Path], spec: WordSpec, bad: BadRowPolicy, per_class: dict[str, int], words_per_point: float
) -> dict[str, Any]:
    counts = {what: count for what, count in bad.counts.items() if count}
    main = {name: counts.pop(name, 0) for name in ("vessels", "points", "segments")}
    return {
        "anabatic": __version__,
        "words": spec.spec_name,
        "classes": list(spec.classes),
        "inputs": [str(path) for path in inputs],
        **main,
        "words_per_point": round(words_per_point, 2),
        "segments_per_class": {name: count for name, count in per_class.items() if count},
        "left_out_or_changed": counts,
        "skipped_rows": bad.examples,
    }


def _log_report(report: dict[str, Any], out: Path, seconds: float) -> None:
    """One line a fact, on stderr."""
    points = report["points"]
    log.info(
        f"{report['vessels']:,} vessels, {points:,} points, {report['segments']:,} segments in "
        f"{format_duration(seconds)}"
        f" ({points / max(seconds, 1e-9):,.0f} points/s)"
    )
    for what, count in report["left_out_or_changed"].items():
        log.info(f"  {count:>9,} {what}")
    for message in report["skipped_rows"]:
        log.info(f"  skipped: {message}")
    share = ", ".join(f"{name} {count:,}" for name, count in report["segments_per_class"].items())
    log.info(f"segments: {share}")
    counts = out.with_suffix(".report.json").name
    log.info(f"wrote {out} in {report['words']}, {report['words_per_point']} words a point; counts in {counts}")
