"""Words of points: the source's two formats to the letter, ours there and back."""

from __future__ import annotations

import datetime as dt
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.core.errors import ConfigError, DataError
from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.io.track import Track, measure_steps
from anabatic_vessels.words.segment_reader import read_segments
from anabatic_vessels.words.segments import as_row
from anabatic_vessels.words.track_decoder import decode_track
from anabatic_vessels.words.track_encoder import encode_track
from anabatic_vessels.words.vocabulary import (
    COURSE_STEP,
    FORMAT_VERSIONS,
    POINT_END,
    SOURCE_CLASSES,
    SPEED_EDGES,
    STEP_EDGES,
    WordSpec,
    build_vocabulary,
    count_points,
    get_word_group,
    strip_class_words,
)

h3 = pytest.importorskip("h3", reason="h3 is not installed (it is in the trajectory extra)")

SOURCE = {"gap_minutes": 0.0, "clean": False, "keep_class_word": True}
FILES = ("104694.csv", "103435.csv", "106674.csv", "108366.csv")


@pytest.fixture(scope="module")
def demo(shared_data: Path) -> Path:
    folder = shared_data / "ais" / "source_demo"
    if not folder.is_dir():
        pytest.skip("the source project's demo files are not here")
    return folder


def test_cell_rows_are_the_source_s_byte_for_byte(demo: Path) -> None:
    read = read_segments([demo / name for name in FILES], TrackSettings(format="cell", **SOURCE))
    lines = [json.dumps(as_row(one, read.spec, source_keys_only=True)) for one in read]
    assert lines == (demo / "train_dataset_demo.jsonl").read_text().splitlines()
    assert len(lines) == 65


def slow_char(row: dict[str, Any]) -> list[str]:
    """The rules of the format, from a row as text: nothing of the tables that the encoder works with."""
    when = dt.datetime.strptime(row["date"], "%Y-%m-%d %H:%M:%S")
    words = [f"YEAR_{when.year}", f"MONTH_{when.month}", f"DAY_{when.day}"]
    words += [f"HOUR_{when.hour}", f"MINUTE_{when.minute}", f"SECOND_{when.second}"]
    words += [f"H3_CHAR_{place}_{letter}" for place, letter in enumerate(row["H3"])]
    sog, cog = float(row["sog"]), float(row["cog"]) % 360
    limits = ((2, "STOP"), (5, "SLOW"), (10, "MID"), (15, "FAST"), (math.inf, "HIGH"))
    words.append("SPD_" + next(name for limit, name in limits if sog < limit))
    starts = [(22.5 + 45 * place, name) for place, name in enumerate(("NE", "E", "SE", "S", "SW", "W", "NW"))]
    words.append("COG_" + next((name for start, name in starts if start <= cog < start + 45), "N"))
    return [*words, SOURCE_CLASSES[int(float(row["class"]))], POINT_END]


def test_char_rows_follow_the_rules(demo: Path) -> None:
    """65 of 65 rows from the H3 column of the files, which the encoder does not read."""
    read = read_segments([demo / name for name in FILES], TrackSettings(format="char", **SOURCE))
    expected = []
    for name in FILES:
        heading, *lines = (demo / name).read_text().split()[0:1] + (demo / name).read_text().splitlines()[1:]
        rows = [dict(zip(heading.split(","), line.split(","), strict=True)) for line in lines]
        rows.sort(key=lambda row: row["date"])
        parts = [rows[start : start + 30] for start in range(0, len(rows), 30)]
        expected += [" ".join(w for row in part for w in slow_char(row)) for part in parts if len(part) >= 10]
    assert [one.text for one in read] == expected
    assert len(expected) == 65
    assert as_row(read.rows[0], read.spec)["h3_method"] == "char_split"


def test_compact_needs_under_fifteen_words_a_point(demo: Path) -> None:
    read = read_segments([demo / name for name in FILES], TrackSettings(format="compact", gap_minutes=0))
    assert sum(len(one.text.split()) for one in read) / sum(one.points for one in read) < 15


seconds = st.integers(0, 200_000)
points = st.lists(
    st.tuples(
        seconds,
        st.floats(-89.9, 89.9),
        st.floats(-180, 180, exclude_max=True),
        st.one_of(st.integers(0, 600).map(lambda tenths: tenths / 10), st.just(math.nan)),
        st.one_of(st.integers(0, 3599).map(lambda tenths: tenths / 10), st.just(math.nan)),
    ),
    min_size=1,
    max_size=12,
)


def track(rows: list[tuple[float, ...]]) -> Track:
    """A track of rows of (seconds since the row before, lat, lon, sog, cog), from 2021 on."""
    columns = np.array(rows, np.float64).T
    time = 1_609_459_200 + np.cumsum(columns[0]).astype(np.int64)
    return Track("1", "a.csv", time, *columns[1:], heading=columns[4])


def apart(one: Track, other: Track) -> float:
    """Metres between the points of two tracks, the largest."""
    pairs = zip(one.lat, one.lon, other.lat, other.lon, strict=True)
    return max(measure_steps(np.array([a, c]), np.array([b, d]))[0] for a, b, c, d in pairs)


def circle(lat: float, resolution: int) -> float:
    """A cell's size: no point of it is further than twice the mean edge from its centre."""
    return 2 * h3.average_hexagon_edge_length(resolution, unit="m")


