"""What a map shows: vessels with their points, their class and what was predicted; and GeoJSON of it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from anabatic.core.errors import DataError
from anabatic.vessels.io.track import Track
from anabatic.vessels.metrics import classification
from anabatic.vessels.words.segments import Segment
from anabatic.vessels.words.track_decoder import decode_track
from anabatic.vessels.words.vocabulary import WordSpec


@dataclass
class DrawnVessel:
    """One vessel on the map.

    Attributes:
        vessel: id.
        lines: its tracks, by time.
        truth: class name; empty: not known.
        predicted: class name; empty: not predicted.
        confidence: of the prediction, 0 to 1; None: not predicted.
        num_segments: how many segments the prediction is made of.
        was_trained_on: the model that predicts was trained on this vessel.
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
        """Predicted as another class than it is."""
        return bool(self.predicted and self.truth and self.predicted != self.truth)

    @property
    def shown_class(self) -> str:
        """The class whose colour it has."""
        return self.predicted or self.truth or "unknown"


def draw_tracks(tracks: Iterable[Track]) -> dict[str, DrawnVessel]:
    """Return the vessels of tracks, coloured by what the files say."""
    found: dict[str, DrawnVessel] = {}
    for track in tracks:
        drawn = found.setdefault(track.vessel, DrawnVessel(track.vessel, truth=track.label))
        drawn.lines.append(track)
    return found


def draw_segments(rows: Iterable[Segment], classes: tuple[str, ...], spec: WordSpec) -> dict[str, DrawnVessel]:
    """Return the vessels of rows of words; points are as exact as the words. Of several windows the longest is drawn.

    Raises:
        DataError: the words are damaged, or hold no position.
    """
    found: dict[str, DrawnVessel] = {}
    rows = list(rows)
    longest = max((row.window for row in rows), default=0)
    for row in rows:
        if row.window not in (0, longest):
            continue
        truth = classes[row.label] if row.label is not None else ""
        drawn = found.setdefault(row.vessel, DrawnVessel(row.vessel, truth=truth))
        try:
            drawn.lines.append(decode_track(row.text, spec, row.vessel))
        except DataError as error:
            raise DataError(f"{row.row_description}: {error}", error.hint) from error
    for drawn in found.values():
        drawn.lines.sort(key=lambda track: int(track.time[0]))
    return found


def add_predictions(vessels: dict[str, DrawnVessel], rows: Iterable[dict[str, Any]]) -> int:
    """Give vessels the class of their segments' probabilities together, else the class most segments have.

    Returns:
        How many predicted vessels have no points here.
    """
    names: dict[int, str] = {}
    held: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        place, label = row["predicted_class"], row.get("true_label")
        if place is not None:
            names[place] = str(row.get("class_name") or f"class {place}")
        if isinstance(label, int) and isinstance(row.get("true_class"), str):
            names[label] = row["true_class"]
        held[get_vessel_id(row)].append(row)
    missing = 0
    for vessel, own in held.items():
        if vessel not in vessels:
            missing += 1
            continue
        drawn = vessels[vessel]
        drawn.predicted, drawn.confidence, drawn.num_segments = *_combine_predictions(own, names), len(own)
        drawn.was_trained_on = any(row.get("split") == "train" for row in own)
        truth = next((row["true_label"] for row in own if isinstance(row.get("true_label"), int)), None)
        if truth is not None and not drawn.truth:
            drawn.truth = names.get(truth, f"class {truth}")
    return missing


def get_vessel_id(row: dict[str, Any]) -> str:
    """The vessel that a row of predictions is of: `vessel`, else the stem of `source_file`, else the row's id."""
    return str(row.get("vessel") or Path(str(row.get("source_file") or "")).stem or row.get("id", ""))


def _combine_predictions(rows: list[dict[str, Any]], names: dict[int, str]) -> tuple[str, float]:
    lists = [row["probabilities"] for row in rows if isinstance(row.get("probabilities"), list)]
    if len(lists) == len(rows) and len({len(one) for one in lists}) == 1:
        ((mean,),) = classification.pool_by_vessel(np.array(lists, np.float64), [""] * len(lists))[1:]
        best = int(mean.argmax())
        return names.get(best, f"class {best}"), float(mean[best])
    tally = Counter(row["predicted_class"] for row in rows)
    best, count = tally.most_common(1)[0]
    return ("" if best is None else names[best]), count / len(rows)


def split_at_antimeridian(track: Track) -> Iterator[list[list[float]]]:
    """Yield lines of [longitude, latitude, unix time], cut where the track crosses the 180th meridian."""
    rows = [
        [round(lon, 5), round(lat, 5), when]
        for lon, lat, when in zip(track.lon.tolist(), track.lat.tolist(), track.time.tolist(), strict=True)
    ]
    edges = (np.flatnonzero(np.abs(np.diff(track.lon)) > 180) + 1).tolist()
    for first, end in zip([0, *edges], [*edges, len(rows)], strict=True):
        yield rows[first:end]


def iter_geojson(vessels: Iterable[DrawnVessel]) -> Iterator[bytes]:
    """Yield a FeatureCollection (RFC 7946), piece by piece.

    A line is a list of [longitude, latitude, altitude 0, unix seconds]: what kepler.gl's trip layer plays.
    """
    yield b'{"type": "FeatureCollection", "features": ['
    first = True
    for drawn in vessels:
        properties: dict[str, Any] = {"vessel": drawn.vessel, "class": drawn.truth or None, "wrong": drawn.is_wrong}
        if drawn.confidence is not None:
            properties |= {"predicted": drawn.predicted, "confidence": round(drawn.confidence, 4)}
        for track in drawn.lines:
            for line in split_at_antimeridian(track):
                if len(line) < 2:
                    continue
                coordinates = [[lon, lat, 0, when] for lon, lat, when in line]
                geometry = {"type": "LineString", "coordinates": coordinates}
                feature = {"type": "Feature", "properties": properties, "geometry": geometry}
                yield (b"\n" if first else b",\n") + json.dumps(feature, ensure_ascii=False).encode()
                first = False
    yield b"\n]}\n"
