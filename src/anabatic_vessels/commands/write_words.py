"""`anabatic classify words`: encode AIS files as rows of words."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from anabatic import __version__
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.formatting import format_duration
from anabatic.core.paths import open_atomic_file, resolve_output_file, write_atomic
from anabatic_vessels.config.tracks import ClassifyWordsJob
from anabatic_vessels.io.track import BadRowPolicy
from anabatic_vessels.io.track_collection import open_tracks
from anabatic_vessels.words.segment_reader import AIS_SUFFIXES, find_files, holds_words
from anabatic_vessels.words.segments import as_line, iter_segments, make_word_spec
from anabatic_vessels.words.vocabulary import WordSpec

OTHER_FILE_HINT = "choose another file with --out FILE"


def run(job: ClassifyWordsJob) -> None:
    """Write the rows and the report, each atomically.

    Raises:
        DataError: a file is not an AIS file, a row cannot be read, or no segment remains; names file and line.
        Failure: the file or the temporary folder cannot be written, or a library is missing.
    """
    started, settings = time.monotonic(), job.tracks
    bad_rows = BadRowPolicy(settings.on_bad_row == "skip")
    inputs = [path for path in find_files(job.inputs, AIS_SUFFIXES) if not holds_words(path)]
    if word_files := [name for name in job.inputs if Path(name).is_file() and holds_words(Path(name))]:
        raise DataError(f"{word_files[0]} holds words already", "give AIS tables (.csv, .parquet) or sentences (.nmea)")
    if not inputs:
        raise DataError(f"{job.inputs[0]}: no AIS file", f"kinds: {', '.join(AIS_SUFFIXES)}")
    out = resolve_output_file(job.out, "words.jsonl")
    with open_tracks(inputs, settings, bad_rows) as tracks, open_atomic_file(out, OTHER_FILE_HINT) as file:
        spec = make_word_spec(settings, tracks.classes)
        class_counts: dict[str, int] = dict.fromkeys((*spec.classes, "no class"), 0)
        num_words = num_points = 0
        for segment in iter_segments(tracks, settings, spec, bad_rows):
            file.write(as_line(segment, spec, job.source_keys).encode() + b"\n")
            num_words += segment.text.count(" ") + 1
            num_points += segment.points
            class_counts["no class" if segment.label is None else spec.classes[segment.label]] += 1
        if not bad_rows.counts["segments"]:
            raise DataError(
                f"no segment of {settings.min_points} points or more in {len(inputs)} files",
                _explain_no_segments(bad_rows),
            )
    report = _build_report(inputs, spec, bad_rows, class_counts, num_words / num_points)
    write_atomic(
        out.with_suffix(".report.json"), json.dumps(report, indent=2, ensure_ascii=False) + "\n", OTHER_FILE_HINT
    )
    _log_report(report, out, time.monotonic() - started)


def _explain_no_segments(bad_rows: BadRowPolicy) -> str:
    counts = ", ".join(f"{count:,} {reason}" for reason, count in bad_rows.counts.items() if count)
    return f"lower --tracks.min-points or raise --tracks.gap-minutes; met: {counts}"


def _build_report(
    inputs: list[Path], spec: WordSpec, bad_rows: BadRowPolicy, class_counts: dict[str, int], words_per_point: float
) -> dict[str, Any]:
    counts = {reason: count for reason, count in bad_rows.counts.items() if count}
    totals = {name: counts.pop(name, 0) for name in ("vessels", "points", "segments")}
    return {
        "anabatic": __version__,
        "words": spec.spec_name,
        "classes": list(spec.classes),
        "inputs": [str(path) for path in inputs],
        **totals,
        "words_per_point": round(words_per_point, 2),
        "segments_per_class": {name: count for name, count in class_counts.items() if count},
        "left_out_or_changed": counts,
        "skipped_rows": bad_rows.examples,
    }


def _log_report(report: dict[str, Any], out: Path, seconds: float) -> None:
    """Log the report, one line per fact."""
    points = report["points"]
    log.info(
        f"{report['vessels']:,} vessels, {points:,} points, {report['segments']:,} segments in "
        f"{format_duration(seconds)}"
        f" ({points / max(seconds, 1e-9):,.0f} points/s)"
    )
    for reason, count in report["left_out_or_changed"].items():
        log.info(f"  {count:>9,} {reason}")
    for message in report["skipped_rows"]:
        log.info(f"  skipped: {message}")
    class_counts = ", ".join(f"{name} {count:,}" for name, count in report["segments_per_class"].items())
    log.info(f"segments: {class_counts}")
    counts = out.with_suffix(".report.json").name
    log.info(f"wrote {out} in {report['words']}, {report['words_per_point']} words a point; counts in {counts}")
