"""Settings of how vessel tracks are read and encoded as words; `anabatic classify words`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from anabatic.config.sections.common import require_setting


@dataclass(kw_only=True)
class TrackSettings:
    """Conversion of AIS files to segments of words; rows of words (.jsonl) keep the words they have."""

    format: Literal["motion", "compact", "cell", "char"] = "motion"
    """Words of a point: ours without place and clock (motion) or with them (compact), or the source project's two."""
    resolution: int = 10
    """H3 resolution of a position; cells of 10 are some 130 m across, each step more divides by 2.6."""
    points: list[int] = field(default_factory=list)
    """Points of a segment; several: the tracks are cut once for each; empty: as the model was trained, else 30."""
    min_points: int = 10
    """A shorter rest at the end of a run is left out."""
    gap_minutes: float = 60.0
    """A longer silence ends a segment; 0: never, as in the source project."""
    max_still: float = 1.0
    """Leave out segments with a larger share of points under 0.5 knots; 1: none."""
    keep_class_word: bool = False
    """Leave the class word in the text: it is the answer, so only for pretraining on training vessels."""
    features: bool = True
    """Write the kinematic numbers of each segment beside its words."""
    classes: list[str] = field(default_factory=list)
    """Class names, the position is the label; empty: the source project's 14, or the names found in the data."""
    class_map: dict[str, str] = field(default_factory=dict)
    """Name or code in the files -> class, for example `{储罐船: Storage_Tanker, "70": Cargo}`."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our column (vessel, time, lat, lon, sog, cog, heading, label, type) -> its name in the files, with `[unit]`."""
    time_format: str | None = None
    """strptime format of the time column; default: recognised (ISO 8601, clear dates, unix seconds or ms)."""
    utc_offset: float = 0.0
    """Hours that times without a zone are ahead of UTC."""
    clean: bool = True
    """Remove impossible points and report how many; off: the points as they are, as in the source project."""
    max_knots: float = 80.0
    """A position that needs more speed than this to reach is a jump, or another hull under the same id."""
    check_mmsi: Literal["auto", "on", "off"] = "auto"
    """Leave out ids that no ship has (outside 200 to 775 million); auto: unless most ids are, which are pseudonyms."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """A row that cannot be read stops the job, or is skipped, counted and reported."""

    @property
    def window_lengths(self) -> tuple[int, ...]:
        """Lengths that tracks are cut to, in points, longest first."""
        return tuple(sorted(set(self.points), reverse=True)) or (30,)

    def with_window_lengths(self, points: Sequence[int]) -> TrackSettings:
        """Return these settings with the lengths that a model was trained on, unless they name their own."""
        if self.points or not points:
            return self
        return replace(self, points=list(points), min_points=min(self.min_points, *points))

    def __post_init__(self) -> None:
        require_setting(
            0 <= self.resolution <= 15, f"resolution is {self.resolution}", "H3 knows resolutions from 0 to 15"
        )
        exact = self.format != "cell" or self.resolution == 10
        require_setting(
            exact, f"resolution is {self.resolution}, the format cell has 10 digits", "use 10, or format compact"
        )
        shortest = min(self.window_lengths)
        require_setting(shortest >= 2, f"points is {shortest}", "use 2 or more; the source project has 30")
        enough = 1 <= self.min_points <= shortest
        require_setting(enough, f"min_points is {self.min_points}, points is {shortest}", "use 1 up to points")
        require_setting(self.gap_minutes >= 0, f"gap_minutes is {self.gap_minutes}", "use 0 or more; 0 never cuts")
        require_setting(0 <= self.max_still <= 1, f"max_still is {self.max_still}", "use a share from 0 to 1")
        require_setting(self.max_knots > 0, f"max_knots is {self.max_knots}", "use more than 0; 80 passes fast ferries")
        require_setting(abs(self.utc_offset) <= 14, f"utc_offset is {self.utc_offset}", "use hours from -12 to 14")
        twice = len(set(self.classes)) != len(self.classes)
        require_setting(not twice, f"a class stands twice in {', '.join(self.classes)}", "name each class once")
        require_setting(len(self.classes) != 1, "one class is no choice", "name two classes or more")


@dataclass(kw_only=True)
class ClassifyWordsJob:
    """Read AIS files, clean them, cut the tracks into segments and write each as a row of words.

    Tables (.csv, .tsv, also .gz, .zst, .bz2, .zip; .parquet) may have the columns of NOAA MarineCadastre, of the Danish
    Maritime Authority, of the source project and others; messages can be JSON lines (.jsonl, .ndjson); raw sentences
    (.nmea, .nm4) need `pip install 'anabatic[nmea]'`.
    """

    inputs: list[str] = field(default_factory=list)
    """AIS files, folders or globs; words without an option are inputs."""
    out: str = "words.jsonl"
    """File NAME.jsonl to write, or a folder for words.jsonl; what was left out and changed goes to NAME.report.json."""
    source_keys: bool = False
    """Write only the keys of the source project's rows: text, label, segment_length, h3_method, source_file."""
    tracks: TrackSettings = field(default_factory=TrackSettings)

    def __post_init__(self) -> None:
        require_setting(bool(self.inputs), "no AIS file is given", "anabatic classify words FILE ... -o words.jsonl")
        require_setting(bool(self.out.strip()), "out is empty", "give --out NAME.jsonl")
