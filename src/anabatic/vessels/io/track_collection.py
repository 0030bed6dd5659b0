"""Read AIS files as tracks: gathered by vessel and cleaned, one vessel at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from anabatic.config.vessels.tracks import TrackSettings
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.vessels.io import ais_tables, class_labels, nmea, track_cleaning
from anabatic.vessels.io.bad_rows import BadRowPolicy
from anabatic.vessels.io.point_conversion import PointArray, PointConverter
from anabatic.vessels.io.point_gatherer import PointGatherer
from anabatic.vessels.io.track import Track

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
                counts["points of ids that no ship has"] += len(points)
                counts["vessels with an id that no ship has"] += 1
                continue
            label = self._find_majority_label(points)
            hulls = (
                track_cleaning.split_into_hulls(points, self._settings.max_knots, counts)
                if self._settings.clean
                else [points]
            )
            for hull in hulls:
                counts["points"] += len(hull)
                yield self._make_track(vessel, hull, label)

    def _find_foreign_ids(self) -> set[str]:
        """Return the invalid ship ids; empty if most are invalid, as they are pseudonyms then."""
        names = [name for name in self._converter.vessels.texts if name]
        if self._settings.check_mmsi == "off" or not self._settings.clean:
            return set()
        invalid_ids = {name for name in names if not track_cleaning.is_ship_id(name)}
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
    with PointGatherer() as gatherer:
        for path in paths:
            batches = (
                nmea.read_nmea(path, bad_rows)
                if nmea.is_nmea_file(path)
                else ais_tables.read_table(path, dict(settings.columns), bad_rows)
            )
            for points in converter.convert_batches(path, batches):
                num_points += len(points)
                gatherer.add_points(points)
        if not num_points:
            names = ", ".join(map(str, paths[:3]))
            raise DataError(f"{names}: no point that can be used in {len(paths)} files", _explain_no_points(bad_rows))
        yield TrackCollection(gatherer, converter, settings, bad_rows)


def _explain_no_points(bad_rows: BadRowPolicy) -> str:
    summary = ", ".join(f"{count:,} {reason}" for reason, count in bad_rows.counts.items() if count)
    return f"left out: {summary}" if summary else "the files hold a heading only"
