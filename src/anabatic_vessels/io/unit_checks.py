"""Compare the speeds and courses of a file with what its positions and times say: a wrong unit is seen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from anabatic_vessels.io.column_names import ColumnLayout, quote_option
from anabatic_vessels.io.track import Floats

_MAX_SAMPLES = 4000
_MIN_SAMPLES = 10
_BIN_SECONDS = 30
"""Points of a vessel are compared at this distance in time, so that rounded positions matter little."""
_MIN_METRES, _MAX_SECONDS = 30.0, 1800
_MIN_KNOTS, _MAX_KNOTS = 1.0, 70.0
_SPEED_UNITS = {"kn": 1.0, "0.1 kn": 0.1, "m/s": 3600 / 1852, "km/h": 1000 / 1852, "cm/s": 36 / 1852}
_COURSE_UNITS = {"0.1 deg": 0.1, "rad": 180 / math.pi}


@dataclass
class UnitSample:
    """Speeds and courses beside those of the positions, of points at which a vessel moves straight and steadily.

    Attributes:
        ratios: speeds over those of the positions.
        courses: courses, with the bearing of the positions; both in degrees.
        num_samples: number of ratios.
    """

    ratios: list[Floats] = field(default_factory=list)
    courses: list[tuple[Floats, Floats]] = field(default_factory=list)
    num_samples: int = 0

    def add_points(self, points: NDArray[np.void]) -> None:
        """Add points of several vessels, in any order, with valid positions."""
        if self.num_samples >= _MAX_SAMPLES or len(points) < 3:
            return
        points = points[np.lexsort((points["time"], points["vessel"]))]
        bins = points["time"] // _BIN_SECONDS
        is_first = (np.diff(bins, prepend=bins[0] - 1) != 0) | (np.diff(points["vessel"], prepend=-1) != 0)
        points = points[is_first]
        east, north, seconds = _measure_moves(points)
        metres = np.hypot(east, north)
        same = np.diff(points["vessel"]) == 0
        usable = same & (metres >= _MIN_METRES) & (seconds > 0) & (seconds <= _MAX_SECONDS)
        both = usable[:-1] & usable[1:]
        with np.errstate(divide="ignore", invalid="ignore"):
            cosine = (east[:-1] * east[1:] + north[:-1] * north[1:]) / (metres[:-1] * metres[1:])
            speeds = metres / seconds
            steady = np.abs(np.log(speeds[1:] / speeds[:-1])) < math.log(1.3)
            knots = (metres[:-1] + metres[1:]) / (seconds[:-1] + seconds[1:]) * 3600 / 1852
        both &= (cosine > 0.97) & steady & (knots > _MIN_KNOTS) & (knots < _MAX_KNOTS)
        sog, cog = (points[name][1:-1].astype(np.float64) for name in ("sog", "cog"))
        has_speed = both & np.isfinite(sog) & (sog > 0)
        self.ratios.append(sog[has_speed] / knots[has_speed])
        self.num_samples += int(both.sum())
        has_course = both & np.isfinite(cog) & (cog != 360)
        bearing = np.degrees(np.arctan2(east[:-1] + east[1:], north[:-1] + north[1:]))
        self.courses.append((cog[has_course], bearing[has_course]))

    def describe_speeds(self, layout: ColumnLayout) -> str:
        """Return what is wrong with the unit of the speeds; empty: nothing is."""
        ratios = np.concatenate(self.ratios) if self.ratios else np.zeros(0)
        if "sog" not in layout.names or len(ratios) < _MIN_SAMPLES:
            return ""
        ratio = float(np.median(ratios))
        if 0.7 < ratio < 1.43:
            return ""
        factor = layout.factors.get("sog", 1.0) / ratio
        unit = min(_SPEED_UNITS, key=lambda name: abs(math.log(_SPEED_UNITS[name] / factor)))
        found = f'the speeds of "{layout.names["sog"]}" are {ratio:.3g} times what positions and times say'
        found += f" (median of {len(ratios):,} points)"
        if abs(math.log(_SPEED_UNITS[unit] / factor)) > 0.15:
            return f"{found}: knots are expected; units that can be named: {', '.join(_SPEED_UNITS)}"
        return f"{found}: is the unit {unit}? {_name_unit(layout, 'sog', unit)}"

    def describe_courses(self, layout: ColumnLayout) -> str:
        """Return what is wrong with the unit of the courses; empty: nothing is."""
        if "cog" not in layout.names or sum(len(cog) for cog, _ in self.courses) < _MIN_SAMPLES:
            return ""
        cog, bearing = (np.concatenate(values) for values in zip(*self.courses, strict=True))
        if _measure_agreement(cog, bearing) >= 0.5:
            return ""
        raw = cog / layout.factors.get("cog", 1.0)
        found = f'the courses of "{layout.names["cog"]}" are not those of the positions'
        found += f" ({1 - _measure_agreement(cog, bearing):.0%} of {len(cog):,} points differ by more than 25 degrees)"
        for unit, factor in _COURSE_UNITS.items():
            if _measure_agreement(raw * factor, bearing) > 0.8:
                return f"{found}: is the unit {unit}? {_name_unit(layout, 'cog', unit)}"
        return f"{found}: degrees clockwise from north are expected"


def _measure_moves(points: NDArray[np.void]) -> tuple[Floats, Floats, Floats]:
    """Return metres to the east, metres to the north and seconds of each step between points."""
    lat, lon = np.radians(points["lat"]), np.radians(points["lon"])
    east = (np.diff(lon) + np.pi) % (2 * np.pi) - np.pi
    scale = 6_371_008.8
    return east * np.cos((lat[1:] + lat[:-1]) / 2) * scale, np.diff(lat) * scale, np.diff(points["time"]).astype(float)


def _measure_agreement(cog: Floats, bearing: Floats) -> float:
    return float((np.abs((cog - bearing + 180) % 360 - 180) <= 25).mean())


def _name_unit(layout: ColumnLayout, column: str, unit: str) -> str:
    return f"name it with --tracks.columns {quote_option(f'{column}={layout.names[column]}[{unit}]')}"
