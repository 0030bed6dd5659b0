"""Files of predictions: one JSON object a line, in the keys of the source project's inference script.

`{id, original_text, true_label, predicted_class, class_name, confidence, probabilities}`, plus `vessel`, `place`
([latitude, longitude] of the segment) and `split` (`train`: the model was trained on this vessel; `valid`: it was
chosen on it) when `anabatic classify predict` wrote them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabatic.core import json_reader
from anabatic.core.errors import DataError
from anabatic.core.json_lines import to_finite_number
from anabatic.vessels.io.split_file import VesselSplit

SPLIT_SIDES = ("train", "valid", "test")
FIX_HINT = "write it with `anabatic classify predict`, or correct the row"


@dataclass(frozen=True)
class Predictions:
    """`N` rows with a known class.

    Attributes:
        classes: `C` names.
        truth: `N` positions in `classes`.
        probabilities: `N x C`.
        vessels: `N` group ids.
        places: `N x 2` degrees north and east; NaN: not known.
        counts: what was left out, and why.
        split: which of the vessels the model was trained or chosen on; None: the rows do not say.
    """

    classes: tuple[str, ...]
    truth: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    vessels: tuple[str, ...]
    places: NDArray[np.float64]
    counts: Counter[str] = field(default_factory=Counter)
    split: VesselSplit | None = None

    def __len__(self) -> int:
        return len(self.truth)

    def select_rows(self, rows: NDArray[np.bool_]) -> Predictions:
        """Return the rows where `rows` (`N`) is true."""
        vessels = tuple(vessel for vessel, wanted in zip(self.vessels, rows.tolist(), strict=True) if wanted)
        return replace(
            self,
            truth=self.truth[rows],
            probabilities=self.probabilities[rows],
            vessels=vessels,
            places=self.places[rows],
        )


def read_predictions(paths: Sequence[str | Path], classes: Sequence[str] = ()) -> Predictions:
    """Read files of predictions.

    Args:
        paths: JSONL files.
        classes: names in the order of the probabilities; none: as the rows name them.

    Raises:
        DataError: names file and line.
    """
    found: list[dict[str, Any]] = []
    for path in paths:
        found.extend(_read_rows(Path(path)))
    if not found:
        raise DataError(f"no predictions in {', '.join(map(str, paths))}", FIX_HINT)
    names = tuple(classes) or _find_class_names(found)
    counts: Counter[str] = Counter()
    kept = [row for row in found if row.get("true_label") is not None]
    counts["rows without a true label"] = len(found) - len(kept)
    if not kept:
        raise DataError(f"none of {len(found)} rows has a true label", "predict on rows that have `label`")
    places = [_parse_position(row) for row in kept]
    return Predictions(
        classes=names,
        truth=np.array([_parse_true_label(row, names) for row in kept], dtype=np.int64),
        probabilities=np.array([_parse_probabilities(row, names) for row in kept], dtype=np.float64),
        vessels=tuple(_vessel_id(row) for row in kept),
        places=np.array(places, dtype=np.float64).reshape(len(kept), 2),
        counts=counts,
        split=_parse_split(kept),
    )


def _parse_position(row: dict[str, Any]) -> tuple[float, float]:
    """Return where a row's segment lies; NaN where the row does not say it."""
    given = row.get("place")
    if not isinstance(given, list) or len(given) != 2:
        return math.nan, math.nan
    lat, lon = (math.nan if (known := to_finite_number(one)) is None else known for one in given)
    return lat, lon


def _parse_split(rows: Sequence[dict[str, Any]]) -> VesselSplit | None:
    if not any("split" in row for row in rows):
        return None
    sides = {_vessel_id(row): row.get("split") for row in rows}
    train, valid, test = (tuple(sorted(v for v, side in sides.items() if side == name)) for name in SPLIT_SIDES)
    return VesselSplit(train, valid, test)


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse_row(line, f"{path}: line {number}")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", "give a file that `anabatic classify predict` wrote") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: invalid UTF-8 ({error.reason})", FIX_HINT) from error


def _parse_row(line: str, place: str) -> dict[str, Any]:
    try:
        row = json_reader.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: broken JSON: {error}", FIX_HINT) from error
    if not isinstance(row, dict) or "probabilities" not in row:
        raise DataError(f"{place}: no `probabilities`", FIX_HINT)
    row["_place"] = place
    return row


def _find_class_names(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the class names: keys of the probabilities, else what `class_name` calls each `predicted_class`."""
    first = rows[0]["probabilities"]
    if isinstance(first, dict):
        return tuple(first)
    if not isinstance(first, list) or not first:
        raise DataError(f"{rows[0]['_place']}: `probabilities` is neither a list nor an object", FIX_HINT)
    names = [f"class {at}" for at in range(len(first))]
    for row in rows:
        at, name = row.get("predicted_class"), row.get("class_name")
        if isinstance(at, int) and 0 <= at < len(names) and isinstance(name, str):
            names[at] = name
    return tuple(names)


def _parse_probabilities(row: dict[str, Any], names: tuple[str, ...]) -> list[float]:
    given = row["probabilities"]
    if isinstance(given, dict):
        if set(given) != set(names):
            raise DataError(f"{row['_place']}: other classes than {', '.join(names)}", "evaluate one model at a time")
        given = [given[name] for name in names]
    if not isinstance(given, list) or len(given) != len(names):
        length = len(given) if isinstance(given, list) else 0
        raise DataError(f"{row['_place']}: {length} probabilities for {len(names)} classes", FIX_HINT)
    fit = all(isinstance(one, (int, float)) and 0 <= one <= 1.001 for one in given)
    if not fit or abs(sum(given) - 1) > 0.01:
        raise DataError(f"{row['_place']}: the probabilities are no numbers from 0 to 1 that sum to 1", FIX_HINT)
    return [float(one) for one in given]


def _parse_true_label(row: dict[str, Any], names: tuple[str, ...]) -> int:
    label = row["true_label"]
    if isinstance(label, str) and label in names:
        return names.index(label)
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(names):
        return label
    raise DataError(f"{row['_place']}: true label {label!r:.60} is none of {len(names)} classes", f"{', '.join(names)}")


def _vessel_id(row: dict[str, Any]) -> str:
    if row.get("vessel"):
        return str(row["vessel"])
    if row.get("source_file"):
        return Path(str(row["source_file"])).stem
    raise DataError(f"{row['_place']}: neither `vessel` nor `source_file`", "a score needs to know whose row it is")
