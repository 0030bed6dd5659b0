"""The words of a trajectory: formats, vocabulary, groups, and the class word that must not leak into training.

`char` and `cell` are the formats of PGeogre/traj_token (prepare_dataset.py at ad0fb45 and e13d158), word for word.
`compact` and `motion` are formats of this project and never contain a class word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from anabatic.core.errors import ConfigError, DataError
from anabatic.core.formatting import did_you_mean

SOURCE_CLASSES = (
    "Bulk_Carrier",
    "Cargo_Ship",
    "Container_Ship",
    "Barge",
    "Fishing_Vessel",
    "Other",
    "Oil_Tanker",
    "Passenger_Ship",
    "Sand_Carrier",
    "Fishery_Research_Vessel",
    "Supply_Ship",
    "Storage_Tanker",
    "Submarine",
    "Transport_Ship",
)
"""The 14 class names of the source project; the index is the label."""
UNKNOWN_CLASS = "CLASS_UNKNOWN"
POINT_END = "POINT_END"

H3_METHOD = {"char": "char_split", "cell": "cell_based", "compact": "compact", "motion": "none"}
"""Value of a row's `h3_method` for each format; the first two are the source's names."""
FORMAT_VERSIONS = {"char": 1, "cell": 1, "compact": 1, "motion": 1}
"""Version of each format: raised whenever the encoding of the same points changes."""
FORMATS_WITH_CLASS = ("char", "cell")
"""Formats whose points contain the class word."""

SPEED_WORDS = ("SPD_STOP", "SPD_SLOW", "SPD_MID", "SPD_FAST", "SPD_HIGH")
COURSE_WORDS = ("COG_N", "COG_NE", "COG_E", "COG_SE", "COG_S", "COG_SW", "COG_W", "COG_NW")

SPEED_EDGES = (0, 1, 2, 3, 5, 7, 10, 13, 16, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95, 100) + (
    *(105, 110, 115, 120, 125, 130, 135, 140, 145, 150, 160, 170, 180, 190, 200, 210, 220, 230, 240, 250),
    *(270, 300, 350, 400, 500),
)
"""Lower edges of the fine speed words, in tenths of a knot; the last word has no upper end."""
STEP_EDGES = (0, 2, 4, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 70, 80, 90, 105, 120, 150, 180, 210, 240, 300, 360) + (
    *(420, 480, 540, 600, 720, 900, 1200, 1500, 1800, 2400, 3000, 3600, 5400, 7200, 10800, 14400, 21600, 43200, 86400),
)
"""Lower edges of the time-step words, in seconds; the last word has no upper end."""
COURSE_STEP = 10
"""Width of a fine course word, in degrees."""
TURN_EDGES = (0, 5, 10, 20, 30, 50, 80, 120, 200, 300, 450, 600, 900, 1200, 1500)
"""Lower edges of the turn words, in tenths of a degree: fine near zero, where autopilots and manual steering differ."""
MOVE_EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 125, 250, 500, 1000, 2000)
"""Lower edges of the displacement words, in metres per minute: fine where anchored hulls swing."""
YEARS = range(2000, 2050)


@dataclass(frozen=True)
class WordSpec:
    """The words of a model or a file.

    Attributes:
        format: `char`, `cell`, `compact` or `motion`.
        resolution: resolution of the H3 cells, 0 to 15; ten in the source (a cell is about 66 m wide).
        version: version of the format.
        classes: names of the classes; the index is the label.
    """

    format: str = "compact"
    resolution: int = 10
    version: int = 1
    classes: tuple[str, ...] = SOURCE_CLASSES

    def __post_init__(self) -> None:
        if self.format not in FORMAT_VERSIONS:
            hint = f"formats: {', '.join(FORMAT_VERSIONS)}"
            raise ConfigError(f'unknown word format "{self.format}".{did_you_mean(self.format, FORMAT_VERSIONS)}', hint)
        if not 0 <= self.resolution <= 15:
            raise ConfigError(f"resolution is {self.resolution}", "H3 knows resolutions from 0 to 15")
        if self.format == "cell" and self.resolution != 10:
            raise ConfigError(f"resolution is {self.resolution}, the format cell has 10 digits", "use 10, or compact")
        if self.version != FORMAT_VERSIONS[self.format]:
            raise DataError(
                f"words of {self.spec_name}, but this version writes {self.format}-v{FORMAT_VERSIONS[self.format]}",
                "write the words again with `anabatic classify words`",
            )

    @property
    def spec_name(self) -> str:
        """Name stored in rows and models, such as `compact-v1-r10`."""
        return f"{self.format}-v{self.version}-r{self.resolution}"

    @staticmethod
    def parse(name: str, classes: Iterable[str] = SOURCE_CLASSES) -> WordSpec:
        """Parse a stored name.

        Raises:
            DataError: it is not the name of a word spec, or its version is unsupported.
        """
        match = re.fullmatch(r"(\w+)-v(\d+)-r(\d+)", name)
        if match is None or match[1] not in FORMAT_VERSIONS:
            raise DataError(f'"{name}" names no word spec', "a name looks like compact-v1-r10")
        return WordSpec(match[1], int(match[3]), int(match[2]), tuple(classes))

    @staticmethod
    def parse_model_spec(folder: Path, name: str, classes: Iterable[str] = SOURCE_CLASSES) -> WordSpec:
        """Parse the name stored in a model.

        Raises:
            DataError: as for `parse`; names the folder.
        """
        try:
            return WordSpec.parse(name, classes)
        except (ConfigError, DataError) as error:
            hint = "train it again, or use the version of anabatic that trained it"
            raise DataError(f"{folder} was trained on other words: {error}", hint) from error


def make_class_word(name: str) -> str:
    """Return the word of a class, with `_` for blanks; `UNKNOWN_CLASS` for an empty name."""
    return "_".join(name.split()) or UNKNOWN_CLASS


def build_vocabulary(spec: WordSpec) -> list[str]:
    """Return all words of `spec` in a fixed order, class words last."""
    builders = {"char": _char_words, "cell": _cell_words, "compact": _compact_words, "motion": _motion_words}
    return builders[spec.format](spec)


def _clock_words() -> list[str]:
    units = {"YEAR": YEARS, "MONTH": range(1, 13), "DAY": range(1, 32), "HOUR": range(24)}
    units |= {"MINUTE": range(60), "SECOND": range(60)}
    return [f"{name}_{value}" for name, values in units.items() for value in values]


def _source_words(position: list[str], classes: tuple[str, ...]) -> list[str]:
    return [
        *_clock_words(),
        *position,
        *SPEED_WORDS,
        *COURSE_WORDS,
        "COG_UNKNOWN",
        POINT_END,
        *map(make_class_word, classes),
        UNKNOWN_CLASS,
    ]


def _char_words(spec: WordSpec) -> list[str]:
    digits = [f"H3_CHAR_{position}_{digit}" for position in range(15) for digit in "0123456789abcdef"]
    return _source_words(digits, spec.classes)


def _cell_words(spec: WordSpec) -> list[str]:
    position = [f"H3_res_{resolution}" for resolution in range(16)]
    position += [f"H3_base_{base}" for base in range(122)]
    position += [f"H3_cell_{level}_{digit}" for level in range(1, 16) for digit in range(8)]
    return _source_words(position, spec.classes)


def _fine_words() -> list[str]:
    steps = [f"DT_{edge}" for edge in STEP_EDGES]
    return [*steps, *(f"SPD_{edge}" for edge in SPEED_EDGES), "SPD_NONE"]


def _compact_words(spec: WordSpec) -> list[str]:
    position = [f"H3_base_{base}" for base in range(122)]
    position += [f"H3_{level}_{digit}" for level in range(1, spec.resolution + 1) for digit in range(7)]
    courses = [f"COG_{degrees}" for degrees in range(0, 360, COURSE_STEP)]
    return [*_clock_words(), *position, *_fine_words(), *courses, "COG_NONE", POINT_END]


def _motion_words(spec: WordSpec) -> list[str]:
    turns = [f"TURN_{side}{edge}" for side in ("P", "S") for edge in TURN_EDGES[1:]]
    moves = [f"MOVE_{edge}" for edge in MOVE_EDGES]
    return ["DT_NONE", *_fine_words(), "TURN_0", *turns, "TURN_NONE", *moves, "MOVE_NONE"]


def count_points(words: list[str]) -> int:
    """Return the number of points of a segment's words; `motion` has no POINT_END, but one time step per point."""
    return words.count(POINT_END) or sum(word.startswith("DT_") for word in words)


