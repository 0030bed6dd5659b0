"""AIS files to tracks: read, gathered by vessel, cleaned, one vessel at a time."""

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
    """What the files hold: the classes are known, the tracks come one by one, once.

    Attributes:
        classes: names; the position is the label.
    """

    def __init__(
        self, gathered: PointGatherer, converter: PointConverter, reading: TrackSettings, bad: BadRowPolicy
    ) -> None:
        self._gathered = gathered
        self._converter = converter
        self._reading = reading
        self._bad = bad
        self.classes, self._class_by_text = class_labels.resolve_classes(converter.label_locations, reading, bad)

    def __iter__(self) -> Iterator[Track]:
        """Yield the pieces that one hull sailed without a jump; several may be of one vessel, one after the other."""
        names, counts = self._converter.vessels.texts, self._bad.counts
        foreign = self._find_foreign_ids()
        for points in self._gathered.iter_vessels():
            vessel = names[points["vessel"][0]]
            counts["vessels"] += 1
            if vessel in foreign:
                counts["points of ids that no ship has"] += len(points)
                counts["vessels with an id that no ship has"] += 1
                continue
            label = self._find_majority_label(points)
            parts = (
                track_cleaning.split_into_hulls(points, self._reading.max_knots, counts)
                if self._reading.clean
                else [points]
            )
            for part in parts:
                counts["points"] += len(part)
                yield self._make_track(vessel, part, label)

    def _find_foreign_ids(self) -> set[str]:
        """Ids that no ship has; none when most are such, for these are pseudonyms."""
        names = [name for name in self._converter.vessels.texts if name]
        if self._reading.check_mmsi == "off" or not self._reading.clean:
            return set()
        found = {name for name in names if not track_cleaning.is_ship_id(name)}
        if self._reading.check_mmsi == "auto" and len(found) * 2 > len(names):
            log.info(
                f"{len(found):,} of {len(names):,} vessel ids are no MMSI of a ship: taken for pseudonyms, all kept"
            )
            return set()
        return found

    def _find_majority_label(self, points: PointArray) -> str:
        """The class that most points name."""
        texts = self._converter.labels.texts
        codes, times = np.unique(points["label"], return_counts=True)
        tally: Counter[str] = Counter()
        for code, count in zip(codes.tolist(), times.tolist(), strict=True):
            name = self._class_by_text.get(texts[code], "")
            if name:
                tally[name] += count
        if len(tally) > 1:
            self._bad.counts["vessels with conflicting types (the most frequent is taken)"] += 1
        if not tally:
            self._bad.counts["vessels without a type"] += 1
        return tally.most_common(1)[0][0] if tally else ""

    def _make_track(self, vessel: str, points: PointArray, label: str) -> Track:
        lat, lon, sog, cog, heading = (points[name].astype(np.float64) for name in _VALUE_COLUMNS)
        source = self._converter.files.texts[points["file"][0]]
        line = int(points["line"][0])
        return Track(vessel, source, points["time"], lat, lon, sog, cog, heading, label, line)


@contextmanager
def open_tracks(paths: Sequence[Path], reading: TrackSettings, bad: BadRowPolicy) -> Iterator[TrackCollection]:
    """Read all points of all files, by vessel; what does not fit in memory waits in a temporary folder.

    Raises:
        DataError: a file is no AIS file, a row cannot be read, or no point is left.
        Failure: the temporary folder is full.
    """
    converter, total = PointConverter(reading, bad), 0
    with PointGatherer() as gathered:
        for path in paths:
            batches = (
                nmea.read_nmea(path, bad)
                if nmea.is_nmea_file(path)
                else ais_tables.read_table(path, dict(reading.columns), bad)
            )
            for points in converter.convert_batches(path, batches):
                total += len(points)
                gathered.add_points(points)
        if not total:
            names = ", ".join(map(str, paths[:3]))
            raise DataError(f"{names}: no point that can be used in {len(paths)} files", _explain_no_points(bad))
        yield TrackCollection(gathered, converter, reading, bad)


def _explain_no_points(bad: BadRowPolicy) -> str:
    left_out = ", ".join(f"{count:,} {what}" for what, count in bad.counts.items() if count)
    return f"left out: {left_out}" if left_out else "the files hold a heading only"
