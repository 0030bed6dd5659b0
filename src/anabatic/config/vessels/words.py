"""`anabatic classify words`."""

from __future__ import annotations

from dataclasses import dataclass, field

from anabatic.config.sections.common import require_setting
from anabatic.config.vessels.tracks import TrackSettings


@dataclass(kw_only=True)
class ClassifyWordsJob:
    """Read AIS files, clean them, cut the tracks into segments and write each as a row of words.

    Tables (.csv, .tsv, also .gz, .zst, .bz2, .zip; .parquet) may have the columns of NOAA MarineCadastre, of the Danish
    Maritime Authority or of the source project; raw sentences (.nmea, .nm4) need `pip install 'anabatic[nmea]'`.
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
