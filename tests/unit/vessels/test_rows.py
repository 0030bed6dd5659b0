"""Rows of words: the source's, ours, masked ones, and broken ones; splits by vessel; the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.cli.app import main
from anabatic.core.errors import DataError
from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.io import split_file
from anabatic_vessels.words.kinematic_features import FEATURE_NAMES
from anabatic_vessels.words.segment_reader import find_files, read_segments
from anabatic_vessels.words.segments import SegmentSet, as_line, as_row
from anabatic_vessels.words.vocabulary import SOURCE_CLASSES, WordSpec

pytest.importorskip("h3", reason="h3 is not installed (it is in the trajectory extra)")

POINT = "YEAR_2021 MONTH_9 DAY_17 HOUR_6 MINUTE_11 SECOND_42 H3_res_10 H3_base_4 " + " ".join(
    f"H3_cell_{level}_{digit}" for level, digit in enumerate((4, 6, 0, 3, 6, 5, 2, 2, 2, 4), start=1)
)
TEXT = f"{POINT} SPD_STOP COG_NE Bulk_Carrier POINT_END"
BARE = f"{POINT} SPD_STOP COG_NE POINT_END"
TABLE = "mmsi,timestamp,lat,lon,sog,cog,heading,vessel_type"


def write(tmp_path: Path, *rows: Any, name: str = "a.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def table(tmp_path: Path, vessels: int = 4, points: int = 40) -> Path:
    """A table of vessels of two classes."""
    rows = [
        f"{367000000 + vessel},{1_577_836_800 + 60 * step},{20 + vessel + step * 0.002},-94.5,{7 + vessel},0,1,"
        + ("Cargo", "Tanker")[vessel % 2]
        for vessel in range(vessels)
        for step in range(points)
    ]
    path = tmp_path / "ais.csv"
    path.write_text("\n".join([TABLE, *rows]) + "\n")
    return path


def test_the_readme_s_three_keys_are_enough(tmp_path: Path) -> None:
    read = read_segments([write(tmp_path, {"text": TEXT, "label": 0, "source_file": "104694.csv"}, "")])
    (row,) = read
    assert (row.text, row.label, row.vessel, row.points, row.line) == (BARE, 0, "104694", 1, 1)
    assert (read.spec.format, read.classes) == ("cell", SOURCE_CLASSES)
    assert read.bad_rows.counts["class words taken out"] == 1
    (kept,) = read_segments([tmp_path / "a.jsonl"], TrackSettings(keep_class_word=True))
    assert kept.text == TEXT


def test_masked_rows_are_read_from_their_original(tmp_path: Path) -> None:
    masked = {"input_text": "[MASK]", "labels": [1, -100], "original_text": TEXT, "original_label": 4}
    (row,) = read_segments([write(tmp_path, masked)])
    assert (row.text, row.label, row.vessel) == (BARE, 4, "a.jsonl:1")


def test_our_rows_come_back_as_they_were(tmp_path: Path) -> None:
    for kind in ("compact", "motion", "cell", "char"):
        first = read_segments([table(tmp_path)], TrackSettings(format=kind))
        assert len(first) == 8
        path = write(tmp_path, *(as_row(one, first.spec) for one in first))
        assert path.read_text().splitlines() == [as_line(one, first.spec) for one in first]
        again = read_segments([path])
        assert (again.spec.spec_name, again.classes) == (first.spec.spec_name, ("Cargo", "Tanker"))
        for one, other in zip(first, again, strict=True):
            assert (one.text, one.label, one.vessel, one.start, one.points, one.place) == (
                *(other.text, other.label, other.vessel, other.start, other.points, other.place),
            )
            assert one.features is not None and other.features is not None
            for a, b in zip(one.features, other.features, strict=True):
                assert math.isclose(a, b, rel_tol=1e-4) or (math.isnan(a) and math.isnan(b))


BAD = [
    ("{", "line 2: broken JSON"),
    ("[1]", "line 2: list, not an object"),
    ({"label": 0}, "line 2: no text"),
    ({"text": "  ", "label": 0}, "line 2: no text"),
    ({"text": TEXT, "label": 14}, r"line 2: label 14, but there are 14 classes \(0 to 13\)"),
    ({"text": TEXT, "label": -1}, "line 2: label -1"),
    ({"text": TEXT, "label": 1.5}, "line 2: label 1.5 is no whole number"),
    ({"text": TEXT, "label": True}, "line 2: label true is no number"),
    ({"text": TEXT, "label": "Zeppelin"}, 'line 2: class "Zeppelin" is none of the'),
    (
        {"text": "GRID_RES_a SPD_STOP", "h3_method": "grid_based"},
        r"words of no format that is read \(h3_method grid_based",
    ),
    ({"text": TEXT, "label": 0, "features": [1, 2]}, "features: 2 numbers, expected"),
    ({"text": TEXT, "label": 0, "features": "x"}, "features: no list of numbers"),
    (
        {"text": TEXT, "label": 0, "words": "compact-v1-r10"},
        "line 2: words of compact-v1-r10 among words of cell-v1-r10",
    ),
    (
        {"text": TEXT, "label": 0, "words": "compact-v7-r10"},
        "line 2: words of compact-v7-r10, but this version writes compact-v1",
    ),
    ({"text": TEXT, "label": 0, "words": "morse"}, 'line 2: "morse" names no word spec'),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_bad_rows_name_file_and_line(row: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, {"text": TEXT, "label": 0, "source_file": "a.csv"}, row)
    with pytest.raises(DataError, match=message):
        read_segments([path], TrackSettings(classes=list(SOURCE_CLASSES)))


def test_bad_rows_can_be_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, {"text": TEXT, "label": 0}, *(row for row, _ in BAD[:4]))
    read = read_segments([path], TrackSettings(on_bad_row="skip"))
    assert (len(read), read.bad_rows.counts["rows that cannot be read"]) == (1, 4)


def test_files_of_two_class_lists_are_refused(tmp_path: Path) -> None:
    rows = [{"text": TEXT, "label": 0, "class": name, "source_file": "a.csv"} for name in ("Cargo", "Tanker")]
    with pytest.raises(DataError, match='line 2: label 0 is "Tanker" here and "Cargo" before'):
        read_segments([write(tmp_path, *rows)])


def test_words_and_points_are_not_mixed(tmp_path: Path) -> None:
    words = write(tmp_path, {"text": TEXT, "label": 0})
    with pytest.raises(DataError, match="holds words, .* holds points"):
        read_segments([words, table(tmp_path)])
    with pytest.raises(DataError, match="words of cell-v1-r10 among words of compact"):
        read_segments([words], expected_spec=WordSpec())
    assert read_segments([table(tmp_path)], expected_spec=WordSpec("motion")).spec.format == "motion"


def test_unknown_words_are_counted_and_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read = read_segments([write(tmp_path, {"text": BARE + " banana", "label": 0})])
    assert read.bad_rows.counts["words that are not in the vocabulary"] == 1
    assert "1 of 22 words are not in the vocabulary of cell-v1-r10: banana (1)" in caplog.text


def test_what_is_no_file_of_vessels(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("x.txt", "missing.csv", "empty"):
        with pytest.raises(DataError, match=name):
            find_files([tmp_path / name])
    table(tmp_path)
    assert find_files([tmp_path]) == find_files([str(tmp_path / "*.csv")]) == [tmp_path / "ais.csv"]


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["classify", *words])
    return int(stop.value.code or 0)


def test_segments_of_several_lengths(tmp_path: Path) -> None:
    """40 points: whole, then 30 and 10; what is read again is what was written."""
    path = table(tmp_path, vessels=2)
    first = read_segments([path], TrackSettings(points=[30, 60, 30]))
    assert [(one.points, one.window) for one in first] == [(40, 60), (30, 30), (10, 30)] * 2
    assert first.window_lengths == (30, 60)
    out = write(tmp_path, *(as_row(one, first.spec) for one in first))
    assert [one.window for one in read_segments([out])] == [60, 30, 30] * 2
    apart = [read_segments([path], TrackSettings(points=[points])).rows for points in (60, 30)]
    lines = [as_line(one, first.spec) for rows in apart for one in rows]
    assert sorted(as_line(one, first.spec) for one in first) == sorted(lines)


def test_the_command_writes_rows_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "words.jsonl"
    assert run("words", str(table(tmp_path)), "-o", str(out), "--tracks.format", "cell", "--source-keys") == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [list(row) for row in rows] == [["text", "label", "segment_length", "h3_method", "source_file"]] * 8
    report = json.loads((tmp_path / "words.report.json").read_text())
    assert (report["vessels"], report["points"], report["segments"]) == (4, 160, 8)
    assert report["segments_per_class"] == {"Cargo": 4, "Tanker": 4}
    assert report["words_per_point"] == 21
    assert run("words", str(tmp_path), "-o", str(out)) == 0  # of a folder, the AIS files
    assert "4 vessels, 160 points, 8 segments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no AIS file is given"),
        (("nothing.csv",), "error: nothing.csv: there is no such file"),
        (("ais.csv", "-o", "x.csv"), "out is x.csv"),
        (("ais.csv", "--tracks.points", "1"), "points is 1"),
        (("ais.csv", "--tracks.points", "60", "5"), "min_points is 10, points is 5"),
        (("ais.csv", "--tracks.points", "30,60"), "points"),
        (("ais.csv", "--tracks.format", "cell", "--tracks.resolution", "9"), "the format cell has 10 digits"),
        (
            ("ais.csv", "--tracks.min-points", "30", "--tracks.points", "30", "--tracks.gap-minutes", "0.5"),
            "no segment of 30",
        ),
        (("ais.csv", "-o", "ais.csv/words.jsonl"), "cannot write ais.csv/words.jsonl"),
    ],
)
def test_the_command_says_what_is_wrong(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run("words", *words) in (1, 2)
    told = capsys.readouterr().err
    assert message in told
    assert "hint: " in told
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["ais.csv"]


vessels = st.dictionaries(
    st.text("abcdef0123", min_size=1, max_size=4), st.one_of(st.none(), st.integers(0, 3)), max_size=60
)


@settings(max_examples=60, deadline=None)
@given(vessels, st.integers(2, 6), st.integers(0, 3))
def test_folds_hold_every_vessel_once(labels: dict[str, int | None], count: int, seed: int) -> None:
    if len(labels) < count:
        with pytest.raises(DataError):
            split_file.make_folds(labels, count, seed)
        return
    dealt = split_file.make_folds(labels, count, seed)
    assert sorted(vessel for fold in dealt for vessel in fold) == sorted(labels)
    for label in set(labels.values()):
        sizes = [sum(labels[vessel] == label for vessel in fold) for fold in dealt]
        assert max(sizes) - min(sizes) <= 1
    assert dealt == split_file.make_folds(dict(reversed(labels.items())), count, seed)


@settings(max_examples=60, deadline=None)
@given(vessels, st.sampled_from([0.0, 0.1, 0.3]), st.sampled_from([0.0, 0.2]))
def test_sides_are_apart_and_stay(labels: dict[str, int | None], valid: float, test: float) -> None:
    made = split_file.make_split(labels, valid, test)
    twice = any(list(labels.values()).count(label) > 1 for label in labels.values())
    assert bool(made.valid) == bool(valid and twice)
    assert {labels[vessel] for vessel in made.train} == set(labels.values())
    assert sorted((*made.train, *made.valid, *made.test)) == sorted(labels)
    assert {made.find_side(vessel) for vessel in made.train} <= {"train"}
    assert made.find_side("new") == ""
    assert split_file.make_split(dict(reversed(labels.items())), valid, test) == made


def test_a_split_is_stored(tmp_path: Path) -> None:
    made = split_file.make_split({str(number): number % 3 for number in range(30)}, 0.2, 0.1, seed=4)
    made.save(tmp_path / "split.json")
    assert split_file.load_split(tmp_path / "split.json") == made
    (tmp_path / "split.json").write_text(json.dumps({"seed": 0, "train": ["1"], "valid": ["1"]}))
    with pytest.raises(DataError, match="1 vessels on two sides, such as 1"):
        split_file.load_split(tmp_path / "split.json")
    (tmp_path / "split.json").write_text("[]")
    with pytest.raises(DataError, match="no split"):
        split_file.load_split(tmp_path / "split.json")


def test_a_vessel_s_class_is_that_of_most_segments(tmp_path: Path) -> None:
    rows = [{"text": TEXT, "label": label, "source_file": "a.csv"} for label in (1, 2, 2)]
    read: SegmentSet = read_segments([write(tmp_path, *rows)])
    assert split_file.find_majority_labels(read) == {"a": 2}
    assert len(FEATURE_NAMES) == 83
