"""Find the columns of an AIS table by name: spellings are normalised, units in names are read."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from anabatic.core.errors import ConfigError, DataError
from anabatic.core.formatting import did_you_mean

COLUMN_ALIASES: dict[str, tuple[str, ...]] = {
    "vessel": (
        *("mmsi", "sourcemmsi", "vesselid", "shipid", "ssvid", "craftid", "userid", "vessel"),
        *("海上移动业务标识", "水上移动业务标识", "船舶识别号", "船舶id", "船舶编号", "渔船id"),
    ),
    "time": (
        *("basedatetime", "datetimeutc", "timeutc", "dtposutc", "postime", "datetime", "timestamp", "time", "t"),
        *("unixtime", "epoch", "ts", "epochtime", "receivedat", "createdat", "date"),
        *("时间", "日期时间", "时间戳", "时刻", "定位时间", "日期"),
    ),
    "lat": ("lat", "latitude", "y", "纬度"),
    "lon": ("lon", "long", "longitude", "lng", "x", "经度"),
    "sog": ("sog", "speedoverground", "speed", "航速", "速度", "船速", "地速"),
    "cog": ("cog", "courseoverground", "course", "航向", "航迹向", "方向"),
    "heading": ("heading", "trueheading", "hdg", "船艏向", "船首向", "艏向", "首向", "船头向", "真航向", "船艏方向"),
    "label": ("class", "label", "classname", "类别", "标签"),
    "type": (
        *("vesseltype", "shiptype", "shipandcargotype", "vesseltypename", "shiptypename", "typename"),
        *("vesseltypecode", "shiptypecode", "aistype", "aisshiptype", "typeofship", "typeofshipandcargo"),
        *("shipcargotype", "vesseltypemain", "type", "船舶类型", "船只类型", "船型", "船舶种类", "类型"),
    ),
    "date": ("date", "日期"),
}
"""Column -> names in files, letters and digits only: NOAA MarineCadastre (2015 to 2024, and since 2025), the Danish
Maritime Authority, Finnish Digitraffic, HELCOM, Kystverket, the Naval Academy of France, MarineTraffic, Spire, AISHub,
exactEarth, aisstream.io, Chinese tables, and the source project's per-vessel files. Earlier names win. `date` is read
only beside a time of day."""
REQUIRED_COLUMNS = ("time", "lat", "lon")
USER_COLUMNS = tuple(name for name in COLUMN_ALIASES if name != "date")
"""Columns that `tracks.columns` can name."""
WHOLE_FILE = "FILE"
"""Value of `tracks.columns` for the vessel's column if each file has one vessel."""
_MEASURES = ("time", "lat", "lon", "sog", "cog", "heading")
"""Columns that are also found behind a word such as `position_` or before one such as `_utc`."""
_PREFIXES = frozenset(
    ("position", "pos", "geo", "gps", "ais", "ship", "vessel", "nav", "decimal", "report", "reported", "message")
    + ("msg", "current", "src", "source", "last")
)
_SUFFIXES = frozenset(
    ("utc", "gmt", "wgs84", "dd", "decimal", "value", "val", "ms", "s", "sec", "seconds", "millis", "iso")
)
_CHINESE_PREFIX = re.compile(
    "船舶|船只|目标|当前|实时|最新|瞬时|对地|gps|ais|utc|北斗|北京|定位|接收|上报|更新|采集|记录|发送"
)

