"""Columns of AIS files as the world names them: what is read, what is reported as unused, and what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabatic.cli.app import main
from anabatic.core.errors import ConfigError, DataError
from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.io.column_names import match_columns
from anabatic_vessels.io.time_parsing import NO_TIME, find_date_order, parse_times
from anabatic_vessels.io.track import NO_POSITION, BadRowPolicy, Track
from anabatic_vessels.io.track_collection import open_tracks
from anabatic_vessels.words.segment_reader import holds_words, read_segments

pa = pytest.importorskip("pyarrow")

START = 1_772_629_200
"""2026-03-04 13:00:00 UTC."""


def points(count: int = 15) -> Iterator[tuple[int, int, float, float]]:
    """Vessel, step, latitude and longitude of three vessels at 10 knots to the north-east, a point a minute."""
    for vessel in range(3):
        for step in range(count):
            degrees = 10 * 1852 / 60 * step / 111_195 * math.sqrt(0.5)
            lat = 57.1 + vessel / 2
            yield 219000101 + vessel, step, lat + degrees, 11.2 + degrees / math.cos(math.radians(lat))


def clock(step: int) -> str:
    return f"13:{step:02d}:00"


Row = Callable[[int, int, float, float], str]


def write(tmp_path: Path, heading: str, row: Row, name: str = "a.csv") -> Path:
    path = tmp_path / name
    path.write_text("\n".join([heading, *(row(*one) for one in points())]) + "\n", encoding="utf-8")
    return path


def read(path: Path, **settings: Any) -> tuple[list[Track], BadRowPolicy]:
    bad = BadRowPolicy(settings.get("on_bad_row") == "skip")
    with open_tracks([path], TrackSettings(**settings), bad) as tracks:
        return list(tracks), bad


def require_all(tracks: list[Track], label: str | None, start: int = START) -> None:
    """Check that all three vessels came out with time, place, speed and course."""
    assert [len(track) for track in tracks] == [15, 15, 15]
    for track in tracks:
        assert track.time.tolist() == [start + 60 * step for step in range(15)]
        assert np.allclose(track.sog, 10, atol=0.02)
        assert np.allclose(track.cog, 45, atol=0.02)
        assert label is None or track.label == label


LAYOUTS: dict[str, tuple[str, Row, str]] = {
    "Naval Academy of France": (
        "sourcemmsi,navigationalstatus,rateofturn,speedoverground,courseoverground,trueheading,lon,lat,t",
        lambda v, k, a, o: f"{v},0,0,10.0,45.0,45,{o},{a},{START + 60 * k}",
        "navigationalstatus, rateofturn",
    ),
    "HELCOM": (
        "timestamp_pretty (dd/mm/yyyy hh:mm:ss);timestamp;msgid;mmsi;lat;long;sog;cog;shipType",
        lambda v, k, a, o: f"04/03/2026 {clock(k)};{(START + 60 * k) * 1000};1;{v};{a};{o};10;45;CARGO",
        "timestamp_pretty (dd/mm/yyyy hh:mm:ss), msgid",
    ),
    "Kystverket, decimal commas": (
        "mmsi;longitude;latitude;date_time_utc;speed_over_ground;course_over_ground;true_heading;calc_speed",
        lambda v, k, a, o: f"{v};{o};{a};2026-03-04 {clock(k)} UTC;10.0;45.0;45;3.1".replace(".", ","),
        "calc_speed",
    ),
    "exactEarth": (
        "MMSI,Message_ID,Time,Vessel_Name,Ship_Type,SOG,Longitude,Latitude,COG,Heading",
        lambda v, k, a, o: f"{v},1,20260304_{clock(k).replace(':', '')},X,70,10,{o},{a},45,45",
        "Message_ID, Vessel_Name",
    ),
    "Spire": (
        "timestamp,mmsi,msg_type,latitude,longitude,speed,course,heading,vessel_class,ship_type",
        lambda v, k, a, o: f"2026-03-04 {clock(k)} +00:00 UTC,{v},1,{a},{o},10,45,45,A,Cargo - Hazard A",
        "msg_type, vessel_class",
    ),
    "units in names": (
        "MMSI,Time (UTC),Lat [deg],Lon [deg],speed (km/h),COG[rad],TYPE_NAME",
        lambda v, k, a, o: f"{v},2026-03-04 {clock(k)},{a},{o},18.52,0.7854,Cargo",
        "",
    ),
    "units as words": (
        "ship_mmsi,unix_time,position_lat,position_lon,speedMps,course_deg",
        lambda v, k, a, o: f"{v},{START + 60 * k},{a},{o},5.144,45",
        "",
    ),
    "date and time": (
        "MMSI,Date,Time,LAT,LON,SOG,COG",
        lambda v, k, a, o: f"{v},2026-03-04,{clock(k)},{a},{o},10,45",
        "",
    ),
    "Chinese": (
        "MMSI,时间,经度,纬度,航速,航向,船艏向,船舶类型",
        lambda v, k, a, o: f"{v},2026/03/04 {clock(k)},{o},{a},10,45,45,货船",
        "",
    ),
    "Chinese, other names": (
        "船名,呼号,MMSI编号,定位时间,经度（°）,纬度（°）,对地航速（节）,对地航向,船首向,目的港",
        lambda v, k, a, o: f"甲,B,{v},2026年03月04日 {clock(k)},{o},{a},10,45,45,上海",
        "船名, 呼号, 目的港",
    ),
    "Chinese, Beijing time": (
        "海上移动业务标识,更新时间(北京时间),船舶经度,船舶纬度,航速(km/h),航迹向,船艏向",
        lambda v, k, a, o: f"{v},2026-03-04 {21 + k // 60}:{k:02d}:00,{o},{a},18.52,45,45",
        "",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_the_world(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heading, row, unused = LAYOUTS[name]
    tracks, _ = read(write(tmp_path, heading, row))
    typed = {
        "HELCOM": "Cargo",
        "exactEarth": "Cargo",
        "Spire": "Cargo",
        "units in names": "Cargo",
        "Chinese": "Cargo_Ship",
    }
    require_all(tracks, typed.get(name, ""))
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == bool(unused)
    if unused:
        total = heading.count(";" if ";" in heading else ",") + 1
        assert f"a.csv: {unused.count(', ') + 1} of {total} columns are not used: {unused}" in lines[0]


def test_files_with_the_same_columns_are_reported_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heading, row, _ = LAYOUTS["Spire"]
    paths = [write(tmp_path, heading, row, name) for name in ("a.csv", "b.csv", "c.csv")]
    with open_tracks(paths, TrackSettings(clean=False), BadRowPolicy()) as tracks:
        assert len(list(tracks)) == 3
    lines = [record.getMessage() for record in caplog.records if "not used" in record.getMessage()]
    assert [line.partition(": 2 of 10")[0] for line in lines] == [str(paths[0]), "2 more files"]


PLAIN = "time,lat,lon,sog,cog"


def plain(v: int, k: int, a: float, o: float) -> str:
    return f"{START + 60 * k},{a},{o},10,45"


@pytest.mark.parametrize(
    ("column", "typed"),
    [
        ("shipname", "vessel=shipname"),
        ("船名", "vessel=船名"),
        ("Call Sign", "'vessel=Call Sign'"),
        ("boat", "vessel=NAME"),
    ],
)
def test_vessels_without_a_known_column_are_not_joined(column: str, typed: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"{PLAIN},{column}", lambda v, *rest: f"{plain(v, *rest)},ship {v}")
    with pytest.raises(DataError, match=f"no column that names the vessel; the file has time, .*{column}") as caught:
        read(path)
    assert f"--tracks.columns {typed}" in caught.value.hint
    assert "--tracks.columns vessel=FILE" in caught.value.hint
    require_all(read(path, columns={"vessel": column})[0], "")


def test_a_file_without_any_id_must_look_like_one_vessel(tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN, plain)
    with pytest.raises(DataError, match="no column names the vessel.*44 of 45 steps are faster than 80 knots"):
        read(path)
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join([f"{lines[0]},class", *(f"{line},{at % 2}" for at, line in enumerate(lines[1:16]))]) + "\n"
    )
    with pytest.raises(DataError, match="its points have 2 classes: 0, 1"):
        read(path)
    path.write_text("\n".join(lines[:16]) + "\n")
    assert [(track.vessel, len(track)) for track in read(path)[0]] == [("a", 15)]
    path.write_text("\n".join(f"{line},x" for line in lines[:16]) + "\n")
    assert [track.vessel for track in read(path, columns={"vessel": "FILE"})[0]] == ["a"]


def test_two_columns_that_could_name_the_vessel(tmp_path: Path) -> None:
    path = write(tmp_path, f"{PLAIN},mmsi_from,mmsi_to", lambda v, *rest: f"{plain(v, *rest)},{v},1")
    with pytest.raises(DataError, match="2 columns could name the vessel: mmsi_from, mmsi_to"):
        read(path)


UNITS = {
    "MarineTraffic": (100, 45, ["10 times", "'sog=SPEED[0.1 kn]'"]),
    "metres per second": (5.144, 45, ["0.514 times", "'sog=SPEED[m/s]'"]),
    "kilometres per hour": (18.52, 45, ["1.85 times", "'sog=SPEED[km/h]'"]),
    "another": (33, 45, ["3.3 times", "units that can be named: kn, 0.1 kn"]),
    "tenths of degrees": (10, 450, ["courses", "'cog=COURSE[0.1 deg]'"]),
    "radians": (10, 0.7854, ["courses", "'cog=COURSE[rad]'"]),
}


@pytest.mark.parametrize("name", UNITS)
def test_units_that_the_positions_contradict(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    speed, course, told = UNITS[name]
    heading = "MMSI,STATUS,SPEED,LON,LAT,COURSE,TIMESTAMP,SHIP_ID,TYPE_NAME"
    path = write(tmp_path, heading, lambda v, k, a, o: f"{v},0,{speed},{o},{a},{course},2026-03-04T{clock(k)},1,Tanker")
    read(path)
    (line,) = (record.getMessage() for record in caplog.records if ' of "' in record.getMessage())
    assert all(text in line for text in told)
    typed = re.search(r"--tracks.columns '(\w+)=(.*)'", line)
    if typed:
        caplog.clear()
        require_all(read(path, columns={typed[1]: typed[2]})[0], "Tanker")
        assert ' of "' not in caplog.text


def test_good_units_are_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read(write(tmp_path, f"{PLAIN},mmsi", lambda v, *rest: f"{plain(v, *rest)},{v}"))
    assert not caplog.records


def test_units_that_are_not_known(tmp_path: Path) -> None:
    path = write(tmp_path, "time,lat,lon,speed (furlong),cog,mmsi", lambda v, *rest: f"{plain(v, *rest)},{v}")
    with pytest.raises(DataError, match='the unit "furlong" of the column') as caught:
        read(path)
    assert "--tracks.columns 'sog=speed (furlong)[kn]'" in caught.value.hint
    require_all(read(path, columns={"sog": "speed (furlong)[kn]"})[0], "")
    with pytest.raises(ConfigError, match=r'tracks.columns.sog: the unit "league" is not known'):
        read(path, columns={"sog": "speed (furlong)[league]"})


def test_a_hint_keeps_what_was_recognised() -> None:
    layout = match_columns(["MMSI", "wann", "lat", "lon", "航速(节)", "航向", "类型"], "a.csv", {"time": "wann"})
    assert layout.names == {
        "vessel": "MMSI",
        "time": "wann",
        "lat": "lat",
        "lon": "lon",
        "sog": "航速(节)",
        "cog": "航向",
        "type": "类型",
    }


@pytest.mark.parametrize(
    "name", ["wind_speed", "msg_type", "vessel_class", "draught", "eta_time", "calc_speed", "最大航速"]
)
def test_other_columns_are_not_taken(name: str) -> None:
    assert match_columns([name], "a.csv", {}).unused == (name,)


ENDS = ["Z", " UTC", " GMT", "+00:00", " +0000", " +00:00 UTC", " +0000 UTC", ".318353 +0000 UTC", " utc"]


@pytest.mark.parametrize("end", ENDS)
def test_times_with_a_zone_are_not_shifted(end: str) -> None:
    texts = [f"2026-03-04 13:00:00{end}", f"2026-03-04T13:01:00{end}"]
    assert parse_times(pa.array(texts), None, 8).tolist() == [START, START + 60]
    assert parse_times(pa.array([f"14/03/2026 13:00:00{end}"]), None, 8).tolist() == [START + 10 * 86400]


def test_offsets_and_clocks() -> None:
    for text in ("2026-03-04 21:00:00 +0800", "2026-03-04T21:00:00+08", "2026年3月4日 21时00分00秒 UTC+08:00"):
        assert parse_times(pa.array([text]), None, 0).tolist() == [START]
    assert parse_times(pa.array(["2026-03-04 09:30:00 -03:30"]), None, 0).tolist() == [START]
    assert parse_times(pa.array(["3/24/2026 1:00:00 PM"]), None, 0).tolist() == [START + 20 * 86400]
    assert parse_times(pa.array(["2026-03-04", "13:00:00"]), None, 0).tolist() == [NO_TIME, NO_TIME]


@pytest.mark.parametrize(("date", "order"), [("24/03/2026", "day"), ("03/24/2026", "month"), ("24-3-2026", "day")])
def test_dates_are_read_in_the_order_that_one_of_them_shows(date: str, order: str) -> None:
    mark = "-" if "-" in date else "/"
    column = pa.array([f"04{mark}03{mark}2026 13:00:00", f"{date} 13:00:00"])
    assert find_date_order(column) == order
    expected = START if order == "day" else START + 30 * 86400
    assert parse_times(column, None, 0).tolist() == [expected, START + 20 * 86400]


@pytest.mark.parametrize(("mark", "end"), [("/", " 13:00:00"), ("-", " 13:00"), ("/", " 1:00 PM")])
def test_dates_with_two_readings_are_refused_by_a_hint_that_works(mark: str, end: str, tmp_path: Path) -> None:
    date = f"04{mark}03{mark}2026{end}"
    path = write(tmp_path, "mmsi,time,lat,lon", lambda v, k, a, o: f"{v},{date},{a},{o}")
    with pytest.raises(DataError, match=r"a.csv: the time .* is on 2026-03-04 or on 2026-04-03") as caught:
        read(path, on_bad_row="skip")
    formats = re.findall("--tracks.time-format '([^']*)'", caught.value.hint)
    found = [read(path, time_format=text)[0][0].time[0] for text in formats]
    assert found == [START, START + 30 * 86400]


def test_denmark_writes_the_day_first(tmp_path: Path) -> None:
    heading = "# Timestamp,Type of mobile,MMSI,Latitude,Longitude,SOG,COG"
    path = write(tmp_path, heading, lambda v, k, a, o: f"04/03/2026 {clock(k)},Class A,{v},{a},{o},10,45")
    require_all(read(path)[0], "")


def test_rows_that_are_not_used_are_counted_once_per_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(
        tmp_path, f"{PLAIN},mmsi", lambda v, k, a, o: f"{plain(v, k, 91 if k == 3 else a, o)},{'' if k == 4 else v}"
    )
    read(path)
    reasons = "3 points without a vessel id, 3 points with position not available (91, 181)"
    assert f"{path}: 6 of 45 rows are not used: {reasons}" in caplog.text
    caplog.clear()
    path.write_text(path.read_text() + path.read_text().partition("\n")[2])
    read(path)
    assert "39 of 78 points of all files are not used: 39 duplicate points" in caplog.text


def lines(
    tmp_path: Path, make: Callable[[int, int, float, float], list[dict[str, Any]]], name: str = "a.jsonl"
) -> Path:
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for one in points() for row in make(*one)))
    return path


def streamed(v: int, k: int, a: float, o: float) -> list[dict[str, Any]]:
    meta = {"MMSI": v, "MMSI_String": v, "ShipName": "X", "time_utc": f"2026-03-04 {clock(k)}.318353 +0000 UTC"}
    static = {"ShipStaticData": {"Type": 70, "UserID": v, "Dimension": {"A": 1}}}
    position = {"Cog": 45, "Latitude": a, "Longitude": o, "Sog": 10.0, "Timestamp": 31, "TrueHeading": 45, "UserID": v}
    rows = [{"MessageType": "PositionReport", "MetaData": meta, "Message": {"PositionReport": position}}]
    stale = {**meta, "latitude": 1.0, "longitude": 2.0}
    return rows + [{"MessageType": "ShipStaticData", "MetaData": stale, "Message": static}] * (k == 0)


def described(v: int, k: int, a: float, o: float) -> list[dict[str, Any]]:
    position = {"class": "AIS", "type": 1, "mmsi": v, "lat": a, "lon": o, "speed": 10.0, "course": 45}
    static = {"class": "AIS", "type": 5, "mmsi": v, "shiptype": 70}
    return [{**position, "timestamp": f"2026-03-04T{clock(k)}Z"}] + [static] * (k == 0)


MESSAGES = {
    "flat": (
        lambda v, k, a, o: [
            {"mmsi": v, "lat": a, "lng": o, "speed": 10, "course": 45.0, "ts": (START + 60 * k) * 1000, "type": 70}
        ],
        "",
    ),
    "aisstream.io": (streamed, "7 of 17 keys are not used: MessageType (48), MetaData.MMSI_String (48)"),
    "gpsd": (described, ""),
    "GeoJSON": (
        lambda v, k, a, o: [
            {
                "type": "Feature",
                "geometry": {"type": "Point", "coordinates": [o, a]},
                "properties": {"mmsi": v, "sog": 10, "cog": 45, "timestamp": START + 60 * k, "shipType": 70, "eta": 1},
            }
        ],
        "1 of 8 keys are not used: properties.eta (45)",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_json_lines(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, unused = MESSAGES[name]
    path = lines(tmp_path, make)
    assert not holds_words(path)
    tracks, bad = read(path)
    require_all(tracks, "Cargo")
    assert bad.counts[NO_POSITION] == (3 if name in ("aisstream.io", "gpsd") else 0)
    assert unused in caplog.text
    assert bool(unused) == ("keys are not used" in caplog.text)
    pytest.importorskip("h3", reason="h3 is not installed (it is in the trajectory extra)")
    assert [(row.vessel, row.points) for row in read_segments([path])] == [(str(219000101 + v), 15) for v in range(3)]


def test_json_lines_that_need_a_word_from_the_user(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = lines(
        tmp_path,
        lambda v, k, a, o: [
            {"name": f"s{v}", "lat": a, "lon": o, "nav": {"kmh": 18.52, "dir": 45}, "time": START + 60 * k}
        ],
        "a.ndjson",
    )
    with pytest.raises(DataError, match="no column that names the vessel; the file has name, lat, lon, time, kmh, dir"):
        read(path)
    columns = {"vessel": "name", "sog": "nav.kmh[km/h]", "cog": "dir"}
    require_all(read(path, columns=columns)[0], "")
    with pytest.raises(DataError, match=r'no key "nav.mph"'):
        read(path, columns={**columns, "sog": "nav.mph"})
    path.write_text(path.read_text() + "[1]\n{\n")
    with pytest.raises(DataError, match="line 46: list, not an object"):
        read(path, columns=columns)
    _, bad = read(path, columns=columns, on_bad_row="skip")
    assert bad.counts["rows that cannot be read"] == 2


def test_rows_of_words_say_which_keys_they_do_not_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("h3", reason="h3 is not installed (it is in the trajectory extra)")
    path = tmp_path / "words.jsonl"
    path.write_text('{"text": "DT_NONE SPD_95 TURN_NONE MOVE_NONE", "label": 1, "mmsi": 5}\n' * 2)
    assert holds_words(path)
    read_segments([path])
    assert f"{path}: 1 keys are not used: mmsi (2 rows)" in caplog.text
    assert f"{path}: 2 rows that name no vessel" in caplog.text


def test_the_command_reads_messages_and_leaves_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("h3", reason="h3 is not installed (it is in the trajectory extra)")
    folder = tmp_path / "ais"
    folder.mkdir()
    lines(folder, streamed)
    words = tmp_path / "words.jsonl"
    with pytest.raises(SystemExit, match="0"):
        main(["classify", "words", str(folder), "-o", str(words)])
    assert len(words.read_text().splitlines()) == 3
    with pytest.raises(SystemExit, match="2"):
        main(["classify", "words", str(words), "-o", str(tmp_path / "again.jsonl")])
    assert "holds words already" in capsys.readouterr().err


OUTSIDE = {"d1": (4, None), "d2": (4, 10.0), "d3": (4, None)}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_files_from_outside(kind: str, shared_data: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = sorted((shared_data / "outside_cases").glob(f"{kind}*.csv"))
    if not paths:
        pytest.skip(f"the data beside the checkout has no outside_cases/{kind}*.csv")
    vessels, ratio = OUTSIDE[kind]
    for path in paths:
        tracks, _ = read(path)
        assert len({track.vessel for track in tracks}) == vessels
        assert all(np.isfinite(track.sog).all() and np.isfinite(track.cog).all() for track in tracks)
        assert ("0.1 kn" in caplog.text) == (ratio is not None)
        assert kind == "d1" or all(track.label for track in tracks)