@settings(max_examples=60, deadline=None)
@given(points, st.sampled_from(["char", "cell", "compact"]), st.sampled_from([10, 7, 12]))
def test_words_become_the_points_they_were(rows: list[tuple[float, ...]], kind: str, resolution: int) -> None:
    spec = WordSpec(kind, 10 if kind == "cell" else resolution)
    first = track(rows)
    (text,) = encode_track(first, [(0, len(rows))], spec, "Barge")
    again = decode_track(text, spec)
    assert apart(first, again) <= circle(0, 9 if kind == "cell" else spec.resolution)
    assert (np.isnan(first.sog) == np.isnan(again.sog)).all() or kind != "compact"
    assert set(text.split()) <= {*build_vocabulary(spec)}
    if kind == "compact":
        width = dict(zip(STEP_EDGES, np.diff([*STEP_EDGES, 200_001]), strict=True))
        steps = [width[int(word[3:])] for word in text.split() if word.startswith("DT_")]
        late = np.abs(first.time - again.time)  # a decoded clock that is ahead waits
        bounds = np.maximum.accumulate([0, *steps])
        assert ((late <= bounds) | (bounds > 10_000)).all()
        turn = np.abs((first.cog - again.cog + 180) % 360 - 180)
        assert np.nanmax(turn, initial=0) <= COURSE_STEP / 2 + 1e-9
        known = first.sog < SPEED_EDGES[-1] / 10
        assert np.abs(first.sog - again.sog)[known].max(initial=0) <= 5
    else:
        assert (first.time == again.time).all()
    assert encode_track(again, [(0, len(rows))], WordSpec("compact")) == encode_track(
        again, [(0, len(rows))], WordSpec("compact")
    )


@settings(max_examples=30, deadline=None)
@given(points, st.sampled_from(list(FORMAT_VERSIONS)))
def test_every_word_is_in_the_vocabulary_once(rows: list[tuple[float, ...]], kind: str) -> None:
    spec = WordSpec(kind)
    words = build_vocabulary(spec)
    assert len(set(words)) == len(words)
    (text,) = encode_track(track(rows), [(0, len(rows))], spec)
    assert set(text.split()) <= set(words)
    assert count_points(text.split()) == len(rows)
    assert "other" not in {get_word_group(word) for word in words}


def test_time_steps_do_not_add_up_their_errors() -> None:
    rows = [(67.0, 50.0, 1.0, 5.0, 90.0)] * 300
    first = track(rows)
    again = decode_track(encode_track(first, [(0, 300)], WordSpec())[0], WordSpec())
    assert np.abs(first.time - again.time).max() <= 10


def test_motion_words_do_not_tell_where_or_when() -> None:
    rows = [(60.0, 10 + 0.001 * step, 20.0, 6.5, 0.5 * step) for step in range(12)]
    here = track(rows)
    there = Track("2", "b.csv", here.time + 86_400 * 40, here.lat, here.lon + 31.0, here.sog, here.cog, here.heading)
    turned = Track("3", "c.csv", here.time, here.lat, here.lon, here.sog, (here.cog + 77) % 360, here.heading)
    texts = {encode_track(one, [(0, 12)], WordSpec("motion"))[0] for one in (here, there, turned)}
    assert len(texts) == 1
    assert texts.pop().split()[4:8] == ["DT_60", "SPD_65", "TURN_S5", "MOVE_64"]


def test_a_segment_s_words_depend_on_its_points_alone() -> None:
    rows = [(60.0, 10 + 0.003 * step, 20.0, 6.5, 9.0 * step) for step in range(40)]
    whole = track(rows)
    for kind in FORMAT_VERSIONS:
        _, second = encode_track(whole, [(0, 20), (20, 40)], WordSpec(kind))
        assert encode_track(whole.slice_points(20, 40), [(0, 20)], WordSpec(kind)) == [second]


@pytest.mark.parametrize("name", ["Barge", "CLASS_UNKNOWN", "运输船", "Tug_Tow"])
def test_class_words_are_taken_out_whatever_they_are_called(name: str) -> None:
    text, bare = (encode_track(track([(0, 1, 2, 3, 4)] * 3), [(0, 3)], WordSpec("cell"), one)[0] for one in (name, ""))
    assert strip_class_words(text) == (bare, 3)
    assert strip_class_words(bare) == (bare, 0)


def test_groups() -> None:
    words = ["H3_CHAR_1_a", "Barge", "COG_N", "DT_60", POINT_END, "banana", "H3", "CLASS_UNKNOWN"]
    found = [get_word_group(word) for word in words]
    assert found == ["h3", "class", "motion", "time", "end", "other", "other", "class"]


@pytest.mark.parametrize("name", ["", "compact", "compact-v9-r10", "tiles-v1-r10", "compact-v1-r77"])
def test_names_of_specs(name: str) -> None:
    assert WordSpec.parse(WordSpec("char", 7).spec_name) == WordSpec("char", 7)
    with pytest.raises((DataError, ConfigError)):
        WordSpec.parse(name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "POINT_END",
        "SPD_STOP COG_N",
        "YEAR_2021 MONTH_13 DAY_1 HOUR_0 MINUTE_0 SECOND_0 POINT_END",
        "DT_7 POINT_END",
    ],
)
def test_damaged_words_are_refused(text: str) -> None:
    for kind in ("char", "cell", "compact"):
        with pytest.raises(DataError):
            decode_track(text, WordSpec(kind))
    with pytest.raises(DataError, match="no position"):
        decode_track(text, WordSpec("motion"))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*build_vocabulary(WordSpec()), "H3_3_9", "DT_x", "COG_", "H3_base_999"]), max_size=25))
def test_any_words_are_points_or_an_error(words: list[str]) -> None:
    try:
        made = decode_track(" ".join(words), WordSpec())
    except DataError:
        return
    assert len(made) == words.count(POINT_END)