KNOTS: dict[str, float] = {
    **dict.fromkeys(("kn", "kt", "kts", "knot", "knots", "节"), 1.0),
    **dict.fromkeys(("ms", "mps", "metrespersecond", "meterspersecond", "meterpersecond", "米秒"), 3600 / 1852),
    **dict.fromkeys(
        ("kmh", "kph", "kmph", "kmhr", "kmperhour", "公里小时", "千米小时", "公里时", "千米时"), 1000 / 1852
    ),
    **dict.fromkeys(("mph", "mih"), 1609.344 / 1852),
    **dict.fromkeys(("cms", "厘米秒"), 36 / 1852),
}
"""Unit of speed, letters only -> knots."""
DEGREES: dict[str, float] = {
    **dict.fromkeys(("deg", "degs", "degree", "degrees", "degt", "t", "true", "度", ""), 1.0),
    **dict.fromkeys(("rad", "rads", "radian", "radians", "弧度"), 180 / math.pi),
}
"""Unit of an angle, letters only -> degrees; a sign such as `°` has none."""
_UNITS = {"sog": KNOTS, "cog": DEGREES, "heading": DEGREES}
KNOWN_UNITS = {"sog": "kn, 0.1 kn, m/s, km/h, mph", "cog": "deg, 0.1 deg, rad", "heading": "deg, 0.1 deg, rad"}
_TENTHS = re.compile(r"^(?:0\.1|1/10|tenths?\s*(?:of)?\s*(?:an?\b)?)[\s*x]*|\s*[*x]\s*10$")
_BRACKET = re.compile(r"^(.*?)\s*[\[(]([^\[\]()]*)[\])]\s*$", re.DOTALL)
_ZONE = re.compile(r"(?:utc|gmt)\s*([+-]\d{1,2})(?::?(\d\d))?$")


@dataclass(frozen=True)
class ColumnLayout:
    """Columns of a file that are read.

    Attributes:
        names: column -> name in the file.
        factors: column -> factor that turns its numbers into knots or degrees, if the unit is another one.
        unused: names in the file that are not read, in its order.
        num_columns: number of columns of the file.
        utc_offset: hours that the name of the time column states ("UTC+8"); None: it states none.
        day_first: the layout is known to write the day before the month.
        kind: what the columns are called in messages.
    """

    names: dict[str, str] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    num_columns: int = 0
    utc_offset: float | None = None
    day_first: bool = False
    kind: str = "columns"

    def describe_unused(self) -> str:
        """Return the columns that are not read, and the values that no column gives; empty: all are read."""
        if not self.unused:
            return ""
        text = f"{len(self.unused)} of {self.num_columns} {self.kind} are not used: {list_names(self.unused)}"
        missing = [name for name in ("sog", "cog", "heading") if name not in self.names]
        missing += [] if {"label", "type"} & self.names.keys() else ["type"]
        if missing:
            text += f"; nothing gives {', '.join(missing)} (name one with --tracks.columns {missing[0]}=NAME)"
        return text


def list_names(names: Sequence[str], limit: int = 24) -> str:
    """Return names with commas, the first `limit` of them."""
    shown = ", ".join(name or '""' for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit:,} more"


def find_columns(header: Sequence[str], location: str, column_map: dict[str, str]) -> ColumnLayout:
    """Return the columns of a table that has one point a row.

    Args:
        header: column names of the file.
        location: the file, for messages.
        column_map: column -> name in the file, set by the user; a unit may follow it in brackets.

    Raises:
        DataError: a required column is missing, or it is unknown which column names the vessel.
        ConfigError: `column_map` has an unknown column or unit.
    """
    layout = match_columns(header, location, column_map)
    missing = [name for name in REQUIRED_COLUMNS if name not in layout.names]
    if missing:
        raise DataError(
            f"{location}: no AIS table: no column for {', '.join(missing)}; the file has {list_names(header)}",
            _suggest_columns(missing, layout),
        )
    if "vessel" not in layout.names and not _is_whole_file(column_map):
        require_vessel_column(layout, header, location)
    return layout


def _suggest_columns(missing: Sequence[str], layout: ColumnLayout) -> str:
    others = [name for name in ("vessel", "sog", "cog", "heading", "type") if name not in layout.names]
    hint = f"name the columns with --tracks.columns {' '.join(f'{name}=NAME' for name in missing)}"
    if others:
        hint += f", and with {' '.join(f'{name}=NAME' for name in others)} where the file has them"
    return hint + (f"; not used so far: {list_names(layout.unused)}" if layout.unused else "")


def _is_whole_file(column_map: dict[str, str]) -> bool:
    return column_map.get("vessel") == WHOLE_FILE


