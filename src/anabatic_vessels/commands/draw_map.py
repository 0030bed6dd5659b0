"""`anabatic classify map`: an HTML map of vessels, coloured by class, with errors marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.paths import open_atomic_file, resolve_output_file, write_atomic
from anabatic_vessels.config.draw_map import ClassifyMapJob
from anabatic_vessels.io.track import BadRowPolicy
from anabatic_vessels.io.track_collection import open_tracks
from anabatic_vessels.maps import drawn_vessels, html_page
from anabatic_vessels.maps.drawn_vessels import DrawnVessel
from anabatic_vessels.words.segment_reader import find_files, holds_words
from anabatic_vessels.words.word_rows import read_objects, read_prediction_rows, read_word_rows

OTHER_FILE_HINT = "choose another file with --out FILE"


def run(job: ClassifyMapJob) -> None:
    """Write the page and its GeoJSON.

    Raises:
        DataError: an input cannot be read, or has no position.
        Failure: a file cannot be written, or a library is missing.
    """
    bad_rows = BadRowPolicy(job.tracks.on_bad_row == "skip")
    inputs = find_files(job.inputs)
    rows = [path for path in inputs if holds_words(path)]
    tables = [path for path in inputs if path not in rows]
    predictions = [path for path in rows if _holds_predictions(path, bad_rows)]
    prediction_rows = [row for path in predictions for row in read_prediction_rows(path, bad_rows)]
    word_files = [path for path in rows if path not in predictions]
    if not tables and not word_files and not all(row.get("original_text") for row in prediction_rows):
        raise DataError(
            f"{predictions[0]}: predictions without words hold no position", "name the AIS files beside them"
        )
    vessels = _read_drawn_vessels(job, tables, word_files or predictions, bad_rows)
    num_missing = drawn_vessels.add_predictions(vessels, prediction_rows)
    if num_missing:
        log.warn(f"{num_missing:,} predicted vessels are not among the points")
    ordered = sorted(vessels.values(), key=lambda vessel: not vessel.is_wrong)
    visible, num_left_out = ordered[: job.max_vessels], max(0, len(ordered) - job.max_vessels)
    out = resolve_output_file(job.out, "map.html")
    page = html_page.PAGE_RENDERERS[job.tiles](visible, out.stem.replace("_", " "), num_left_out)
    with open_atomic_file(out.with_suffix(".geojson"), OTHER_FILE_HINT) as file:
        file.writelines(drawn_vessels.iter_geojson(visible))
    write_atomic(out, page, OTHER_FILE_HINT)
    log.info(html_page.describe_map(visible, num_left_out))
    log.info(f"wrote {out} and {out.with_suffix('.geojson')}")


def _holds_predictions(path: Path, bad_rows: BadRowPolicy) -> bool:
    """Return whether a file contains predictions, judged by its first row."""
    first_row: dict[str, Any] = next((row for _, row in read_objects(path, bad_rows)), {})
    return "predicted_class" in first_row


def _read_drawn_vessels(
    job: ClassifyMapJob, tables: list[Path], word_files: list[Path], bad_rows: BadRowPolicy
) -> dict[str, DrawnVessel]:
    """Return the vessels with points from AIS files, else from rows of words."""
    if tables:
        with open_tracks(tables, job.tracks, bad_rows) as tracks:
            vessels = drawn_vessels.draw_tracks(tracks)
    else:
        segments = read_word_rows(word_files, job.tracks, None, bad_rows)
        if segments.spec.format == "motion":
            raise DataError(
                f"{word_files[0]}: words of the format motion hold no position",
                "name the AIS files beside it, or write the words as compact, cell or char",
            )
        vessels = drawn_vessels.draw_segments(segments, segments.classes, segments.spec)
    if not vessels:
        raise DataError("no vessel to draw", "give AIS files, rows of words or predictions")
    return vessels
