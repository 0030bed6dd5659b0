"""`anabatic classify map`: vessels on a page, coloured by their class, errors marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anabatic.config.classify_map import ClassifyMapJob
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.paths import file_atomic, output_file, write_atomic
from anabatic.trajectory import map_page, maps
from anabatic.trajectory.maps import Drawn
from anabatic.trajectory.read import WORDS, files
from anabatic.trajectory.rows import BadRows
from anabatic.trajectory.tracks import open_tracks
from anabatic.trajectory.word_rows import objects, prediction_rows, read_rows

OTHER = "choose another file with --out FILE"


def run(job: ClassifyMapJob) -> None:
    """Write the page and its GeoJSON.

    Raises:
        DataError: an input cannot be read, or has no position.
        Failure: a file cannot be written, or a library is missing.
    """
    bad = BadRows(job.tracks.on_bad_row == "skip")
    inputs = files(job.inputs)
    rows = [path for path in inputs if path.name.lower().endswith(WORDS)]
    tables = [path for path in inputs if path not in rows]
    predictions = [path for path in rows if _predicts(path, bad)]
    told = [row for path in predictions for row in prediction_rows(path, bad)]
    words = [path for path in rows if path not in predictions]
    if not tables and not words and not all(row.get("original_text") for row in told):
        raise DataError(
            f"{predictions[0]}: predictions without words hold no position", "name the AIS files beside them"
        )
    vessels = _vessels(job, tables, words or predictions, bad)
    missing = maps.predict(vessels, told)
    if missing:
        log.warn(f"{missing:,} predicted vessels are not among the points")
    chosen = sorted(vessels.values(), key=lambda drawn: not drawn.wrong)
    drawn, left_out = chosen[: job.max_vessels], max(0, len(chosen) - job.max_vessels)
    out = output_file(job.out, "map.html")
    page = map_page.PAGES[job.tiles](drawn, out.stem.replace("_", " "), left_out)
    with file_atomic(out.with_suffix(".geojson"), OTHER) as file:
        file.writelines(maps.geojson(drawn))
    write_atomic(out, page, OTHER)
    log.info(map_page.summary(drawn, left_out))
    log.info(f"wrote {out} and {out.with_suffix('.geojson')}")


def _predicts(path: Path, bad: BadRows) -> bool:
    """True for rows of predictions: the first row tells."""
    first: dict[str, Any] = next((row for _, row in objects(path, bad)), {})
    return "predicted_class" in first


def _vessels(job: ClassifyMapJob, tables: list[Path], words: list[Path], bad: BadRows) -> dict[str, Drawn]:
    """Points from AIS files, else from rows with words."""
    if tables:
        with open_tracks(tables, job.tracks, bad) as tracks:
            vessels = maps.from_tracks(tracks)
    else:
        segments = read_rows(words, job.tracks, None, bad)
        if segments.spec.format == "motion":
            raise DataError(
                f"{words[0]}: words of the format motion hold no position",
                "name the AIS files beside it, or write the words as compact, cell or char",
            )
        vessels = maps.from_segments(segments, segments.classes, segments.spec)
    if not vessels:
        raise DataError("no vessel to draw", "give AIS files, rows of words or predictions")
    return vessels
