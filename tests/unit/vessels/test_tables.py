"""AIS files in every layout, times in every form, and what is said about files that are none."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from anabatic.core.errors import ConfigError, DataError
from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.io.time_parsing import NO_TIME, parse_times
from anabatic_vessels.io.track import BadRowPolicy, Track
from anabatic_vessels.io.track_collection import open_tracks
from anabatic_vessels.words.vocabulary import SOURCE_CLASSES

pa = pytest.importorskip("pyarrow")

START = 1_577_836_809
"""2020-01-01 00:00:09 UTC."""


def read(path: Path, **settings: object) -> tuple[list[Track], tuple[str, ...], BadRowPolicy]:
    """The tracks, classes and counts of one file."""
    bad = BadRowPolicy(settings.get("on_bad_row") == "skip")
    with open_tracks([path], TrackSettings(**settings), bad) as tracks:
        return list(tracks), tracks.classes, bad


def table(tmp_path: Path, heading: str, *rows: str, name: str = "a.csv") -> Path:
    path = tmp_path / name
    path.write_text("\n".join([heading, *rows]) + "\n", encoding="utf-8")
    return path


NOAA = "MMSI,BaseDateTime,LAT,LON,SOG,COG,Heading,VesselName,IMO,CallSign,VesselType,Status,Length,Width,Draft,Cargo"
NOAA_ROW = '367000001,{time},29.5,-94.5,10.1,{cog},87.0,"BOAT, THE",,WX,31,0,30,8,3,52'
LAYOUTS = {
    "noaa": (NOAA, [NOAA_ROW.format(time=f"2020-01-01T00:00:{s:02d}", cog=90 + s / 10) for s in (9, 19)]),
    "noaa since 2025": (
        "mmsi,base_date_time,longitude,latitude,sog,cog,heading,vessel_name,vessel_type",
        [f"367000001,2020-01-01 00:00:{s:02d},-94.5,29.5,10.1,{90 + s / 10},87,X,52" for s in (9, 19)],
    ),
    "dma": (
        "# Timestamp,Type of mobile,MMSI,Latitude,Longitude,Navigational status,ROT,SOG,COG,Heading,IMO,Ship type",
        [f"01/01/2020 00:00:{s:02d},Class A,367000001,29.5,-94.5,,,10.1,{90 + s / 10},87,,Towing" for s in (9, 19)],
    ),
    "ours": (
        "mmsi,timestamp,lat,lon,sog,cog,heading,vessel_type",
        [f"367000001,2020-01-01T00:00:{s:02d}Z,29.5,-94.5,10.1,{90 + s / 10},87,Tug_Tow" for s in (9, 19)],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_give_the_same_points(name: str, tmp_path: Path) -> None:
    heading, rows = LAYOUTS[name]
    (track,), classes, _ = read(table(tmp_path, heading, *reversed(rows)))
    assert track.vessel == "367000001"
    assert track.label == "Tug_Tow"
    assert classes == ("Tug_Tow",)
    assert track.time.tolist() == [START, START + 10]
    assert (track.lat[0], track.lon[0]) == (29.5, -94.5)
    assert np.allclose(track.sog, 10.1)
    assert np.allclose(track.cog, [90.9, 91.9])
    assert track.heading.tolist() == [87, 87]


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [("class", "4.0", "Fishing_Vessel"), ("label", "储罐船", "Storage_Tanker"), ("class", "运输船", "Transport_Ship")],
)
def test_files_of_one_vessel(column: str, value: str, expected: str, tmp_path: Path) -> None:
    rows = [f"2022-05-02 00:20:{s},-41.6,-60.1,4.5,140.0,{value}" for s in range(10, 20)]
    (track,), classes, _ = read(table(tmp_path, f"date,lat,lon,sog,cog,{column}", *rows, name="103435.csv"))
    assert (track.vessel, track.label, classes) == ("103435", expected, SOURCE_CLASSES)


def test_a_name_map_of_one_s_own(tmp_path: Path) -> None:
    rows = [f"2022-05-02 00:20:{s},1,2,4.5,1,{kind}" for s, kind in zip(range(10, 14), "aabb", strict=True)]
    path = table(tmp_path, "date,lat,lon,sog,cog,label", *rows)
    one = {"columns": {"vessel": "FILE"}}
    _, classes, bad = read(path, class_map={"a": "Ferry", "b": "Yacht"}, **one)
    assert classes == ("Ferry", "Yacht")
    assert bad.counts["vessels with conflicting types (the most frequent is taken)"] == 1
    with pytest.raises(DataError, match=r'a.csv: line 4: class "b" is none of the 2 classes'):
        read(path, class_map={"a": "Ferry"}, classes=["Ferry", "Yacht"], **one)
    (track,), _, bad = read(path, class_map={"a": "Ferry"}, classes=["Ferry", "Yacht"], on_bad_row="skip", **one)
    assert (track.label, bad.counts["classes outside the list"]) == ("Ferry", 1)


TIMES = {
    "2020-01-01T00:00:09": 0,
    "2020-01-01 00:00:09": 0,
    "2020-01-01T00:00:09Z": 0,
    "2020-01-01T08:00:09+08:00": 0,
    "2020-01-01 08:00:09+0800": 0,
    "2020-01-01T00:00:09.750": 0,
    "2020-01-01T00:00:09.750123Z": 0,
    "01/01/2020 00:00:09": 0,
    "2020/1/1 00:00:09": 0,
    "2020/01/01 00:00": -9,
    "20200101T000009": 0,
    "1577836809": 0,
    "1577836809.25": 0,
    "1577836809750": 0,
}


@pytest.mark.parametrize("text", TIMES)
def test_times(text: str) -> None:
    column = pa.array([text, None, "", text])
    assert parse_times(column, None, 0).tolist() == [START + TIMES[text], NO_TIME, NO_TIME, START + TIMES[text]]


def test_times_without_a_zone_may_be_local() -> None:
    column = pa.array(["2020-01-01 08:00:09", "2020-01-01T00:00:09Z"])
    assert parse_times(column, None, 8).tolist() == [START, START]
    assert parse_times(pa.array(["2020-01-01 08:00:09"]), "%H", 0).tolist() == [NO_TIME]
    assert parse_times(pa.array(["31.12.2019 9h"]), "%d.%m.%Y %Hh", 0).tolist() == [START - 9 - 15 * 3600]


def test_typed_times() -> None:
    for kind in (pa.timestamp("ms"), pa.timestamp("ns"), pa.timestamp("s", "Asia/Shanghai")):
        made = pa.array([START, None], pa.int64()).cast(pa.timestamp("s")).cast(kind)
        assert parse_times(made, None, 0).tolist() == [START, NO_TIME]
    assert parse_times(pa.array([START * 1000, None]), None, 0).tolist() == [START, NO_TIME]
    with pytest.raises(DataError, match="bool"):
        parse_times(pa.array([True]), None, 0)


def test_parquet_gzip_and_zip_are_the_same_table(tmp_path: Path) -> None:
    import pyarrow.csv
    import pyarrow.parquet

    heading, rows = LAYOUTS["noaa"]
    plain = table(tmp_path, heading, *rows)
    parquet, packed, archive = tmp_path / "a.parquet", tmp_path / "a.csv.gz", tmp_path / "a.zip"
    pyarrow.parquet.write_table(pyarrow.csv.read_csv(plain), parquet)
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    with zipfile.ZipFile(archive, "w") as file:
        file.write(plain, "inside.csv")
    found = [read(path)[0][0] for path in (plain, parquet, packed, archive)]
    assert {json.dumps([one.time.tolist(), one.sog.tolist(), one.label]) for one in found} == {
        json.dumps([found[0].time.tolist(), found[0].sog.tolist(), "Tug_Tow"])
    }


def test_ids_and_codes_that_became_floats(tmp_path: Path) -> None:
    import pyarrow.parquet

    columns = {"mmsi": [367000001.0, 367000001.0], "time": [START, START + 9], "lat": [1.0, 1.0], "lon": [2.0, 2.0]}
    columns |= {"vessel_type": [None, 52.0]}
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    (track,), _, _ = read(tmp_path / "a.parquet")
    assert (track.vessel, track.label) == ("367000001", "Tug_Tow")
    path = table(tmp_path, "mmsi,time,lat,lon,vessel_type", *(f"367000001.0,{START + s},1,2,31.0" for s in range(2)))
    (track,), _, _ = read(path)
    assert (track.vessel, track.label) == ("367000001", "Tug_Tow")


def test_names_with_blanks_are_one_word(tmp_path: Path) -> None:
    rows = [f"1,{START + s},1,2,Law  enforcement boat" for s in range(2)]
    (track,), classes, _ = read(table(tmp_path, "mmsi,time,lat,lon,label", *rows))
    assert (track.label, classes) == ("Law_enforcement_boat", ("Law_enforcement_boat",))
    (track,), classes, _ = read(table(tmp_path, "mmsi,time,lat,lon,ship_type", *[r.replace(" boat", "") for r in rows]))
    assert track.label == "Other"


def test_semicolons_tabs_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    heading, rows = LAYOUTS["ours"]
    for mark in ";\t":
        path = tmp_path / "a.csv"
        text = "\r\n".join([heading, rows[0], "", rows[1], "", ""]).replace(",", mark)
        path.write_bytes("\ufeff".encode() + text.encode())
        (track,), _, _ = read(path)
        assert len(track) == 2


def bad_table(tmp_path: Path, row: str) -> Path:
    heading, rows = LAYOUTS["ours"]
    return table(tmp_path, heading, rows[0], row, rows[1])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("367000001,2020-01-01T00:00:12Z,north,-94.5,1,2,3,Cargo", r'a.csv: line 3: lat is "north", no number'),
        ("367000001,yesterday,29.5,-94.5,1,2,3,Cargo", r'a.csv: line 3: time "yesterday" cannot be read'),
        ("367000001,2020-13-01T00:00:12Z,29.5,-94.5,1,2,3,Cargo", r'a.csv: line 3: time "2020-13-01'),
        ("367000001,2020-01-01T00:00:12Z,29.5", r"a.csv: line 3: 3 cells, the heading has 8"),
    ],
)
def test_a_broken_row_stops_or_is_counted(row: str, message: str, tmp_path: Path) -> None:
    path = bad_table(tmp_path, row)
    with pytest.raises(DataError, match=message):
        read(path)
    (track,), _, bad = read(path, on_bad_row="skip")
    assert len(track) == 2
    assert bad.counts["rows that cannot be read"] == 1
    assert message.partition(":")[0] in bad.examples[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no heading"),
        (b"name,age\nx,3\n", "no AIS table: no column for time, lat, lon; the file has name, age"),
        (b"mmsi,timestamp,lat,lat,lon\n", 'the column "lat" stands twice'),
        (b"\x00\x01\x02", "a binary file"),
        (b"mmsi,timestamp,lat,lon\n", "no point that can be used"),
        (b"mmsi,timestamp,lat,lon\n1,2020-01-01T00:00:00,\xff\xfe,3\n", "invalid UTF-8"),
        (b"mmsi,timestamp,lat,lon\n1,,,\n2,,3,4\n", "no point that can be used"),
    ],
)
def test_files_that_are_no_ais_table(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(path)


def test_swapped_coordinates_are_seen(tmp_path: Path) -> None:
    rows = [f"1,2020-01-01T00:00:{s}Z,151.00{s},-33.8,1,2,3,x" for s in range(10, 30)]
    path = table(tmp_path, LAYOUTS["ours"][0], *rows)
    with pytest.raises(DataError, match="20 of 20 latitudes are over 90: swapped") as caught:
        read(path)
    assert "--tracks.columns lat=" in caught.value.hint
    (track,), _, _ = read(path, columns={"lat": "lon", "lon": "lat"})
    assert track.lat[0] == -33.8


def test_swapped_coordinates_are_seen_where_most_fit(tmp_path: Path) -> None:
    """Longitudes of 80 and of 100 degrees: the half that is possible as a latitude does not hide the other."""
    rows = [f"1,2020-01-01T00:00:{s}Z,{(-80.1, -80.2, -80.3, -100.5)[s % 4]},29.5,1,2,3,x" for s in range(10, 50)]
    with pytest.raises(DataError, match="line 3: 10 of 40 latitudes are over 90: swapped"):
        read(table(tmp_path, LAYOUTS["ours"][0], *rows))


def test_points_without_a_vessel_are_no_vessel(tmp_path: Path) -> None:
    heading = LAYOUTS["ours"][0]
    rows = [f"{('', '7')[s % 2]},2020-01-01T00:00:{s}Z,29.5,-94.5,1,2,3,x" for s in range(10, 40)]
    tracks, _, bad = read(table(tmp_path, heading, *rows))
    assert [(one.vessel, len(one)) for one in tracks] == [("7", 15)]
    assert bad.counts["points without a vessel id"] == 15
    with pytest.raises(DataError, match="no point that can be used") as caught:
        read(table(tmp_path, heading, *rows[::2]))
    assert "15 points without a vessel id" in caught.value.hint


def test_columns_named_by_the_user(tmp_path: Path) -> None:
    path = table(tmp_path, "wann,breite,laenge", *(f"{START + s},1,2" for s in range(3)))
    (track,), _, _ = read(path, columns={"time": "wann", "lat": "breite", "lon": "laenge"})
    assert np.isnan(track.sog).all()
    with pytest.raises(DataError, match='no column "hoehe"'):
        read(path, columns={"lat": "hoehe"})
    with pytest.raises(ConfigError, match='tracks.columns names "latt". Did you mean "lat"'):
        read(path, columns={"latt": "breite"})


def test_an_odd_course_scale_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [f"1,{START + s},1,2,5,{s / 40},3,x" for s in range(120)]
    read(table(tmp_path, LAYOUTS["ours"][0], *rows))
    assert "no course is over 2.975" in caplog.text


def test_raw_sentences(tmp_path: Path) -> None:
    encode_dict = pytest.importorskip("pyais", reason="pyais is not installed (it is in the nmea extra)").encode_dict
    path, lines = tmp_path / "a.nmea", []
    for step in range(12):
        told = {"type": 1, "mmsi": 367000001, "lat": 29.5, "lon": -94.5, "speed": 10.1, "course": 90.9, "heading": 511}
        (sentence,) = encode_dict(told, "AI", "VDM")
        lines.append(f"\\c:{START + 10 * step}*00\\{sentence}")
        if step in (0, 6):
            static = encode_dict({"type": 5, "mmsi": 367000001, "ship_type": 52, "shipname": "X"}, "AI", "VDM")
            lines += static
    path.write_text("\n".join(["# a comment", *lines]) + "\n")
    (track,), classes, bad = read(path)
    assert (track.vessel, track.label, classes) == ("367000001", "Tug_Tow", ("Tug_Tow",))
    assert track.time.tolist() == [START + 10 * step for step in range(12)]
    assert (track.lat[0], track.lon[0]) == pytest.approx((29.5, -94.5))
    assert np.isnan(track.heading).all()
    assert bad.counts["lines that are no sentence"] == 1
    path.write_text(lines[0].rpartition("\\")[2] + "\n")
    with pytest.raises(DataError, match="line 1: no time"):
        read(path)
    path.write_text("!AIVDM,1,1,,A\n")
    with pytest.raises(DataError, match="line 1: no AIS sentence"):
        read(path)
