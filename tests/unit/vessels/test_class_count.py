"""Rows of one class alone are refused before anything is set up, and only when that is certain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anabatic.core.errors import ConfigError
from anabatic_vessels.commands.prechecks import require_two_classes
from anabatic_vessels.config.tracks import TrackSettings

POINT = "{vessel},2020-01-01T00:0{minute}:00Z,24.6,-84.1,18.8,292.4,291,{kind}\n"
HEAD = "mmsi,timestamp,lat,lon,sog,cog,heading,vessel_type\n"


def table(path: Path, *kinds: str) -> Path:
    path.write_text(
        HEAD
        + "".join(
            POINT.format(vessel=20100000 + at, minute=minute, kind=kind)
            for at, kind in enumerate(kinds)
            for minute in range(4)
        )
    )
    return path


def words(path: Path, *some: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"text": "DT_60 SPD_10", **row}) + "\n" for row in some))
    return path


@pytest.mark.parametrize("kinds", [("Whaler",), ("Whaler",) * 3, ("Whaler", ""), ("Whaler", "unknown")])
def test_a_table_of_one_class(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="a classifier needs two classes: all rows are of Whaler"):
        require_two_classes([table(tmp_path / "a.csv", *kinds)], TrackSettings())


@pytest.mark.parametrize(
    "rows",
    [
        [{"label": "Whaler"}] * 3,
        [{"label": 0, "class": "Whaler"}] * 2,
        [{"class": "Whaler"}, {}],
    ],
)
def test_words_of_one_class(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match="a classifier needs two classes: all rows are of Whaler"):
        require_two_classes([words(tmp_path / "a.jsonl", *rows)], TrackSettings())


@pytest.mark.parametrize(
    "rows",
    [
        [{"label": "Whaler"}, {"label": "Galley"}],
        [{"label": 3}, {"label": 3}],  # of the list that the numbers count in
        [{"label": 20, "class": "Whaler"}],
        [{"label": 0}],
        [{}],
        [{"label": "Whaler"}, {"label": 1, "class": "Galley"}],
        [{"label": True}, {"label": "Barge"}],
    ],
)
def test_words_that_may_be_of_several(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    require_two_classes([words(tmp_path / "a.jsonl", *rows)], TrackSettings())


def test_other_files_and_lists_of_classes_count(tmp_path: Path) -> None:
    one, other = table(tmp_path / "a.csv", "Whaler"), table(tmp_path / "b.csv", "Galley")
    require_two_classes([one, other], TrackSettings())
    require_two_classes([one], TrackSettings(classes=["Whaler", "Galley"]))
    require_two_classes([one], TrackSettings(class_map={"Whaler": "Cargo_Ship"}))  # of the list of the source's classes
    with pytest.raises(ConfigError, match="two classes"):
        require_two_classes([one, other], TrackSettings(class_map={"Galley": "Whaler"}))
