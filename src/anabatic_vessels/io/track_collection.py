"""Read AIS files as tracks: gathered by vessel and cleaned, one vessel at a time."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.formatting import parse_whole
from anabatic.core.paths import make_write_error
from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.io import ais_json, ais_tables, class_labels, nmea
from anabatic_vessels.io.ais_tables import ColumnBatch
from anabatic_vessels.io.point_conversion import POINT_DTYPE, PointArray, PointConverter
from anabatic_vessels.io.track import (
    METRES_PER_SECOND_PER_KNOT,
    SLACK_METRES,
    BadRowPolicy,
    Track,
    measure_jumps,
)

_DUPLICATES = "duplicate points (same vessel, same second)"
_JUMPS = "jumps (points out of reach)"
_FOREIGN = "points of ids that no ship has"
_DROPPED = (_DUPLICATES, _JUMPS, _FOREIGN)
"""Reasons for which points of a vessel are removed."""
_VALUE_COLUMNS = ("lat", "lon", "sog", "cog", "heading")


class TrackCollection:
    """The tracks of the files, as an iterator that can be used once.

    Attributes:
        classes: names; the index is the label.
    """

    def __init__(
        self, gatherer: PointGatherer, converter: PointConverter, settings: TrackSettings, bad_rows: BadRowPolicy
    ) -> None:
        self._gatherer = gatherer
        self._converter = converter
        self._settings = settings
        self._bad_rows = bad_rows
        self.classes, self._class_by_text = class_labels.resolve_classes(converter.label_locations, settings, bad_rows)

    def __iter__(self) -> Iterator[Track]:
        """Yield the tracks without jumps; several consecutive ones may belong to one vessel."""
        names, counts = self._converter.vessels.texts, self._bad_rows.counts
        invalid_ids = self._find_foreign_ids()
        for points in self._gatherer.iter_vessels():
            vessel = names[points["vessel"][0]]
            counts["vessels"] += 1
            if vessel in invalid_ids:
                counts[_FOREIGN] += len(points)
                counts["vessels with an id that no ship has"] += 1
                continue
            label = self._find_majority_label(points)
            hulls = split_into_hulls(points, self._settings.max_knots, counts) if self._settings.clean else [points]
            for hull in hulls:
                counts["points"] += len(hull)
                yield self._make_track(vessel, hull, label)
        dropped = {reason: counts[reason] for reason in _DROPPED if counts[reason]}
        if dropped:
            total, reasons = sum(dropped.values()), ", ".join(f"{count:,} {name}" for name, count in dropped.items())
            log.warn(f"{total:,} of {total + counts['points']:,} points of all files are not used: {reasons}")

    def _find_foreign_ids(self) -> set[str]:
        """Return the invalid ship ids; empty if most are invalid, as they are pseudonyms then."""
        names = [name for name in self._converter.vessels.texts if name]
        if self._settings.check_mmsi == "off" or not self._settings.clean:
            return set()
        invalid_ids = {name for name in names if not is_ship_id(name)}
        if self._settings.check_mmsi == "auto" and len(invalid_ids) * 2 > len(names):
            log.info(
                f"{len(invalid_ids):,} of {len(names):,} vessel ids are no MMSI of a ship: taken for"
                " pseudonyms, all kept"
            )
            return set()
        return invalid_ids

    def _find_majority_label(self, points: PointArray) -> str:
        """Return the most frequent class of the points."""
        texts = self._converter.labels.texts
        codes, times = np.unique(points["label"], return_counts=True)
        tally: Counter[str] = Counter()
        for code, count in zip(codes.tolist(), times.tolist(), strict=True):
            name = self._class_by_text.get(texts[code], "")
            if name:
                tally[name] += count
        if len(tally) > 1:
            self._bad_rows.counts["vessels with conflicting types (the most frequent is taken)"] += 1
        if not tally:
            self._bad_rows.counts["vessels without a type"] += 1
        return tally.most_common(1)[0][0] if tally else ""

    def _make_track(self, vessel: str, points: PointArray, label: str) -> Track:
        lat, lon, sog, cog, heading = (points[name].astype(np.float64) for name in _VALUE_COLUMNS)
        source = self._converter.files.texts[points["file"][0]]
        line = int(points["line"][0])
        return Track(vessel, source, points["time"], lat, lon, sog, cog, heading, label, line)


@contextmanager
def open_tracks(paths: Sequence[Path], settings: TrackSettings, bad_rows: BadRowPolicy) -> Iterator[TrackCollection]:
    """Read all points of all files by vessel; points that do not fit in memory go to a temporary folder.

    Raises:
        DataError: a file is not an AIS file, a row cannot be read, or no point remains.
        Failure: the temporary folder is full.
    """
    converter, num_points = PointConverter(settings, bad_rows), 0
    same_columns: Counter[str] = Counter()
    with PointGatherer() as gatherer:
        for path in paths:
            for points in converter.convert_batches(path, read_batches(path, settings, bad_rows)):
                num_points += len(points)
                gatherer.add_points(points)
            extent = converter.extents[path]
            unused = extent.layout.describe_unused()
            same_columns[unused] += 1
            for message in [unused] * (same_columns[unused] == 1 and bool(unused)) + list(extent.iter_warnings()):
                log.warn(f"{path}: {message}")
        for unused, count in same_columns.items():
            if unused and count > 1:
                log.warn(f"{count - 1:,} more files: {unused}")
        if not num_points:
            names = ", ".join(map(str, paths[:3]))
            raise DataError(f"{names}: no point that can be used in {len(paths)} files", _explain_no_points(bad_rows))
        yield TrackCollection(gatherer, converter, settings, bad_rows)


def read_batches(path: Path, settings: TrackSettings, bad_rows: BadRowPolicy) -> Iterator[ColumnBatch]:
    """Return the rows of one AIS file of any kind, in batches.

    Raises:
        DataError: the file is not an AIS file, or a row cannot be read.
    """
    if nmea.is_nmea_file(path):
        return nmea.read_nmea(path, bad_rows)
    if ais_json.is_json_file(path):
        return ais_json.read_messages(path, dict(settings.columns), bad_rows)
    return ais_tables.read_table(path, dict(settings.columns), bad_rows)


def _explain_no_points(bad_rows: BadRowPolicy) -> str:
    summary = ", ".join(f"{count:,} {reason}" for reason, count in bad_rows.counts.items() if count)
    return f"left out: {summary}" if summary else "the files hold a heading only"


MIN_HULL_POINTS = 10
"""Minimum points of a separate hull; fewer are jumps."""
MAX_HULLS = 8
SHIP_ID_RANGE = (200_000_000, 775_999_999)
"""Ids of ships: they start with maritime identification digits 201 to 775 (ITU-R M.585)."""

IndexArray = NDArray[np.intp]


def is_ship_id(vessel: str) -> bool:
    """Return whether an id is a valid ship MMSI."""
    return SHIP_ID_RANGE[0] <= (parse_whole(vessel) or 0) <= SHIP_ID_RANGE[1]


def split_into_hulls(points: PointArray, max_knots: float, counts: Counter[str]) -> list[PointArray]:
    """Split the points of one vessel into parts that a single hull can have sailed.

    A part ends where the next position is out of reach; if reports from two positions alternate, each becomes a part.

    Args:
        points: points of one vessel, sorted by time.
        max_knots: maximum speed of a hull.
        counts: `duplicate points`, `jumps`, `tracks broken at a jump`, `vessels with two hulls under one id`.
    """
    duplicates = np.flatnonzero(np.diff(points["time"]) == 0) + 1
    if len(duplicates):
        counts[_DUPLICATES] += len(duplicates)
        points = np.delete(points, duplicates)
    if len(points) < 2:
        return [points]
    if not measure_jumps(points["time"], points["lat"], points["lon"], max_knots).any():
        return [points]
    hulls = _assign_hulls(points, max_knots * METRES_PER_SECOND_PER_KNOT)
    kept = [hull for hull in hulls if len(hull) >= min(MIN_HULL_POINTS, len(points) // 2)]
    counts[_JUMPS] += len(points) - sum(map(len, kept))
    spans = sorted((int(hull[0]), int(hull[-1])) for hull in kept)
    has_overlap = any(later[0] < earlier[1] for earlier, later in zip(spans, spans[1:], strict=False))
    if len(kept) > 1:
        counts["vessels with two hulls under one id" if has_overlap else "tracks broken at a jump"] += 1
    return [points[hull] for hull in kept]


def _assign_hulls(points: PointArray, speed: float) -> list[IndexArray]:
    """Assign each point to the nearest hull that can have reached it, else to a new one."""
    lat, lon = np.radians(points["lat"]), np.radians(points["lon"])
    positions = np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=1)
    times = points["time"].tolist()
    hulls: list[list[int]] = []
    for index, (position, time) in enumerate(zip(positions, times, strict=True)):
        nearest, nearest_distance = -1, np.inf
        for hull_index, hull in enumerate(hulls):
            chord = float(np.linalg.norm(position - positions[hull[-1]])) * 6_371_008.8
            if chord <= (time - times[hull[-1]]) * speed + SLACK_METRES and chord < nearest_distance:
                nearest, nearest_distance = hull_index, chord
        if nearest >= 0:
            hulls[nearest].append(index)
        else:
            if len(hulls) == MAX_HULLS:
                hulls.remove(min(hulls, key=lambda hull: (len(hull), hull[-1])))
            hulls.append([index])
    return [np.array(hull) for hull in sorted(hulls)]


MAX_POINTS_IN_MEMORY = 2_000_000
"""Points kept in memory before they are written to disk: 112 MB."""
NUM_BUCKETS = 256
"""The bucket of a vessel is its index modulo this number; one bucket at a time is sorted in memory."""


class PointGatherer:
    """Context manager: add batches in any order, then iterate over the vessels."""

    def __init__(self, max_points: int = MAX_POINTS_IN_MEMORY) -> None:
        self._limit = max_points
        self._batches: list[PointArray] = []
        self._count = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> PointGatherer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def add_points(self, points: PointArray) -> None:
        """Add a batch.

        Raises:
            Failure: the temporary folder is full.
        """
        self._batches.append(points)
        self._count += len(points)
        if self._count > self._limit:
            self._spill_to_disk()

    def _spill_to_disk(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="anabatic-tracks-")
        points = np.concatenate(self._batches)
        self._batches, self._count = [], 0
        bucket = points["vessel"] % NUM_BUCKETS
        order = np.argsort(bucket, kind="stable")
        edges = np.searchsorted(bucket[order], np.arange(NUM_BUCKETS + 1))
        try:
            for bucket_index in np.flatnonzero(np.diff(edges)):
                with open(Path(self._folder.name) / str(bucket_index), "ab") as file:
                    points[order[edges[bucket_index] : edges[bucket_index + 1]]].tofile(file)
        except OSError as error:
            hint = "name a folder on a larger disk with TMPDIR"
            raise make_write_error(Path(self._folder.name), error, hint) from error

    def iter_vessels(self) -> Iterator[PointArray]:
        """Yield the points of each vessel, sorted by time, then by file and line."""
        if self._folder is None:
            yield from _split_by_vessel(np.concatenate(self._batches) if self._batches else np.zeros(0, POINT_DTYPE))
            return
        self._spill_to_disk() if self._batches else None
        for bucket_index in range(NUM_BUCKETS):
            path = Path(self._folder.name) / str(bucket_index)
            if path.exists():
                yield from _split_by_vessel(np.fromfile(path, POINT_DTYPE))
                path.unlink()


def _split_by_vessel(points: PointArray) -> Iterator[PointArray]:
    if not len(points):
        return
    order = np.lexsort((points["line"], points["file"], points["time"], points["vessel"]))
    points = points[order]
    edges = np.flatnonzero(np.diff(points["vessel"])) + 1
    yield from np.split(points, edges)
