"""`anabatic classify map`: vessels on a page, coloured by their class, errors marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anabatic.config.vessels.draw_map import ClassifyMapJob
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.paths import open_atomic_file, resolve_output_file, write_atomic
from anabatic.vessels.io.bad_rows import BadRowPolicy
from anabatic.vessels.io.track_collection import open_tracks
from anabatic.vessels.maps import drawn_vessels, html_page
from anabatic.vessels.maps.drawn_vessels import DrawnVessel
from anabatic.vessels.words.segment_reader import WORD_SUFFIXES, find_files
from anabatic.vessels.words.word_rows import read_objects, read_prediction_rows, read_word_rows

OTHER_FILE_HINT = "choose another file with --out FILE"


def run(job: ClassifyMapJob) -> None:
    """Write the page and its GeoJSON.

    Raises:
        DataError: an input cannot be read, or has no position.
        Failure: a file cannot be written, or a library is missing.
    """
    bad = BadRowPolicy(job.tracks.on_bad_row == "skip")
    inputs = find_files(job.inputs)
    rows = [path for path in inputs if path.name.lower().endswith(WORD_SUFFIXES)]
    tables = [path for path in inputs if path not in rows]
    predictions = [path for path in rows if _holds_predictions(path, bad)]
    told = [row for path in predictions for row in read_prediction_rows(path, bad)]
    words = [path for path in rows if path not in predictions]
    if not tables and not words and not all(row.get("original_text") for row in told):
        raise DataError(
            f"{predictions[0]}: predictions without words hold no position", "name the AIS files beside them"
        )
    vessels = _read_drawn_vessels(job, tables, words or predictions, bad)
    missing = drawn_vessels.add_predictions(vessels, told)
    if missing:
        log.warn(f"{missing:,} predicted vessels are not among the points")
    chosen = sorted(vessels.values(), key=lambda drawn: not drawn.is_wrong)
    drawn, left_out = chosen[: job.max_vessels], max(0, len(chosen) - job.max_vessels)
    out = resolve_output_file(job.out, "map.html")
    page = html_page.PAGE_RENDERERS[job.tiles](drawn, out.stem.replace("_", " "), left_out)
    with open_atomic_file(out.with_suffix(".geojson"), OTHER_FILE_HINT) as file:
        file.writelines(drawn_vessels.iter_geojson(drawn))
    write_atomic(out, page, OTHER_FILE_HINT)
    log.info(html_page.describe_map(drawn, left_out))
    log.info(f"wrote {out} and {out.with_suffix('.geojson')}")


def _holds_predictions(path: Path, bad: BadRowPolicy) -> bool:
    """True for rows of predictions: the first row tells."""
    first: dict[str, Any] = next((row for _, row in read_objects(path, bad)), {})
    return "predicted_class" in first


def _read_drawn_vessels(
    job: ClassifyMapJob, tables: list[Path], words: list[Path], bad: BadRowPolicy
) -> dict[str, DrawnVessel]:
    """Points from AIS files, else from rows with words."""
    if tables:
        with open_tracks(tables, job.tracks, bad) as tracks:
            vessels = drawn_vessels.draw_tracks(tracks)
    else:
        segments = read_word_rows(words, job.tracks, None, bad)
        if segments.spec.format == "motion":
            raise DataError(
                f"{words[0]}: words of the format motion hold no position",
                "name the AIS files beside it, or write the words as compact, cell or char",
            )
        vessels = drawn_vessels.draw_segments(segments, segments.classes, segments.spec)
    if not vessels:
        raise DataError("no vessel to draw", "give AIS files, rows of words or predictions")
    return vessels
