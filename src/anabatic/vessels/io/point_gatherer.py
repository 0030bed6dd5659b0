"""Gather the points of all files by vessel: in memory if they fit, else in buckets on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from anabatic.core.paths import make_write_error
from anabatic.vessels.io.point_conversion import POINT_DTYPE, PointArray

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
