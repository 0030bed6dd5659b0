"""The vessels of a map, with points, true and predicted class; and their GeoJSON."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from anabatic.core.errors import DataError
from anabatic_vessels.io.track import Track
from anabatic_vessels.metrics import classification
from anabatic_vessels.words.segments import Segment
from anabatic_vessels.words.track_decoder import decode_track
from anabatic_vessels.words.vocabulary import WordSpec


@dataclass
class DrawnVessel:
    """One vessel on the map.

    Attributes:
        vessel: id.
        lines: its tracks, sorted by time.
        truth: class name; empty: unknown.
        predicted: class name; empty: not predicted.
        confidence: confidence of the prediction, 0 to 1; None: not predicted.
        num_segments: number of segments that were pooled for the prediction.
        was_trained_on: the model was trained on this vessel.
    """

    vessel: str
    lines: list[Track] = field(default_factory=list)
    truth: str = ""
    predicted: str = ""
    confidence: float | None = None
    num_segments: int = 0
    was_trained_on: bool = False

    @property
    def is_wrong(self) -> bool:
        """True if the predicted class differs from the true class."""
        return bool(self.predicted and self.truth and self.predicted != self.truth)

    @property
    def shown_class(self) -> str:
        """The class that decides its colour."""
        return self.predicted or self.truth or "unknown"


def draw_tracks(tracks: Iterable[Track]) -> dict[str, DrawnVessel]:
    """Return the vessels of tracks, with the classes of the files."""
    vessels: dict[str, DrawnVessel] = {}
    for track in tracks:
        vessel = vessels.setdefault(track.vessel, DrawnVessel(track.vessel, truth=track.label))
        vessel.lines.append(track)
    return vessels


def draw_segments(rows: Iterable[Segment], classes: tuple[str, ...], spec: WordSpec) -> dict[str, DrawnVessel]:
    """Return the vessels of rows of words; points are as precise as the words. Of several windows the longest is drawn.

    Raises:
        DataError: the words are damaged, or contain no position.
    """
    vessels: dict[str, DrawnVessel] = {}
    rows = list(rows)
    longest = max((row.window for row in rows), default=0)
    for row in rows:
        if row.window not in (0, longest):
            continue
        truth = classes[row.label] if row.label is not None else ""
        vessel = vessels.setdefault(row.vessel, DrawnVessel(row.vessel, truth=truth))
        try:
            vessel.lines.append(decode_track(row.text, spec, row.vessel))
        except DataError as error:
            raise DataError(f"{row.row_description}: {error}", error.hint) from error
    for vessel in vessels.values():
        vessel.lines.sort(key=lambda track: int(track.time[0]))
    return vessels


def add_predictions(vessels: dict[str, DrawnVessel], rows: Iterable[dict[str, Any]]) -> int:
    """Set the predicted class of vessels: from pooled probabilities of their segments, else by majority.

    Returns:
        Number of predicted vessels without points.
    """
    names: dict[int, str] = {}
    rows_by_vessel: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        class_index, label = row["predicted_class"], row.get("true_label")
        if class_index is not None:
            names[class_index] = str(row.get("class_name") or f"class {class_index}")
        if isinstance(label, int) and isinstance(row.get("true_class"), str):
            names[label] = row["true_class"]
        rows_by_vessel[get_vessel_id(row)].append(row)
    num_missing = 0
    for vessel, vessel_rows in rows_by_vessel.items():
        if vessel not in vessels:
            num_missing += 1
            continue
        drawn_vessel = vessels[vessel]
        drawn_vessel.predicted, drawn_vessel.confidence, drawn_vessel.num_segments = (
            *_combine_predictions(vessel_rows, names),
            len(vessel_rows),
        )
        drawn_vessel.was_trained_on = any(row.get("split") == "train" for row in vessel_rows)
        truth = next((row["true_label"] for row in vessel_rows if isinstance(row.get("true_label"), int)), None)
        if truth is not None and not drawn_vessel.truth:
            drawn_vessel.truth = names.get(truth, f"class {truth}")
    return num_missing


def get_vessel_id(row: dict[str, Any]) -> str:
    """Return the vessel of a row of predictions: `vessel`, else the stem of `source_file`, else the row's id."""
    return str(row.get("vessel") or Path(str(row.get("source_file") or "")).stem or row.get("id", ""))


def _combine_predictions(rows: list[dict[str, Any]], names: dict[int, str]) -> tuple[str, float]:
    probability_lists = [row["probabilities"] for row in rows if isinstance(row.get("probabilities"), list)]
    if len(probability_lists) == len(rows) and len({len(probabilities) for probabilities in probability_lists}) == 1:
        ((mean,),) = classification.pool_by_vessel(
            np.array(probability_lists, np.float64), [""] * len(probability_lists)
        )[1:]
        best = int(mean.argmax())
        return names.get(best, f"class {best}"), float(mean[best])
    tally = Counter(row["predicted_class"] for row in rows)
    best, count = tally.most_common(1)[0]
    return ("" if best is None else names[best]), count / len(rows)


def split_at_antimeridian(track: Track) -> Iterator[list[list[float]]]:
    """Yield lines of [longitude, latitude, unix time], cut where the track crosses the 180th meridian."""
    rows = [
        [round(lon, 5), round(lat, 5), time]
        for lon, lat, time in zip(track.lon.tolist(), track.lat.tolist(), track.time.tolist(), strict=True)
    ]
    edges = (np.flatnonzero(np.abs(np.diff(track.lon)) > 180) + 1).tolist()
    for start, end in zip([0, *edges], [*edges, len(rows)], strict=True):
        yield rows[start:end]


def iter_geojson(vessels: Iterable[DrawnVessel]) -> Iterator[bytes]:
    """Yield a FeatureCollection (RFC 7946) in chunks.

    A line is a list of [longitude, latitude, altitude 0, unix seconds], the format of kepler.gl's trip layer.
    """
    yield b'{"type": "FeatureCollection", "features": ['
    is_first = True
    for vessel in vessels:
        properties: dict[str, Any] = {"vessel": vessel.vessel, "class": vessel.truth or None, "wrong": vessel.is_wrong}
        if vessel.confidence is not None:
            properties |= {"predicted": vessel.predicted, "confidence": round(vessel.confidence, 4)}
        for track in vessel.lines:
            for line in split_at_antimeridian(track):
                if len(line) < 2:
                    continue
                coordinates = [[lon, lat, 0, time] for lon, lat, time in line]
                geometry = {"type": "LineString", "coordinates": coordinates}
                feature = {"type": "Feature", "properties": properties, "geometry": geometry}
                yield (b"\n" if is_first else b",\n") + json.dumps(feature, ensure_ascii=False).encode()
                is_first = False
    yield b"\n]}\n"