def require_vessel_column(layout: ColumnLayout, header: Iterable[str], location: str) -> None:
    """Check that no column of a file without a known vessel column could name the vessel: every one has another use.

    Raises:
        DataError: a column is not known.
    """
    unknown = [name for name in layout.unused if not _NO_ID.fullmatch(normalize_name(name))]
    if unknown:
        guess = _guess_vessel_column(unknown)
        raise DataError(
            f"{location}: no column that names the vessel; the file has {list_names(list(header))}",
            f"name it with --tracks.columns {quote_option(f'vessel={guess}')}"
            + f"{'' if guess in unknown else ', one of these columns'}; or, where each file holds one vessel,"
            f" --tracks.columns vessel={WHOLE_FILE}",
        )


_NO_ID = re.compile(
    r"|index|unnamed\d+|h3|rot|rateofturn|(nav|navigational|navigation)?status|draught|draft|length|width"
)
"""Names of columns that never say which vessel a point belongs to."""
_VESSEL_WORDS = (
    "mmsi",
    "imo",
    "callsign",
    "呼号",
    "shipname",
    "vesselname",
    "船名",
    "vessel",
    "ship",
    "船",
    "name",
    "id",
)


def _guess_vessel_column(unknown: Sequence[str]) -> str:
    matches = (name for word in _VESSEL_WORDS for name in unknown if word in normalize_name(name))
    return next(matches, "NAME")


def quote_option(value: str) -> str:
    """Return `NAME=VALUE` as it is typed in a shell."""
    return value if re.fullmatch(r"[\w=./-]+", value) else "'" + value.replace("'", "'\\''") + "'"


def match_columns(header: Sequence[str], location: str, column_map: dict[str, str]) -> ColumnLayout:
    """Return the known columns of a header; none of them is required.

    Raises:
        DataError: the file lacks a column that the user named, the unit of one is unknown, or it is unclear which one
            names the vessel.
        ConfigError: `column_map` has an unknown column or unit.
    """
    names: dict[str, str] = {}
    units: dict[str, str | None] = {}
    for column, spec in column_map.items():
        if column not in USER_COLUMNS:
            message = f'tracks.columns names "{column}".{did_you_mean(column, USER_COLUMNS)}'
            raise ConfigError(message, f"ours: {', '.join(USER_COLUMNS)}")
        if column != "vessel" or spec in header or not _is_whole_file(column_map):
            names[column], units[column] = _find_named_column(column, spec, header, location)
    free = [name for name in header if name not in names.values()]
    for column, aliases in COLUMN_ALIASES.items():
        if column in column_map:
            continue
        found = _find_alias(column, aliases, free)
        if found is not None and (column != "date" or found[0] != names.get("time")):
            names[column], units[column] = found
            free.remove(found[0]) if column != "time" else None
    if "vessel" not in column_map and "vessel" not in names:
        names |= _find_mmsi_column(free, location)
    factors = {
        column: _find_factor(column, names[column], unit, location)
        for column, unit in units.items()
        if column in _UNITS
    }
    time_name = unicodedata.normalize("NFKC", names.get("time", "")).lower()
    zone = _ZONE.search(units.get("time") or "") or _ZONE.search(time_name)
    offset = float(zone[1]) + math.copysign(int(zone[2] or 0) / 60, float(zone[1])) if zone else None
    return ColumnLayout(
        names=names,
        factors={column: factor for column, factor in factors.items() if factor != 1.0},
        unused=tuple(name for name in header if name not in names.values()),
        num_columns=len(header),
        utc_offset=8.0 if "北京" in time_name else offset,
        day_first=names.get("time", "").lstrip().startswith("#"),
    )


def _find_named_column(column: str, spec: str, header: Sequence[str], location: str) -> tuple[str, str | None]:
    """Return the column that the user named, and its unit."""
    if spec in header:
        return spec, _split_unit(spec)[1]
    name, unit = _split_unit(spec)
    named = next((text for text in header if text.strip() == name.strip()), None)
    if named is None or unit is None:
        raise DataError(f'{location}: no column "{spec}"', f"the file has {list_names(header)}")
    if column in _UNITS and parse_unit(column, unit) is None:
        raise ConfigError(
            f'tracks.columns.{column}: the unit "{unit}" is not known', f"units of {column}: {KNOWN_UNITS[column]}"
        )
    return named, unit


