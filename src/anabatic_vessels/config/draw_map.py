"""`anabatic classify map`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabatic.config.sections.common import require_setting
from anabatic_vessels.config.tracks import TrackSettings


@dataclass(kw_only=True)
class ClassifyMapJob:
    """Draw vessels on a map, coloured by their class; where there are predictions, errors are marked.

    Points come from AIS files, or from the words in rows of predictions or of words; classes come from predictions,
    else from the files. Beside NAME.html goes NAME.geojson, which kepler.gl plays as trips.
    """

    inputs: list[str] = field(default_factory=list)
    """Rows of `classify predict`, rows of words, AIS files; predictions and AIS files together give exact points."""
    out: str = "map.html"
    """Page NAME.html to write, or a folder for map.html."""
    tiles: Literal["none", "osm"] = "none"
    """none: a page that needs nothing from outside; osm: folium over OpenStreetMap, which needs the internet."""
    max_vessels: int = 3000
    """Draw at most so many, wrong ones first."""
    tracks: TrackSettings = field(default_factory=TrackSettings)

    def __post_init__(self) -> None:
        require_setting(
            bool(self.inputs), "nothing to draw is given", "anabatic classify map predictions.jsonl -o map.html"
        )
        require_setting(bool(self.out.strip()), "out is empty", "give --out NAME.html")
        require_setting(self.max_vessels >= 1, f"max_vessels is {self.max_vessels}", "use 1 or more")
