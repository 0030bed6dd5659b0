"""AIS tables to tracks, one vessel at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anabatic.trajectory.columns import layout
from anabatic.trajectory.track import Track


def tracks(paths: Sequence[Path]) -> Iterator[Track]:
    """Yield the track of each vessel, sorted by time."""
    import pyarrow.csv as csv

    for path in paths:
        table = csv.read_csv(path)
        names = layout(table.column_names, str(path), {}).names
        columns = {ours: table.column(theirs) for ours, theirs in names.items()}
        yield from _by_vessel(path, columns, table.num_rows)


def _by_vessel(path: Path, columns: dict[str, Any], rows: int) -> Iterator[Track]:
    stem = path.name.partition(".")[0]
    vessels = np.asarray(columns["vessel"].to_pylist() if "vessel" in columns else [stem] * rows).astype(str)
    import pyarrow

    time = columns["time"].cast(pyarrow.timestamp("s")).cast(pyarrow.int64()).to_numpy().astype(np.int64)
    blank = np.full(rows, np.nan)
    number = {
        name: columns[name].cast(pyarrow.float64()).to_numpy().astype(np.float64) if name in columns else blank
        for name in ("lat", "lon", "sog", "cog", "heading")
    }
    labels = columns.get("label", columns.get("type"))
    texts = [""] * rows if labels is None else ["" if one is None else str(one) for one in labels.to_pylist()]
    order = np.lexsort((np.arange(rows), time, vessels))
    starts = np.flatnonzero(np.r_[True, vessels[order][1:] != vessels[order][:-1]])
    for first, end in zip(starts, np.r_[starts[1:], rows], strict=True):
        take = order[first:end]
        yield Track(
            str(vessels[take[0]]),
            path.name,
            time[take],
            *(number[name][take] for name in ("lat", "lon", "sog", "cog", "heading")),
            label=texts[take[0]],
            line=int(take.min()) + 2,
        )