_WORD_GROUPS = {
    **dict.fromkeys(("H3", "GRID"), "h3"),
    **dict.fromkeys(("SPD", "COG", "TURN", "MOVE"), "motion"),
    **dict.fromkeys(("YEAR", "MONTH", "DAY", "HOUR", "MINUTE", "SECOND", "DT"), "time"),
    POINT_END.partition("_")[0]: "end",
    UNKNOWN_CLASS.partition("_")[0]: "class",
}


def get_word_group(word: str, classes: Iterable[str] = SOURCE_CLASSES) -> str:
    """Return `h3`, `class`, `motion`, `time`, `end`, or `other` for a word of no format."""
    if word in classes:
        return "class"
    head, separator, _ = word.partition("_")
    return _WORD_GROUPS.get(head, "other") if separator else "other"


_CLASS_WORD = re.compile(
    r"\s(?!(?:H3|GRID|SPD|COG|TURN|MOVE|YEAR|MONTH|DAY|HOUR|MINUTE|SECOND|DT)_|POINT_END\b)\S+(?=\sPOINT_END(?:\s|$))"
)
"""The word before POINT_END, unless it is a word of position, motion or time: matches any class name."""


def strip_class_words(text: str) -> tuple[str, int]:
    """Return `text` without its class words, and the number of removed words."""
    return _CLASS_WORD.subn("", text)