def _find_factor(column: str, name: str, unit: str | None, location: str) -> float:
    if unit is None:
        return 1.0
    factor = parse_unit(column, unit)
    if factor is None:
        example = quote_option(f"{column}={name}[{KNOWN_UNITS[column].partition(',')[0]}]")
        raise DataError(
            f'{location}: the unit "{unit}" of the column "{name}" is not known',
            f"name the unit: --tracks.columns {example}; units of {column}: {KNOWN_UNITS[column]}",
        )
    return factor


def parse_unit(column: str, unit: str) -> float | None:
    """Return the factor from a unit to knots or degrees; None: the unit is unknown."""
    text = unicodedata.normalize("NFKC", unit).strip().lower().replace("×", "x")
    scale = 0.1 if _TENTHS.search(text) else 1.0
    rest = re.sub(r"[\W_\d]+", "", _TENTHS.sub("", text))
    if scale != 1.0 and not rest:
        return scale
    factor = _UNITS[column].get(rest)
    return None if factor is None else scale * factor


def _split_unit(name: str) -> tuple[str, str | None]:
    """Return a name without the unit in brackets at its end, and the unit."""
    match = _BRACKET.match(name) or _BRACKET.match(
        unicodedata.normalize("NFKC", name).replace("【", "[").replace("】", "]")
    )
    return (match[1], match[2].strip().lower()) if match and match[1].strip() else (name, None)


def normalize_name(name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFKC", name).lower())


def _find_alias(column: str, aliases: tuple[str, ...], header: Sequence[str]) -> tuple[str, str | None] | None:
    """Return the name and unit of the column that has the earliest alias, in its plainest spelling."""
    best: dict[str, tuple[int, str, str | None]] = {}
    for name in header:
        for rank, (spelling, unit) in enumerate(_iter_spellings(column, name)):
            if spelling not in best or rank < best[spelling][0]:
                best[spelling] = (rank, name, unit)
    found = next((best[alias] for alias in aliases if alias in best), None)
    return None if found is None else found[1:]


def _iter_spellings(column: str, name: str) -> Iterator[tuple[str, str | None]]:
    """Yield what a name may mean, with its unit: the plain name first, then without the words around it."""
    base, unit = _split_unit(name)
    yield normalize_name(base), unit
    if column not in _MEASURES:
        return
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", unicodedata.normalize("NFKC", base))
    words = [word for word in re.split(r"[\W_]+", text.lower()) if word]
    for last in (len(words), len(words) - 1, len(words) - 2):
        tail = "".join(words[last:])
        is_unit = column in _UNITS and bool(tail) and parse_unit(column, tail) is not None
        is_angle = column in ("lat", "lon") and DEGREES.get(tail) == 1.0
        if last > 0 and (not tail or is_unit or is_angle or (tail in _SUFFIXES and column not in _UNITS)):
            first = 0
            while first < last - 1 and words[first] in _PREFIXES:
                first += 1
            for start in range(first + 1):
                spelling = "".join(words[start:last])
                yield spelling, tail if is_unit else unit
                while (match := _CHINESE_PREFIX.match(spelling)) and spelling != match[0]:
                    spelling = spelling[match.end() :]
                    yield spelling, tail if is_unit else unit


def _find_mmsi_column(header: Sequence[str], location: str) -> dict[str, str]:
    """Return the only column whose name begins or ends with `mmsi`, such as `MMSI编号`."""
    matches = [name for name in header if re.match("mmsi|.*mmsi$", normalize_name(name))]
    if len(matches) > 1:
        raise DataError(
            f"{location}: {len(matches)} columns could name the vessel: {list_names(matches)}",
            f"name it with --tracks.columns {quote_option(f'vessel={matches[0]}')}",
        )
    return {"vessel": matches[0]} if matches else {}
