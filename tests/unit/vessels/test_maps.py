"""Maps: whose class is wrong, GeoJSON that others read, pages that hold nothing from outside."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabatic.cli.app import main
from anabatic.core.logo import FAVICON_URL
from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.io.track import Track
from anabatic_vessels.maps import drawn_vessels, html_page
from anabatic_vessels.words.segment_reader import read_segments

pytest.importorskip("h3", reason="h3 is not installed (it is in the trajectory extra)")

EVIL = '</script><img src="x" onerror="alert(1)">'


def track(vessel: str, lon: float, label: str = "Cargo", count: int = 12) -> Track:
    steps = np.arange(count)
    time = 1_577_836_800 + 60 * steps
    same = np.full(count, 10.0)
    return Track(
        vessel, "a.csv", time, 50 + 0.003 * steps, (lon + 0.002 * steps + 180) % 360 - 180, same, same, same, label
    )


def told(vessel: str, probabilities: list[float], label: int | None = None, **more: Any) -> dict[str, Any]:
    best = int(np.argmax(probabilities))
    names = ("Cargo", "Tanker", "Tug_Tow")
    row = {"id": 0, "true_label": label, "predicted_class": best, "class_name": names[best], "vessel": vessel}
    return {**row, "probabilities": probabilities, **more}


def test_a_vessel_has_the_class_of_its_segments_together() -> None:
    drawn = drawn_vessels.draw_tracks([track("1", 0), track("2", 1, "Tanker"), track("3", 2)])
    rows = [told("1", [0.4, 0.3, 0.3]), told("1", [0.1, 0.9, 0.0]), told("2", [0.1, 0.8, 0.1]), told("9", [1, 0, 0])]
    assert drawn_vessels.add_predictions(drawn, rows) == 1
    assert (drawn["1"].predicted, drawn["1"].is_wrong, drawn["1"].num_segments) == ("Tanker", True, 2)
    apart = [(0.4 * 0.1) ** 0.5, (0.3 * 0.9) ** 0.5, (0.3 * 1e-6) ** 0.5]
    assert drawn["1"].confidence == pytest.approx(apart[1] / sum(apart))
    assert (drawn["2"].predicted, drawn["2"].is_wrong) == ("Tanker", False)
    assert (drawn["3"].predicted, drawn["3"].is_wrong, drawn["3"].shown_class) == ("", False, "Cargo")


def test_vessels_that_the_model_was_trained_on_do_not_count() -> None:
    drawn = drawn_vessels.draw_tracks([track("1", 0), track("2", 1)])
    drawn_vessels.add_predictions(drawn, [told("1", [0.1, 0.9, 0.0]), told("2", [0.9, 0.1, 0.0], split="train")])
    text = html_page.describe_map(list(drawn.values()), 0)
    assert "0 of 1 predicted rightly (0.0%). 1 do not count: the model was trained on them." in text


def test_of_several_windows_the_longest_is_drawn(tmp_path: Path) -> None:
    lines = [
        f"36700000{vessel},{1_577_836_800 + 60 * step},{20 + step * 0.002},-94.5,7,0,1,Cargo"
        for vessel in (1, 2)
        for step in range(40 if vessel == 1 else 20)
    ]
    path = tmp_path / "ais.csv"
    path.write_text("\n".join(["mmsi,timestamp,lat,lon,sog,cog,heading,vessel_type", *lines]) + "\n")
    read = read_segments([path], TrackSettings(format="compact", points=[30, 60]))
    drawn = drawn_vessels.draw_segments(read, read.classes, read.spec)
    assert [[len(line) for line in one.lines] for one in drawn.values()] == [[40], [20]]


def test_rows_without_probabilities_vote() -> None:
    drawn = drawn_vessels.draw_tracks([track("1", 0, "")])
    rows = [
        {"predicted_class": place, "class_name": name, "vessel": "1"} for place, name in ((0, "A"), (1, "B"), (1, "B"))
    ]
    drawn_vessels.add_predictions(
        drawn, [*rows, {"predicted_class": None, "class_name": "ABSTAIN", "vessel": "1", "true_label": 0}]
    )
    assert (drawn["1"].predicted, drawn["1"].confidence, drawn["1"].truth) == ("B", 0.5, "A")


def test_geojson_is_what_a_trip_layer_plays() -> None:
    drawn = drawn_vessels.draw_tracks([track("1", 0), track("船", 179.99), track("3", 2, count=1)])
    drawn_vessels.add_predictions(drawn, [told("1", [0.1, 0.9, 0.0])])
    collection = json.loads(b"".join(drawn_vessels.iter_geojson(drawn.values())))
    assert collection["type"] == "FeatureCollection"
    first, *rest = collection["features"]
    assert first["properties"] == {
        "vessel": "1",
        "class": "Cargo",
        "wrong": True,
        "predicted": "Tanker",
        "confidence": 0.9,
    }
    assert first["geometry"]["type"] == "LineString"
    assert first["geometry"]["coordinates"][1] == [0.002, 50.003, 0, 1_577_836_860]
    assert [one["properties"]["vessel"] for one in rest] == ["船", "船"]
    for one in collection["features"]:
        lons = [place[0] for place in one["geometry"]["coordinates"]]
        assert max(lons) - min(lons) < 1


def test_the_page_is_whole_and_inert() -> None:
    drawn = list(drawn_vessels.draw_tracks([track(EVIL, 0, EVIL), track("2", 1)]).values())
    page = html_page.render_local_page(drawn, EVIL, 3)
    assert "<img" not in page
    assert re.findall(r'(?:src|href)="?(?!data:)\w+', page) == []
    assert "http" not in page.replace(FAVICON_URL, "")  # the picture names its XML namespace
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert [one["vessel"] for one in data["vessels"]] == [EVIL, "2"]
    assert "2 vessels, 24 points. 3 more are not drawn." in page


def test_folium_draws_the_same() -> None:
    pytest.importorskip("folium", reason="folium is not installed (it is in the trajectory extra)")
    drawn = drawn_vessels.draw_tracks([track(EVIL, 0, EVIL), track("2", 1)])
    drawn_vessels.add_predictions(drawn, [told("2", [0.1, 0.9, 0.0])])
    page = html_page.render_folium_page(list(drawn.values()), "t", 0)
    assert page.count("L.polyline") == 2
    assert page.count("L.circleMarker") == 1
    assert "<img" not in page
    assert "tile.openstreetmap.org" in page


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["classify", *words])
    return int(stop.value.code or 0)


@pytest.fixture
def ais(tmp_path: Path) -> Path:
    rows = [
        f"36700000{v},{1_577_836_800 + 60 * s},{20 + v + s * 0.002},-94.5,7,0,1,Cargo"
        for v in (1, 2)
        for s in range(30)
    ]
    path = tmp_path / "ais.csv"
    path.write_text("\n".join(["mmsi,timestamp,lat,lon,sog,cog,heading,vessel_type", *rows]) + "\n")
    return path


def test_the_command_draws_files_words_and_predictions(
    ais: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, predictions, out = tmp_path / "w.jsonl", tmp_path / "p.jsonl", tmp_path / "maps" / "m.html"
    assert run("words", str(ais), "-o", str(words), "--tracks.format", "compact") == 0
    rows = [json.loads(line) for line in words.read_text().splitlines()]
    told_rows = [told(row["vessel"], [0.2, 0.8], 0, original_text=row["text"], true_class="Cargo") for row in rows]
    predictions.write_text("".join(json.dumps(row) + "\n" for row in told_rows))
    for inputs, right in (([ais], None), ([words], None), ([predictions], 0), ([predictions, ais], 0)):
        capsys.readouterr()
        assert run("map", *map(str, inputs), "-o", str(out)) == 0
        summary = capsys.readouterr().err
        assert "2 vessels, 60 points." in summary
        assert ("0 of 2 predicted rightly" in summary) == (right == 0)
        assert len(json.loads(out.with_suffix(".geojson").read_text())["features"]) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"predicted_class": "x"}', "line 1: no predicted_class"),
        ('{"id": 1}', "line 1: no text"),
        ("", "no row of words"),
        ('{"predicted_class": 1, "vessel": "1"}', "predictions without words hold no position"),
    ],
)
def test_what_cannot_be_drawn(content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content + "\n")
    assert run("map", str(path), "-o", str(tmp_path / "m.html")) == 2
    assert message in capsys.readouterr().err
    assert sorted(one.name for one in tmp_path.iterdir() if one.name != "cache") == ["p.jsonl"]


def test_words_without_a_place_say_so(ais: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = tmp_path / "w.jsonl"
    assert run("words", str(ais), "-o", str(words)) == 0
    assert run("map", str(words), "-o", str(tmp_path / "m.html")) == 2
    assert "hold no position" in capsys.readouterr().err
