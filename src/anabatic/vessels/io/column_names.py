"""Column names of AIS tables: find the known columns in a header."""

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
"""Column -> names in files, in lower case, spaces and dashes as `_`: NOAA MarineCadastre (2015 to 2024, and since
2025), the Danish Maritime Authority, Finnish Digitraffic, and the source project's per-vessel files."""
REQUIRED_COLUMNS = ("time", "lat", "lon")


def find_columns(header: Sequence[str], location: str, column_map: dict[str, str]) -> dict[str, str]:
    """Return the known columns of a header: column -> name in the file.

    Args:
        header: column names of the file.
        location: the file, for messages.
        column_map: column -> name in the file, set by the user.

    Raises:
        DataError: a required column is missing.
    """
    unknown = [column for column in column_map if column not in COLUMN_ALIASES]
    if unknown:
        message = f'tracks.columns names "{unknown[0]}".{did_you_mean(unknown[0], COLUMN_ALIASES)}'
        raise ConfigError(message, f"ours: {', '.join(COLUMN_ALIASES)}")
    by_normalized_name = {_normalize_name(name): name for name in reversed(header)}
    columns: dict[str, str] = {}
    for column, aliases in COLUMN_ALIASES.items():
        if column in column_map:
            if column_map[column] not in header:
                raise DataError(f'{location}: no column "{column_map[column]}"', f"the file has {', '.join(header)}")
            columns[column] = column_map[column]
            continue
        match = next((by_normalized_name[name] for name in aliases if name in by_normalized_name), None)
        if match is not None:
            columns[column] = match
    missing = [name for name in REQUIRED_COLUMNS if name not in columns]
    if missing:
        raise DataError(
            f"{location}: no AIS table: no column for {', '.join(missing)}; the file has {', '.join(header[:12])}",
            "name the columns with --tracks.columns time=NAME lat=NAME lon=NAME",
        )
    return columns


def _normalize_name(name: str) -> str:
    return name.strip().strip("#").strip().lower().replace(" ", "_").replace("-", "_")
