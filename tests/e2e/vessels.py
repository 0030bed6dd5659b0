"""Rows in the shape of the source project's `train_dataset_demo.jsonl`: 65 segments of three vessels, three classes."""

from __future__ import annotations

import json
import math
import tempfile
from datetime import datetime, timedelta
from pathlib import Path

from anabatic.config.vessels.tracks import TrackSettings
from anabatic.vessels.words.segment_reader import read_segments
from anabatic.vessels.words.segments import as_row

SHAPE = {"104694": (0, 31), "106674": (6, 32), "103435": (4, 2)}
"""Vessel -> its class and its segments, as the file counts them."""
POINTS = 30


def write_demo(path: Path) -> None:
    """Write tracks in the source's columns, and their rows in its words, class words included."""
    with tempfile.TemporaryDirectory() as folder:
        tables = []
        for vessel, (label, segments) in SHAPE.items():
            lines = ["date,lat,lon,sog,cog,class"]
            for point in range(segments * POINTS):
                when = datetime(2021, 9, 17) + timedelta(seconds=70 * point)
                north, east = 59 + 0.2 * math.sin(point / 50), 6 + 0.3 * math.sin(point / 70)
                lines.append(f"{when},{north:.6f},{east:.6f},{2.0 + 3 * label},{point % 360}.0,{label}.0")
            tables.append(Path(folder) / f"{vessel}.csv")
            tables[-1].write_text("\n".join(lines) + "\n")
        read = read_segments(tables, TrackSettings(format="cell", gap_minutes=0.0, clean=False, keep_class_word=True))
        rows = [as_row(one, read.spec, source_keys_only=True) for one in read]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
