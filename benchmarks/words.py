"""Points a second of `anabatic classify words` on one core, and its memory on a table larger than memory is given.

usage: python benchmarks/words.py [--table FILE] [--points 2000000] [--rounds 3] [--large MIB]

Without --table it writes one as large as asked for: vessels in turn, row after row, as NOAA's daily files have them.
With --large the command also turns a CSV of so many MiB into words, in its own process whose peak is told.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.io.track import BadRowPolicy
from anabatic_vessels.io.track_collection import open_tracks
from anabatic_vessels.words.segments import as_line, iter_segments, make_word_spec
from option_types import positive_int

HEADING = "MMSI,BaseDateTime,LAT,LON,SOG,COG,Heading,VesselName,IMO,CallSign,VesselType\n"
TYPES = (30, 31, 36, 37, 60, 70, 80, 90)


def write_table(path: Path, enough: Callable[[int, int], bool], vessels: int = 4000) -> int:
    """Write minutes of a fleet, all vessels in each, until `enough(points, bytes)`; return the points."""
    rng = np.random.default_rng(0)
    lat, lon = rng.uniform(20, 50, vessels), rng.uniform(-125, -65, vessels)
    course, speed = rng.uniform(0, 360, vessels), rng.uniform(0, 15, vessels)
    points, size = 0, 0
    with open(path, "w") as file:
        file.write(HEADING)
        minute = 0
        while not enough(points, size):
            course = (course + rng.normal(0, 5, vessels)) % 360
            lat += speed / 3600 * np.cos(np.radians(course))
            lon += speed / 3600 * np.sin(np.radians(course))
            when = np.datetime_as_string(np.datetime64("2020-01-01") + np.timedelta64(minute, "m"), unit="s")
            text = "".join(
                f"{367000000 + one},{when},{lat[one]:.5f},{lon[one]:.5f},{speed[one]:.1f},{course[one]:.1f},"
                f"{course[one]:.0f},VESSEL {one},IMO{9000000 + one},CALL{one},{TYPES[one % 8]}\n"
                for one in range(vessels)
            )
            size += file.write(text)
            points += vessels
            minute += 1
    return points


def measure(table: Path, kind: str, features: bool, out: Path) -> tuple[int, float, float]:
    """Return points, wall seconds and CPU seconds from the table to rows on disk."""
    reading, bad = TrackSettings(format=kind, features=features), BadRowPolicy()
    wall, cpu = time.perf_counter(), time.process_time()
    with open_tracks([table], reading, bad) as tracks, open(out, "wb") as file:
        spec = make_word_spec(reading, tracks.classes)
        for segment in iter_segments(tracks, reading, spec, bad):
            file.write(as_line(segment, spec).encode() + b"\n")
    return bad.counts["points"], time.perf_counter() - wall, time.process_time() - cpu


def large(folder: Path, mib: int) -> None:
    """Tell time and peak memory of the command on a table of `mib` MiB."""
    table = folder / "large.csv"
    points = write_table(table, lambda _, size: size >= mib * 2**20)
    command = [sys.executable, "-m", "anabatic", "classify", "words", str(table), "-o", str(folder / "large.jsonl")]
    started = time.perf_counter()
    subprocess.run([*command, "--tracks.format", "motion", "--tracks.no-features"], check=True)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"\n{mib} MiB of CSV, {points:,} points: {points / seconds:,.0f} points/s, peak {peak:,.0f} MiB")


def main() -> None:
    """Measure every format, with and without the kinematic numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path)
    parser.add_argument("--points", type=positive_int, default=1_000_000)
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("--large", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = given.table or folder / "table.csv"
        if given.table is None:
            write_table(table, lambda points, _: points >= given.points)
        print("| words | numbers | points/s | points/s of CPU time |\n|---|---|---|---|")
        for kind in ("motion", "compact", "cell", "char"):
            for features in (False, True):
                runs = [measure(table, kind, features, folder / "out.jsonl") for _ in range(given.rounds)]
                wall, cpu = (
                    max(points / run[place] for run in runs) for place, points in ((1, runs[0][0]), (2, runs[0][0]))
                )
                print(f"| {kind} | {'yes' if features else 'no'} | {wall:,.0f} | {cpu:,.0f} |")
        if given.large:
            large(folder, given.large)


if __name__ == "__main__":
    main()
