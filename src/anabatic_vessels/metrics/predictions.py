"""Files of predictions: one JSON object per line, with the keys of the source project's inference script.

`{id, original_text, true_label, predicted_class, class_name, confidence, probabilities}`, plus `vessel`, `place`
([latitude, longitude] of the segment) and `split` (`train`: the model was trained on this vessel; `valid`: it was
validated on it) if `anabatic classify predict` wrote them.
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
from anabatic.core.json_reader import to_finite_number
from anabatic_vessels.io.split_file import VesselSplit

SPLIT_SIDES = ("train", "valid", "test")
FIX_HINT = "write it with `anabatic classify predict`, or correct the row"


@dataclass(frozen=True)
class Predictions:
    """`N` rows with a known class.

    Attributes:
        classes: `C` names.
        truth: `N` indices of `classes`.
        probabilities: `N x C`.
        vessels: `N` group ids.
        places: `N x 2` degrees north and east; NaN: unknown.
        counts: number of rows left out, by reason.
        split: vessels that the model was trained or validated on; None: unknown.
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

    def select_rows(self, mask: NDArray[np.bool_]) -> Predictions:
        """Return the rows selected by `mask` (`N`)."""
        vessels = tuple(vessel for vessel, keep in zip(self.vessels, mask.tolist(), strict=True) if keep)
        return replace(
            self,
            truth=self.truth[mask],
            probabilities=self.probabilities[mask],
            vessels=vessels,
            places=self.places[mask],
        )


def read_predictions(paths: Sequence[str | Path], classes: Sequence[str] = ()) -> Predictions:
    """Read files of predictions.

    Args:
        paths: JSONL files.
        classes: names in the order of the probabilities; empty: the names in the rows.

    Raises:
        DataError: names file and line.
    """
    rows: list[dict[str, Any]] = []
    for path in paths:
        rows.extend(_read_rows(Path(path)))
    if not rows:
        raise DataError(f"no predictions in {', '.join(map(str, paths))}", FIX_HINT)
    names = tuple(classes) or _find_class_names(rows)
    counts: Counter[str] = Counter()
    labelled = [row for row in rows if row.get("true_label") is not None]
    counts["rows without a true label"] = len(rows) - len(labelled)
    if not labelled:
        raise DataError(f"none of {len(rows)} rows has a true label", "predict on rows that have `label`")
    positions = [_parse_position(row) for row in labelled]
    return Predictions(
        classes=names,
        truth=np.array([_parse_true_label(row, names) for row in labelled], dtype=np.int64),
        probabilities=np.array([_parse_probabilities(row, names) for row in labelled], dtype=np.float64),
        vessels=tuple(_vessel_id(row) for row in labelled),
        places=np.array(positions, dtype=np.float64).reshape(len(labelled), 2),
        counts=counts,
        split=_parse_split(labelled),
    )


def _parse_position(row: dict[str, Any]) -> tuple[float, float]:
    """Return latitude and longitude of a row; NaN if unknown."""
    value = row.get("place")
    if not isinstance(value, list) or len(value) != 2:
        return math.nan, math.nan
    lat, lon = (math.nan if (number := to_finite_number(item)) is None else number for item in value)
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
            for line_number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse_row(line, f"{path}: line {line_number}")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", "give a file that `anabatic classify predict` wrote") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: invalid UTF-8 ({error.reason})", FIX_HINT) from error


def _parse_row(line: str, location: str) -> dict[str, Any]:
    try:
        row = json_reader.loads(line)
    except ValueError as error:
        raise DataError(f"{location}: broken JSON: {error}", FIX_HINT) from error
    if not isinstance(row, dict) or "probabilities" not in row:
        raise DataError(f"{location}: no `probabilities`", FIX_HINT)
    row["_place"] = location
    return row


def _find_class_names(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the class names: keys of the probabilities, else the `class_name` of each `predicted_class`."""
    probabilities = rows[0]["probabilities"]
    if isinstance(probabilities, dict):
        return tuple(probabilities)
    if not isinstance(probabilities, list) or not probabilities:
        raise DataError(f"{rows[0]['_place']}: `probabilities` is neither a list nor an object", FIX_HINT)
    names = [f"class {index}" for index in range(len(probabilities))]
    for row in rows:
        index, name = row.get("predicted_class"), row.get("class_name")
        if isinstance(index, int) and 0 <= index < len(names) and isinstance(name, str):
            names[index] = name
    return tuple(names)


def _parse_probabilities(row: dict[str, Any], names: tuple[str, ...]) -> list[float]:
    values = row["probabilities"]
    if isinstance(values, dict):
        if set(values) != set(names):
            raise DataError(f"{row['_place']}: other classes than {', '.join(names)}", "evaluate one model at a time")
        values = [values[name] for name in names]
    if not isinstance(values, list) or len(values) != len(names):
        length = len(values) if isinstance(values, list) else 0
        raise DataError(f"{row['_place']}: {length} probabilities for {len(names)} classes", FIX_HINT)
    is_valid = all(isinstance(value, (int, float)) and 0 <= value <= 1.001 for value in values)
    if not is_valid or abs(sum(values) - 1) > 0.01:
        raise DataError(f"{row['_place']}: the probabilities are no numbers from 0 to 1 that sum to 1", FIX_HINT)
    return [float(value) for value in values]


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
