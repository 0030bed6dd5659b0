"""`anabatic classify eval`: a score per segment and per vessel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabatic.config.sections.common import DeviceSettings, require_setting
from anabatic_vessels.config.tracks import TrackSettings


@dataclass(kw_only=True)
class ClassifyEvalJob:
    """Score a classifier per segment and per vessel, compared with the most frequent class and boosted trees."""

    model: str = ""
    """Folder of the classifier."""
    data: list[str] = field(default_factory=list)
    """Rows of words (JSONL) or AIS tables (CSV, Parquet) with classes."""
    predictions: list[str] = field(default_factory=list)
    """Files of `anabatic classify predict` to score instead."""
    classes: list[str] = field(default_factory=list)
    """Names of the classes in the order of the probabilities; default: the model's, or as the files name them."""
    baseline: list[str] = field(default_factory=list)
    """Training data for the trees beside the model: only the model's training vessels in it are used, and only the
    numbers that the model reads (all of them where it reads none)."""
    seen: Literal["refuse", "skip", "mark"] = "refuse"
    """Vessels that the model was trained or chosen on: stop, leave them out, or score them separately."""
    regions: dict[str, str] = field(default_factory=dict)
    """Regions to score apart: name -> `SOUTH,NORTH,WEST,EAST` in degrees."""
    bootstrap: int = 1000
    """Resamples of the vessels for the 95 % intervals."""
    seed: int = 0
    """Seed of the resamples and of the trees."""
    figures: bool = True
    """Draw confusion matrix and reliability as PNG."""
    batch_tokens: int = 16384
    """Words per forward pass."""
    out: str | None = None
    """Folder for the report; default: eval in the model's folder, or beside the predictions."""
    tracks: TrackSettings = field(default_factory=TrackSettings)
    device: DeviceSettings = field(default_factory=DeviceSettings)

    def __post_init__(self) -> None:
        require_setting(
            bool(self.predictions) != bool(self.model),
            "give either a model or predictions",
            "--model FOLDER --data FILE, or --predictions FILE",
        )
        require_setting(bool(self.predictions or self.data), "data is not given", "give --data FILE with known classes")
        require_setting(
            bool(self.data) or not self.baseline,
            "baseline needs the numbers of the scored rows as well",
            "give --data FILE with the same vessels as the predictions",
        )
        require_setting(self.bootstrap >= 100, f"bootstrap is {self.bootstrap}", "use 100 or more")
        require_setting(0 <= self.seed < 2**32, f"seed is {self.seed}", "use a whole number from 0 to 4294967295")
        require_setting(self.batch_tokens >= 1, f"batch_tokens is {self.batch_tokens}", "use 1 or more")
        require_setting(
            self.device.nproc == 1, f"device.nproc is {self.device.nproc}", "eval runs in one process: leave it out"
        )
        for name, box in self.regions.items():
            parse_bounds(name, box)


def parse_bounds(name: str, box: str) -> tuple[float, float, float, float]:
    """Read `SOUTH,NORTH,WEST,EAST`.

    Raises:
        ConfigError: it is none; a region across 180 degrees has WEST above EAST and is allowed.
    """
    hint = "write SOUTH,NORTH,WEST,EAST in degrees, such as 32,42,-126,-114"
    parts = box.split(",")
    try:
        south, north, west, east = map(float, parts)
    except ValueError:
        require_setting(False, f'regions.{name}: "{box}" are not four numbers', hint)
        raise
    inside = -90 <= south < north <= 90 and -180 <= west <= 180 and -180 <= east <= 180 and west != east
    require_setting(inside, f'regions.{name}: "{box}" is no region', hint)
    return south, north, west, east
