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
from anabatic.trajectory import metrics
from anabatic.trajectory.decode import decode
from anabatic.trajectory.segment import Segment
from anabatic.trajectory.track import Track
from anabatic.trajectory.words import WordSpec


@dataclass
class Drawn:
    """One vessel on the map.

    Attributes:
        vessel: id.
        lines: its tracks, by time.
        truth: class name; empty: not known.
        predicted: class name; empty: not predicted.
        confidence: of the prediction, 0 to 1; None: not predicted.
        segments: how many segments the prediction is made of.
        trained: the model that predicts was trained on this vessel.
    """

    vessel: str
    lines: list[Track] = field(default_factory=list)
    truth: str = ""
    predicted: str = ""
    confidence: float | None = None
    segments: int = 0
    trained: bool = False

    @property
    def wrong(self) -> bool:
        """Predicted as another class than it is."""
        return bool(self.predicted and self.truth and self.predicted != self.truth)

    @property
    def shown(self) -> str:
        """The class whose colour it has."""
        return self.predicted or self.truth or "unknown"


def from_tracks(tracks: Iterable[Track]) -> dict[str, Drawn]:
    """Return the vessels of tracks, coloured by what the files say."""
    found: dict[str, Drawn] = {}
    for track in tracks:
        drawn = found.setdefault(track.vessel, Drawn(track.vessel, truth=track.label))
        drawn.lines.append(track)
    return found


def from_segments(rows: Iterable[Segment], classes: tuple[str, ...], spec: WordSpec) -> dict[str, Drawn]:
    """Return the vessels of rows of words; points are as exact as the words. Of several windows the longest is drawn.

    Raises:
        DataError: the words are damaged, or hold no position.
    """
    found: dict[str, Drawn] = {}
    rows = list(rows)
    longest = max((row.window for row in rows), default=0)
    for row in rows:
        if row.window not in (0, longest):
            continue
        truth = classes[row.label] if row.label is not None else ""
        drawn = found.setdefault(row.vessel, Drawn(row.vessel, truth=truth))
        try:
            drawn.lines.append(decode(row.text, spec, row.vessel))
        except DataError as error:
            raise DataError(f"{row.name}: {error}", error.hint) from error
    for drawn in found.values():
        drawn.lines.sort(key=lambda track: int(track.time[0]))
    return found


def predict(vessels: dict[str, Drawn], rows: Iterable[dict[str, Any]]) -> int:
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
        held[vessel_of(row)].append(row)
    missing = 0
    for vessel, own in held.items():
        if vessel not in vessels:
            missing += 1
            continue
        drawn = vessels[vessel]
        drawn.predicted, drawn.confidence, drawn.segments = *_vote(own, names), len(own)
        drawn.trained = any(row.get("split") == "train" for row in own)
        truth = next((row["true_label"] for row in own if isinstance(row.get("true_label"), int)), None)
        if truth is not None and not drawn.truth:
            drawn.truth = names.get(truth, f"class {truth}")
    return missing


def vessel_of(row: dict[str, Any]) -> str:
    """The vessel that a row of predictions is of: `vessel`, else the stem of `source_file`, else the row's id."""
    return str(row.get("vessel") or Path(str(row.get("source_file") or "")).stem or row.get("id", ""))


def _vote(rows: list[dict[str, Any]], names: dict[int, str]) -> tuple[str, float]:
    lists = [row["probabilities"] for row in rows if isinstance(row.get("probabilities"), list)]
    if len(lists) == len(rows) and len({len(one) for one in lists}) == 1:
        ((mean,),) = metrics.by_vessel(np.array(lists, np.float64), [""] * len(lists))[1:]
        best = int(mean.argmax())
        return names.get(best, f"class {best}"), float(mean[best])
    tally = Counter(row["predicted_class"] for row in rows)
    best, count = tally.most_common(1)[0]
    return ("" if best is None else names[best]), count / len(rows)


def pieces(track: Track) -> Iterator[list[list[float]]]:
    """Yield lines of [longitude, latitude, unix time], cut where the track crosses the 180th meridian."""
    rows = [
        [round(lon, 5), round(lat, 5), when]
        for lon, lat, when in zip(track.lon.tolist(), track.lat.tolist(), track.time.tolist(), strict=True)
    ]
    edges = (np.flatnonzero(np.abs(np.diff(track.lon)) > 180) + 1).tolist()
    for first, end in zip([0, *edges], [*edges, len(rows)], strict=True):
        yield rows[first:end]


def geojson(vessels: Iterable[Drawn]) -> Iterator[bytes]:
    """Yield a FeatureCollection (RFC 7946), piece by piece.

    A line is a list of [longitude, latitude, altitude 0, unix seconds]: what kepler.gl's trip layer plays.
    """
    yield b'{"type": "FeatureCollection", "features": ['
    first = True
    for drawn in vessels:
        properties: dict[str, Any] = {"vessel": drawn.vessel, "class": drawn.truth or None, "wrong": drawn.wrong}
        if drawn.confidence is not None:
            properties |= {"predicted": drawn.predicted, "confidence": round(drawn.confidence, 4)}
        for track in drawn.lines:
            for line in pieces(track):
                if len(line) < 2:
                    continue
                coordinates = [[lon, lat, 0, when] for lon, lat, when in line]
                geometry = {"type": "LineString", "coordinates": coordinates}
                feature = {"type": "Feature", "properties": properties, "geometry": geometry}
                yield (b"\n" if first else b",\n") + json.dumps(feature, ensure_ascii=False).encode()
                first = False
    yield b"\n]}\n"
