"""Files in the shape of the source project's: tables of three vessels, and their 65 segments as rows, three classes."""

from __future__ import annotations

import json
import math
import tempfile
from datetime import datetime, timedelta
from pathlib import Path

from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.words.segment_reader import read_segments
from anabatic_vessels.words.segments import as_row

SHAPE = {"104694": (0, 31), "106674": (6, 32), "103435": (4, 2)}
"""Vessel -> its class and its segments, as the file counts them."""
POINTS = 30


HEAD = "date,lat,lon,sog,cog,class,H3"
RESOLUTION = 10
"""Of the cells in the last column."""


def write_demo(path: Path) -> None:
    """Write the rows of three vessels in the source's words, class words included."""
    with tempfile.TemporaryDirectory() as folder:
        tables = [Path(folder) / f"{vessel}.csv" for vessel in SHAPE]
        for table in tables:
            write_table(table)
        read = read_segments(tables, TrackSettings(format="cell", gap_minutes=0.0, clean=False, keep_class_word=True))
        rows = [as_row(one, read.spec, source_keys_only=True) for one in read]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_table(path: Path) -> None:
    """Write the track of the vessel that the file is named for, in the source's columns."""
    from h3.api import basic_str  # of an extra: files that import this one are also read without it

    label, segments = SHAPE[path.stem]
    lines = [HEAD]
    for point in range(segments * POINTS):
        when = datetime(2021, 9, 17) + timedelta(seconds=70 * point)
        north, east = 59 + 0.2 * math.sin(point / 50), 6 + 0.3 * math.sin(point / 70)
        cell = basic_str.latlng_to_cell(north, east, RESOLUTION)
        lines.append(f"{when},{north:.6f},{east:.6f},{2.0 + 3 * label},{point % 360}.0,{label}.0,{cell}")
    path.write_text("\n".join(lines) + "\n")
