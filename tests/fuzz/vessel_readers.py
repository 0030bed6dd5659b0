"""Readers of AIS files: sentences and tables."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any

from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.io import split_file
from anabatic_vessels.io.track import BadRowPolicy
from anabatic_vessels.io.track_collection import open_tracks
from anabatic_vessels.metrics import predictions
from anabatic_vessels.words import kinematic_features, segment_reader, word_rows
from fuzz.engine import Good, gzipped, zstd
from fuzz.reading import Reader

SENTENCES = (
    "!AIVDM,1,1,,A,15M67FC000G?ufbE`FepT@3n00Sa,0*5C",
    "!AIVDM,1,1,,B,177KQJ5000G?tO`K>RA1wUbN0TKH,0*5C",
    "!AIVDM,1,1,,A,B5NJ;PP005l4ot5Isbl03wsUkP06,0*76",
    "!AIVDM,1,1,,B,H42O55i18tMET00000000000000,2*6D",
    "!AIVDM,2,1,1,A,55?MbV02;H;s<HtKR20EHE:0@T4@Dn2222222216L961O5Gf0NSQEp6ClRp8,0*1C",
    "!AIVDM,2,2,1,A,88888888880,2*25",
    "!AIVDM,1,1,,A,C5N3SRgPEnJGEBT>NhWAwwo862PaLELTBJ:V00000000S0D:R220,0*0B",
)


def checksum(sentence: str) -> str:
    """Return a sentence with the checksum that belongs to it (IEC 61162-1: the bytes between `!` and `*`, XORed)."""
    body = sentence.lstrip("!").partition("*")[0]
    return f"!{body}*{reduce(lambda one, letter: one ^ ord(letter), body, 0):02X}"


def sentences() -> bytes:
    """Thirty good sentences with times, and one that is cut behind its type, whose checksum is right."""
    good = [f"{1577836800 + 10 * at} {checksum(SENTENCES[at % len(SENTENCES)])}" for at in range(30)]
    return "\n".join([*good, ""]).encode()


HEADING = "mmsi,timestamp,lat,lon,sog,cog,heading,vessel_type"
_ROWS = [
    f"36700000{v},2020-01-01T00:{m:02d}:09Z,29.5{m},-94.{m},10.1,{90 + m},87,Tug_Tow" for v in (1, 2) for m in range(9)
]
TABLE = "\n".join([HEADING, *_ROWS, ""]).encode()
_EPOCH = "\n".join(["MMSI;time;LAT;LON", *(f"367000001;{1577836800 + 60 * m};29.5;-94.{m}" for m in range(9)), ""])
_DANISH = "\n".join(
    [
        "# Timestamp,Type of mobile,MMSI,Latitude,Longitude,Navigational status,ROT,SOG,COG,Heading,IMO,Ship type",
        *(f"01/01/2020 00:{m:02d}:09,Class A,367000001,29.5,-94.{m},,,10.1,9{m},87,,Towing" for m in range(9)),
        "",
    ]
)


@cache
def _parquet() -> bytes:
    import pyarrow
    import pyarrow.parquet

    times = pyarrow.array([1577836800 + 60 * m for m in range(9)], pyarrow.timestamp("s"))
    columns = {"mmsi": [367000001] * 9, "time": times, "lat": [29.5] * 9, "lon": [-94.0 - m / 10 for m in range(9)]}
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


_CHINESE = "\n".join(
    [
        "MMSI编号;时间(UTC+8);经度;纬度;航速(km/h);航向;船舶类型;船名",
        *(f"367000001;2026年03月04日 13:{m:02d}:09;-94,{m};29,5{m};18,5;9{m};货船;甲" for m in range(9)),
        "",
    ]
)
_TWO_ORDERS = "\n".join(
    ["mmsi,Date,Time,lat,lon", *(f"367000001,2{m}/03/2026,1:{m:02d}:00 PM,29.5{m},-94.{m}" for m in range(9)), ""]
)


def _tables() -> Sequence[Good]:
    texts = {"b.csv": _EPOCH, "c.csv": _DANISH, "d.csv": _CHINESE, "e.csv": _TWO_ORDERS}
    return [Good("a.csv", TABLE), *(Good(name, text.encode()) for name, text in texts.items())]


FLAT = [
    {"mmsi": 367000001, "lat": 29.5, "lng": -94.0 - m / 10, "speed": 10.1, "course": 90 + m, "ts": 1577836800000 + m}
    for m in range(6)
]
STREAMED = [
    {
        "MessageType": kind,
        "MetaData": {"MMSI": 367000001, "latitude": 29.5, "time_utc": f"2026-03-04 13:00:0{m}.318353 +0000 UTC"},
        "Message": {
            kind: {"Latitude": 29.5, "Longitude": -94.5, "Sog": 10.1, "Cog": 90, "Type": 70, "UserID": 367000001}
        },
    }
    for m, kind in enumerate(("ShipStaticData", "PositionReport", "PositionReport", "PositionReport"))
]
PLACED = [
    {
        "geometry": {"type": "Point", "coordinates": [-94.5, 29.5]},
        "properties": {"mmsi": 367000001, "time": 1577836800 + m},
    }
    for m in range(6)
]


def _messages() -> list[Good]:
    parts = {"a.jsonl": _lines(FLAT), "b.jsonl": _lines(STREAMED), "c.ndjson": _lines(PLACED)}
    return [
        *(Good(name, lines, "jsonl") for name, lines in parts.items()),
        Good("d.jsonl.gz", gzipped(_lines(FLAT)), "jsonl"),
    ]


def messages(path: Path) -> None:
    """Read JSON lines of messages, whatever the damage makes of them: words, messages or neither."""
    segment_reader.holds_words(path)
    tracks(path)


def tracks(path: Path) -> None:
    """Read a file as the vessel commands do, both where bad rows stop and where they are skipped."""
    for policy in ("fail", "skip"):
        with open_tracks([path], TrackSettings(on_bad_row=policy), BadRowPolicy(policy == "skip")) as found:
            for track in found:
                str(track)


def _skipping(path: Path) -> None:
    with open_tracks([path], TrackSettings(on_bad_row="skip"), BadRowPolicy(True)) as found:
        list(found)


def _whole_sentences(path: Path) -> None:
    """The damage is under a checksum that is right, as a receiver that cuts messages sends it."""
    lines = path.read_text(encoding="latin-1").splitlines()
    fixed = [f"{one[:11]}{checksum(one[11:])}" if one[11:12] == "!" else one for one in lines]
    path.write_text("\n".join(fixed), encoding="latin-1")
    _skipping(path)


WORDS = "YEAR_2021 MONTH_1 DAY_2 HOUR_3 MINUTE_4 SECOND_5 H3_base_12 SPD_10 COG_90 POINT_END"
SEGMENTS = [
    {
        "text": WORDS,
        "label": at,
        "class": f"class_{at}",
        "vessel": f"36700000{at}",
        "source_file": "a.csv",
        "start": 1577836800,
        "features": [0.5] * len(kinematic_features.FEATURE_NAMES),
        "place": [29.5, -94.5],
        "window": 0,
        "words": "compact-v1-r10",
    }
    for at in (0, 1)
]
PREDICTED = [
    {"predicted_class": at, "class_name": "Cargo", "true_label": at, "probabilities": [0.9, 0.1], "vessel": "367000001",
     "place": [29.5, -94.5], "split": "test"}
    for at in (0, 1)
]  # fmt: skip
SPLIT = {"train": ["367000001"], "valid": ["367000002"], "test": ["367000003"], "seed": 3}


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def segments(path: Path) -> None:
    """Read rows of words, both where bad rows stop and where they are skipped."""
    for policy in ("skip", "fail"):
        word_rows.read_word_rows([path], TrackSettings(on_bad_row=policy), None, BadRowPolicy(policy == "skip"))


def _segments() -> list[Good]:
    lines = _lines(SEGMENTS)
    return [Good("a.jsonl", lines, "jsonl"), Good("b.jsonl.gz", gzipped(lines), "jsonl")]


def _predictions(path: Path) -> None:
    predictions.read_predictions([path])
    list(word_rows.read_prediction_rows(path, BadRowPolicy(True)))


READERS = [
    Reader("rows of words", _segments, segments, 200),
    Reader("predictions", lambda: [Good("a.jsonl", _lines(PREDICTED), "jsonl")], _predictions, 200),
    Reader("splits", lambda: [Good("a.json", json.dumps(SPLIT).encode(), "json")], split_file.load_split),
    Reader("sentences", lambda: [Good("a.nmea", sentences())], _skipping, 250, needs="pyais"),
    Reader("sentences with right sums", lambda: [Good("a.nmea", sentences())], _whole_sentences, 250, needs="pyais"),
    Reader("JSON lines of messages", _messages, messages, 250),
    Reader("vessel tables", _tables, tracks, 250),
    Reader("packed tables", lambda: [Good("a.csv.gz", gzipped(TABLE)), Good("b.csv.zst", zstd(TABLE))], tracks, 100),
    Reader("vessel parquet", lambda: [Good("a.parquet", _parquet())], tracks, 150),
]
