"""AIS files to tracks: read, gathered by vessel, cleaned, one vessel at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from anabatic.config.reading import Reading
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.trajectory import clean, labels, nmea, tables
from anabatic.trajectory.gather import Gather
from anabatic.trajectory.points import Converter, Points
from anabatic.trajectory.rows import BadRows
from anabatic.trajectory.track import Track

_VALUES = ("lat", "lon", "sog", "cog", "heading")


class Tracks:
    """What the files hold: the classes are known, the tracks come one by one, once.

    Attributes:
        classes: names; the position is the label.
    """

    def __init__(self, gathered: Gather, converter: Converter, reading: Reading, bad: BadRows) -> None:
        self._gathered = gathered
        self._converter = converter
        self._reading = reading
        self._bad = bad
        self.classes, self._class = labels.resolve(converter.label_places, reading, bad)

    def __iter__(self) -> Iterator[Track]:
        """Yield the pieces that one hull sailed without a jump; several may be of one vessel, one after the other."""
        names, counts = self._converter.vessels.texts, self._bad.counts
        foreign = self._foreign()
        for points in self._gathered.vessels():
            vessel = names[points["vessel"][0]]
            counts["vessels"] += 1
            if vessel in foreign:
                counts["points of ids that no ship has"] += len(points)
                counts["vessels with an id that no ship has"] += 1
                continue
            label = self._label(points)
            parts = clean.pieces(points, self._reading.max_knots, counts) if self._reading.clean else [points]
            for part in parts:
                counts["points"] += len(part)
                yield self._track(vessel, part, label)

    def _foreign(self) -> set[str]:
        """Ids that no ship has; none when most are such, for these are pseudonyms."""
        names = [name for name in self._converter.vessels.texts if name]
        if self._reading.check_mmsi == "off" or not self._reading.clean:
            return set()
        found = {name for name in names if not clean.is_ship(name)}
        if self._reading.check_mmsi == "auto" and len(found) * 2 > len(names):
            log.info(
                f"{len(found):,} of {len(names):,} vessel ids are no MMSI of a ship: taken for pseudonyms, all kept"
            )
            return set()
        return found

    def _label(self, points: Points) -> str:
        """The class that most points name."""
        texts = self._converter.labels.texts
        codes, times = np.unique(points["label"], return_counts=True)
        tally: Counter[str] = Counter()
        for code, count in zip(codes.tolist(), times.tolist(), strict=True):
            name = self._class.get(texts[code], "")
            if name:
                tally[name] += count
        if len(tally) > 1:
            self._bad.counts["vessels with conflicting types (the most frequent is taken)"] += 1
        if not tally:
            self._bad.counts["vessels without a type"] += 1
        return tally.most_common(1)[0][0] if tally else ""

    def _track(self, vessel: str, points: Points, label: str) -> Track:
        lat, lon, sog, cog, heading = (points[name].astype(np.float64) for name in _VALUES)
        source = self._converter.files.texts[points["file"][0]]
        line = int(points["line"][0])
        return Track(vessel, source, points["time"], lat, lon, sog, cog, heading, label, line)


@contextmanager
def open_tracks(paths: Sequence[Path], reading: Reading, bad: BadRows) -> Iterator[Tracks]:
    """Read all points of all files, by vessel; what does not fit in memory waits in a temporary folder.

    Raises:
        DataError: a file is no AIS file, a row cannot be read, or no point is left.
        Failure: the temporary folder is full.
    """
    converter, total = Converter(reading, bad), 0
    with Gather() as gathered:
        for path in paths:
            batches = nmea.read(path, bad) if nmea.is_nmea(path) else tables.read(path, dict(reading.columns), bad)
            for points in converter.points(path, batches):
                total += len(points)
                gathered.add(points)
        if not total:
            names = ", ".join(map(str, paths[:3]))
            raise DataError(f"{names}: no point that can be used in {len(paths)} files", _why(bad))
        yield Tracks(gathered, converter, reading, bad)


def _why(bad: BadRows) -> str:
    left_out = ", ".join(f"{count:,} {what}" for what, count in bad.counts.items() if count)
    return f"left out: {left_out}" if left_out else "the files hold a heading only"
