"""What no ship does is counted and taken out; vessels are gathered whole, in memory or on disk."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.core.errors import DataError
from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.io.point_conversion import POINT_DTYPE, PointArray
from anabatic_vessels.io.track import BadRowPolicy, Track
from anabatic_vessels.io.track_collection import PointGatherer, open_tracks, split_into_hulls
from anabatic_vessels.words.segment_reader import read_segments
from anabatic_vessels.words.segments import cut_track

HEADING = "mmsi,timestamp,lat,lon,sog,cog,heading,vessel_type"


def sailed(
    count: int, lat: float = 50.0, lon: float = 1.0, every: int = 60, first: int = 0, vessel: int = 0
) -> PointArray:
    """Points of a hull that goes north at some 11 knots."""
    points = np.zeros(count, POINT_DTYPE)
    points["vessel"] = vessel
    points["time"] = first + every * np.arange(count)
    points["lat"] = lat + 0.003 * np.arange(count) * every / 60
    points["lon"] = lon
    points["line"] = np.arange(count) + 2
    return points


def together(*parts: PointArray) -> PointArray:
    joined = np.concatenate(parts)
    return joined[np.argsort(joined["time"], kind="stable")]


def test_a_clean_track_is_left_alone() -> None:
    counts: Counter[str] = Counter()
    points = sailed(50)
    (same,) = split_into_hulls(points, 80, counts)
    assert (same == points).all()
    assert not +counts


def test_two_hulls_under_one_id() -> None:
    counts: Counter[str] = Counter()
    parts = split_into_hulls(together(sailed(40), sailed(40, lat=-20.0, first=30)), 80, counts)
    assert sorted(np.sign(part["lat"][0]) for part in parts) == [-1, 1]
    assert [len(part) for part in parts] == [40, 40]
    assert +counts == Counter({"vessels with two hulls under one id": 1})


def test_a_jump_and_back_is_one_point_less() -> None:
    counts: Counter[str] = Counter()
    points = sailed(50)
    points["lon"][[17, 30]] = 90.0
    (rest,) = split_into_hulls(points, 80, counts)
    assert len(rest) == 48
    assert counts["jumps (points out of reach)"] == 2


def test_a_track_that_goes_on_elsewhere_is_broken() -> None:
    counts: Counter[str] = Counter()
    first, second = split_into_hulls(together(sailed(30), sailed(30, lat=10.0, first=1800)), 80, counts)
    assert (len(first), len(second)) == (30, 30)
    assert +counts == Counter({"tracks broken at a jump": 1})


def test_duplicates_keep_the_first() -> None:
    counts: Counter[str] = Counter()
    points = together(sailed(20), sailed(5))
    (rest,) = split_into_hulls(points, 80, counts)
    assert (rest["time"] == sailed(20)["time"]).all()
    assert counts["duplicate points (same vessel, same second)"] == 5


def write(tmp_path: Path, rows: list[str]) -> Path:
    path = tmp_path / "a.csv"
    path.write_text("\n".join([HEADING, *rows]) + "\n")
    return path


def row(
    second: int, vessel: object = 367000001, lat: float = 29.5, values: str = "10,90,87", kind: str = "Cargo"
) -> str:
    return f"{vessel},{1_577_836_800 + second},{lat},-94.5,{values},{kind}"


def counted(path: Path, **settings: object) -> tuple[list[Track], Counter[str]]:
    bad = BadRowPolicy()
    with open_tracks([path], TrackSettings(**settings), bad) as tracks:
        return list(tracks), +bad.counts


def test_every_kind_of_impossible_value_has_its_count(tmp_path: Path) -> None:
    rows = [row(10 * step) for step in range(20)]
    rows += [row(201, values="102.3,90,87"), row(202, values="10,360,87"), row(203, values="10,90,511")]
    rows += [row(204, lat=91), row(205, lat=95), f"367000001,{1_577_836_800 + 206},0,0,1,2,3,Cargo"]
    rows += [row(0, vessel=338000002, kind=""), row(300, vessel=123, lat=2), "367000001,,29.5,-94.5,1,2,3,Cargo"]
    tracks, counts = counted(write(tmp_path, rows))
    assert counts == {
        "vessels": 3,
        "points": 24,
        "speeds not available (102.3)": 1,
        "courses not available (360)": 1,
        "headings not available (511)": 1,
        "points with position not available (91, 181)": 1,
        "points out of range": 1,
        "points at 0 N 0 E": 1,
        "points without time or position": 1,
        "points of ids that no ship has": 1,
        "vessels with an id that no ship has": 1,
        "vessels without a type": 1,
    }
    assert [np.isnan(getattr(tracks[0], name)).sum() for name in ("sog", "cog", "heading")] == [1, 1, 1]
    untouched, counts = counted(write(tmp_path, rows), clean=False)
    assert counts["points"] == 26
    assert untouched[0].sog.max() == np.float32(102.3)


def test_pseudonyms_are_no_impossible_ids(tmp_path: Path) -> None:
    path = write(tmp_path, [row(step, vessel=vessel) for vessel in ("a", "b", 367000001) for step in range(3)])
    assert len(counted(path)[0]) == 3
    assert len(counted(path, check_mmsi="on")[0]) == 1


def test_gaps_and_short_rests(tmp_path: Path) -> None:
    seconds = [*range(0, 2000, 50), *range(9000, 9450, 50), *range(20_000, 20_600, 50)]
    path = write(tmp_path, [row(second) for second in seconds])
    read = read_segments([path], TrackSettings(points=[30], min_points=10))
    assert [one.points for one in read] == [30, 10, 12]
    assert read.bad_rows.counts["gaps"] == 2
    assert read.bad_rows.counts["points in rests that are too short"] == 9
    assert [one.points for one in read_segments([path], TrackSettings(gap_minutes=0))] == [30, 30]
    still = TrackSettings(max_still=0.5)
    assert len(read_segments([path], still)) == 3
    path = write(tmp_path, [row(second, values="0.1,90,87") for second in seconds])
    with_still = read_segments([path], still)
    assert (len(with_still), with_still.bad_rows.counts["segments that lie still"]) == (0, 3)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9000), min_size=1, max_size=90),
    st.integers(2, 12),
    st.integers(1, 12),
    st.sampled_from([0, 1, 20]),
)
def test_cuts_cover_the_track_once(steps: list[int], points: int, least: int, gap: float) -> None:
    time = np.cumsum(steps)
    nothing = np.zeros(len(steps))
    track = Track("1", "a", time, nothing, nothing, nothing, nothing, nothing)
    reading, bad = TrackSettings(points=[points], min_points=min(least, points), gap_minutes=gap), BadRowPolicy()
    cuts = cut_track(track, reading, bad)
    flat = [index for start, end, _ in cuts for index in range(start, end)]
    assert flat == sorted(set(flat))
    assert len(flat) + bad.counts["points in rests that are too short"] == len(steps)
    for start, end, window in cuts:
        assert reading.min_points <= end - start <= window == points
        assert not gap or (np.diff(time[start:end]) <= gap * 60).all()
    longer = replace(reading, points=[points + 3])
    both = cut_track(track, replace(reading, points=[points, points + 3]), BadRowPolicy())
    long = cut_track(track, longer, BadRowPolicy())
    assert both[: len(long)] == long
    assert [one[:2] for one in both[len(long) :]] == [
        one[:2] for one in cuts if one[:2] not in {two[:2] for two in long}
    ]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 700), max_size=12), max_size=12), st.integers(1, 40))
def test_spilling_changes_nothing(batches: list[list[int]], limit: int) -> None:
    """Vessels in any order over any batches: what comes from disk is what comes from memory."""

    def gathered(in_memory: int) -> list[list[tuple[int, int]]]:
        with PointGatherer(in_memory) as gather:
            for number, vessels in enumerate(batches):
                points = np.zeros(len(vessels), POINT_DTYPE)
                points["vessel"], points["time"] = vessels, [(7 * one + number) % 5 for one in vessels]
                points["line"] = np.arange(len(vessels)) + 100 * number
                gather.add_points(points)
            return sorted([(int(p["vessel"]), int(p["line"])) for p in one] for one in gather.iter_vessels())

    assert gathered(limit) == gathered(10_000)
    assert [one for rows in gathered(limit) for one in rows].__len__() == sum(map(len, batches))


def test_the_temporary_folder_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RuntimeError), PointGatherer(1) as gather:
        gather.add_points(sailed(5))
        assert list(tmp_path.iterdir())
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_nothing_left_is_an_error_that_says_why(tmp_path: Path) -> None:
    path = write(tmp_path, [row(step, lat=91) for step in range(5)])
    with pytest.raises(DataError, match="no point that can be used") as caught:
        counted(path)
    assert "5 points with position not available" in caught.value.hint
