"""Column names of AIS tables: whose layout a heading is, and where our columns are in it."""

from __future__ import annotations

from collections.abc import Sequence

from anabatic.core.errors import ConfigError, DataError
from anabatic.core.formatting import did_you_mean

COLUMN_ALIASES: dict[str, tuple[str, ...]] = {
    "vessel": ("mmsi", "vessel_id", "ship_id", "vessel"),
    "time": (
        "timestamp",
        "base_date_time",
        "basedatetime",
        "date",
        "datetime",
        "date_time_utc",
        "time",
        "t",
        "postime",
    ),
    "lat": ("lat", "latitude", "y"),
    "lon": ("lon", "long", "longitude", "lng", "x"),
    "sog": ("sog", "speed", "speed_over_ground"),
    "cog": ("cog", "course", "course_over_ground"),
    "heading": ("heading", "true_heading", "hdg"),
    "label": ("class", "label", "class_name"),
    "type": ("vessel_type", "vesseltype", "ship_type", "shiptype", "ship_and_cargo_type"),
}
"""Our column -> names in files, in lower case, spaces and dashes as `_`: NOAA MarineCadastre (2015 to 2024, and since
2025), the Danish Maritime Authority, Finnish Digitraffic, and the source project's per-vessel files."""
REQUIRED_COLUMNS = ("time", "lat", "lon")


def find_columns(heading: Sequence[str], place: str, renamed: dict[str, str]) -> dict[str, str]:
    """Find our columns in a heading: our name -> the file's.

    Args:
        heading: the file's column names.
        place: the file, for messages.
        renamed: our name -> the file's name, as the user gave it.

    Raises:
        DataError: a column that must be there is not.
    """
    unknown = [ours for ours in renamed if ours not in COLUMN_ALIASES]
    if unknown:
        told = f'tracks.columns names "{unknown[0]}".{did_you_mean(unknown[0], COLUMN_ALIASES)}'
        raise ConfigError(told, f"ours: {', '.join(COLUMN_ALIASES)}")
    folded = {_normalize_name(name): name for name in reversed(heading)}
    found: dict[str, str] = {}
    for ours, known in COLUMN_ALIASES.items():
        if ours in renamed:
            if renamed[ours] not in heading:
                raise DataError(f'{place}: no column "{renamed[ours]}"', f"the file has {', '.join(heading)}")
            found[ours] = renamed[ours]
            continue
        hit = next((folded[name] for name in known if name in folded), None)
        if hit is not None:
            found[ours] = hit
    missing = [name for name in REQUIRED_COLUMNS if name not in found]
    if missing:
        raise DataError(
            f"{place}: no AIS table: no column for {', '.join(missing)}; the file has {', '.join(heading[:12])}",
            "name the columns with --tracks.columns time=NAME lat=NAME lon=NAME",
        )
    return found


def _normalize_name(name: str) -> str:
    return name.strip().strip("#").strip().lower().replace(" ", "_").replace("-", "_")
