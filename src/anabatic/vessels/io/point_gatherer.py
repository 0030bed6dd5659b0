"""Points of all files, gathered by vessel: in memory while they are few, else in buckets on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from anabatic.core.paths import make_write_error
from anabatic.vessels.io.point_conversion import POINT_DTYPE, PointArray

MAX_POINTS_IN_MEMORY = 2_000_000
"""Points that are held before they go to disk: 112 MB."""
NUM_BUCKETS = 256
"""A vessel's number modulo this is its bucket; one bucket at a time is sorted in memory."""


class PointGatherer:
    """A context: add batches in any order, then take the vessels one by one."""

    def __init__(self, in_memory: int = MAX_POINTS_IN_MEMORY) -> None:
        self._limit = in_memory
        self._held: list[PointArray] = []
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
        """Take a batch.

        Raises:
            Failure: the temporary folder is full.
        """
        self._held.append(points)
        self._count += len(points)
        if self._count > self._limit:
            self._spill_to_disk()

    def _spill_to_disk(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="anabatic-tracks-")
        points = np.concatenate(self._held)
        self._held, self._count = [], 0
        bucket = points["vessel"] % NUM_BUCKETS
        order = np.argsort(bucket, kind="stable")
        edges = np.searchsorted(bucket[order], np.arange(NUM_BUCKETS + 1))
        try:
            for number in np.flatnonzero(np.diff(edges)):
                with open(Path(self._folder.name) / str(number), "ab") as file:
                    points[order[edges[number] : edges[number + 1]]].tofile(file)
        except OSError as error:
            hint = "name a folder on a larger disk with TMPDIR"
            raise make_write_error(Path(self._folder.name), error, hint) from error

    def iter_vessels(self) -> Iterator[PointArray]:
        """Yield the points of each vessel by time, files and lines in order among equals."""
        if self._folder is None:
            yield from _split_by_vessel(np.concatenate(self._held) if self._held else np.zeros(0, POINT_DTYPE))
            return
        self._spill_to_disk() if self._held else None
        for number in range(NUM_BUCKETS):
            path = Path(self._folder.name) / str(number)
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
