"""Convert columns of an AIS table to points: parse times, count and remove impossible values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabatic.core.errors import DataError
from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.io.ais_tables import ArrowColumns, ColumnBatch
from anabatic_vessels.io.column_names import WHOLE_FILE, ColumnLayout
from anabatic_vessels.io.time_parsing import NO_TIME, DateOrder, find_date_order, join_dates, parse_times
from anabatic_vessels.io.track import BadRowPolicy, Floats, Ints, measure_jumps
from anabatic_vessels.io.unit_checks import UnitSample

POINT_DTYPE = np.dtype(
    [
        *((name, np.int32) for name in ("vessel", "label", "file")),
        *((name, np.int64) for name in ("line", "time")),
        *((name, np.float64) for name in ("lat", "lon")),
        *((name, np.float32) for name in ("sog", "cog", "heading")),
    ]
)
"""56 bytes per point. Vessel, label and file are indices of a `TextTable`."""
PointArray = NDArray[np.void]

SOG_NONE = 102.3
COG_NONE = 360.0
HEADING_NONE = 511.0
"""Values that mean "not available", in knots and degrees (ITU-R M.1371-5, table 48); so do latitude 91 and longitude
181."""


@dataclass
class TextTable:
    """Distinct texts with their indices."""

    texts: list[str] = field(default_factory=list)
    index_by_text: dict[str, int] = field(default_factory=dict)

    def get_index(self, text: str) -> int:
        """Return the index of `text`; add it if it is new."""
        index = self.index_by_text.setdefault(text, len(self.texts))
        if index == len(self.texts):
            self.texts.append(text)
        return index


@dataclass
class ValueExtent:
    """Statistics of the values of a file, for checks of the whole file.

    Attributes:
        num_rows: rows with a position.
        num_lat_out: rows with a latitude over 90 that is not 91.
        num_swapped: of those, rows with a longitude within 90.
        first_line: line of the first of these.
        num_courses: rows with a course.
        max_course: the largest course.
        num_used: rows that are points.
        layout: the columns of the file.
        date_order: what stands first in its dates, once one of them says it.
        units: what positions say of speeds and courses.
        left_out: reasons for which rows are not used, with their number.
    """

    num_rows: int = 0
    num_lat_out: int = 0
    num_swapped: int = 0
    first_line: int = 0
    num_courses: int = 0
    max_course: float = 0.0
    num_used: int = 0
    layout: ColumnLayout = field(default_factory=ColumnLayout)
    date_order: DateOrder | None = None
    units: UnitSample = field(default_factory=UnitSample)
    left_out: Counter[str] = field(default_factory=Counter)

    def iter_warnings(self) -> Iterator[str]:
        """Yield what is odd about a file that has been read."""
        if self.left_out:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
            total = self.left_out.total()
            yield f"{total:,} of {total + self.num_used:,} rows are not used: {reasons}"
        if speeds := self.units.describe_speeds(self.layout):
            yield speeds
        courses = self.units.describe_courses(self.layout)
        if courses:
            yield courses
        elif self.num_courses >= 100 and 0 < self.max_course < 90:
            yield f"no course is over {self.max_course:g}: degrees are expected; are these radians or tens?"

    def require_latitudes(self, path: Path, max_fraction: float) -> None:
        """Check that latitudes and longitudes of a file are not swapped.

        Raises:
            DataError: more than `max_fraction` of its rows are swapped.
        """
        if self.num_rows >= 10 and self.num_swapped > max_fraction * self.num_rows:
            raise DataError(
                f"{path}: line {self.first_line}: {self.num_lat_out} of {self.num_rows} latitudes are over 90: swapped "
                f"with"
                " longitude",
                "name the columns the other way round: --tracks.columns lat=LON_COLUMN lon=LAT_COLUMN",
            )


class PointConverter:
    """Converts the batches of tables to points. Texts (vessels, labels, files) are stored once for all files."""

    def __init__(self, settings: TrackSettings, bad_rows: BadRowPolicy) -> None:
        self.vessels, self.labels, self.files = TextTable(), TextTable(), TextTable()
        self.label_locations: dict[str, str] = {}
        self.extents: dict[Path, ValueExtent] = {}
        self._settings = settings
        self._bad_rows = bad_rows

    def convert_batches(self, path: Path, batches: Iterator[ColumnBatch]) -> Iterator[PointArray]:
        """Yield the points of one file.

        Raises:
            DataError: a row cannot be read, or the columns of the file are wrong.
        """
        file_index, extent = self.files.get_index(path.name), ValueExtent()
        self.extents[path] = extent
        before = self._count_left_out()
        for columns, lines, layout in batches:
            extent.layout = layout
            points = self._convert_batch(path, columns, lines, extent)
            extent.num_used += len(points)
            points["file"] = file_index
            yield points
        extent.require_latitudes(path, 0.05)
        extent.left_out = self._count_left_out() - before

    def _count_left_out(self) -> Counter[str]:
        """Return the reasons for which rows were left out so far; not those for which a value of a row was."""
        counts = self._bad_rows.counts.items()
        return Counter(
            {
                reason: count
                for reason, count in counts
                if reason.startswith(("points ", "rows ", "lines ", "messages "))
            }
        )

    def _convert_batch(self, path: Path, columns: ArrowColumns, lines: Ints, extent: ValueExtent) -> PointArray:
        rows = np.zeros(len(lines), POINT_DTYPE)
        rows["line"] = lines
        keep = np.ones(len(lines), bool)
        for name in ("lat", "lon", "sog", "cog", "heading"):
            if name in columns:
                values, invalid = parse_numbers(columns[name], name, path, lines, self._bad_rows)
                with np.errstate(over="ignore"):  # values beyond float32 become infinite, which is out of range
                    rows[name] = values * extent.layout.factors.get(name, 1.0)
                keep &= ~invalid
            else:
                rows[name] = np.nan
        rows["time"], invalid = self._parse_times(path, columns, lines, extent)
        keep &= ~invalid
        rows["vessel"] = self._index_texts(columns, "vessel", self.vessels, path.name.partition(".")[0], len(lines))
        label_column = "label" if "label" in columns else "type"
        num_known = len(self.labels.texts)
        rows["label"] = self._index_texts(columns, label_column, self.labels, "", len(lines), label_column + ":")
        for index in range(num_known, len(self.labels.texts)):
            first_line = lines[np.flatnonzero(rows["label"] == index)[:1]]
            self.label_locations[self.labels.texts[index]] = (
                f"{path}: line {first_line[0]}" if len(first_line) else str(path)
            )
        points = self._drop_impossible(path, rows, keep, extent)
        if "vessel" not in columns and self._settings.columns.get("vessel") != WHOLE_FILE:
            self._require_one_vessel(path, points)
        return points

    def _parse_times(
        self, path: Path, columns: ArrowColumns, lines: Ints, extent: ValueExtent
    ) -> tuple[Ints, NDArray[np.bool_]]:
        import pyarrow.compute as pc

        column, layout, time_format = columns["time"], extent.layout, self._settings.time_format
        if "date" in columns:
            column = join_dates(columns["date"], column)
        if time_format is None and extent.date_order is None:
            try:
                extent.date_order = "day" if layout.day_first else find_date_order(column)
            except DataError as error:
                raise DataError(f"{path}: {error}", error.hint) from error
        offset = self._settings.utc_offset or layout.utc_offset or 0.0
        times = parse_times(column, time_format, offset, extent.date_order)
        invalid = (times == NO_TIME) & pc.is_valid(column).to_numpy(zero_copy_only=False)
        for index in np.flatnonzero(invalid):
            message = f'{path}: line {lines[index]}: time "{column[int(index)].as_py()}" cannot be read'
            self._bad_rows.report_row(message, "name its format, such as --tracks.time-format '%m/%d/%Y %H:%M:%S'")
        return times, invalid

    def _index_texts(
        self, columns: ArrowColumns, name: str, table: TextTable, default: str, num_rows: int, prefix: str = ""
    ) -> Ints:
        """Return the indices of the texts of a column; that of `default` if the file has no such column."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if name not in columns:
            return np.full(num_rows, table.get_index(prefix + default if default else ""), np.int64)
        column = columns[name]
        if pa.types.is_floating(column.type):  # ids and codes with missing values, as written by pandas
            column = column.cast(pa.int64(), safe=False)
        text = pc.utf8_trim_whitespace(pc.fill_null(column.cast(pa.string()), ""))
        text = pc.replace_substring_regex(text, r"^(\d+)\.0+$", r"\1").dictionary_encode()
        indices = [table.get_index(prefix + value if value else "") for value in text.dictionary.to_pylist()]
        result: Ints = np.array(indices or [0], np.int64)[text.indices.to_numpy(zero_copy_only=False)]
        return result

    def _drop_impossible(
        self, path: Path, rows: PointArray, keep: NDArray[np.bool_], extent: ValueExtent
    ) -> PointArray:
        """Remove points without time or position; not-available values become NaN. Each is counted."""
        counts = self._bad_rows.counts
        is_complete = np.isfinite(rows["lat"]) & np.isfinite(rows["lon"]) & (rows["time"] != NO_TIME)
        counts["points without time or position"] += int((keep & ~is_complete).sum())
        keep &= is_complete
        without_id = keep & (rows["vessel"] == self.vessels.index_by_text.get("", -1))
        counts["points without a vessel id"] += int(without_id.sum())
        keep &= ~without_id
        not_available = keep & ((np.abs(rows["lat"]) == 91) | (np.abs(rows["lon"]) == 181))
        outside = keep & ~not_available & ((np.abs(rows["lat"]) > 90) | (np.abs(rows["lon"]) > 180))
        extent.num_rows += int(keep.sum())
        extent.num_lat_out += int((outside & (np.abs(rows["lat"]) > 90)).sum())
        extent.num_swapped += int((outside & (np.abs(rows["lon"]) <= 90)).sum())
        if outside.any():
            extent.first_line = extent.first_line or int(rows["line"][np.flatnonzero(outside)[0]])
            extent.require_latitudes(path, 0.5)
        counts["points with position not available (91, 181)"] += int(not_available.sum())
        counts["points out of range"] += int(outside.sum())
        keep &= ~not_available & ~outside
        rows = rows[keep]
        extent.units.add_points(rows)
        if self._settings.clean:
            rows = self._drop_not_available(rows)
        with np.errstate(invalid="ignore"):
            extent.num_courses += int(np.isfinite(rows["cog"]).sum())
            extent.max_course = max(extent.max_course, float(np.nanmax(rows["cog"], initial=0)))
        return rows

    def _require_one_vessel(self, path: Path, rows: PointArray) -> None:
        """Check that points of a file without a vessel column can be those of one vessel.

        Raises:
            DataError: they have several classes, or too many are out of reach of each other.
        """
        classes = [self.labels.texts[index].partition(":")[2] for index in np.unique(rows["label"])]
        rows = rows[np.argsort(rows["time"], kind="stable")]
        num_jumps = int(measure_jumps(rows["time"], rows["lat"], rows["lon"], self._settings.max_knots).sum())
        if len(named := [name for name in classes if name]) > 1:
            reason = f"its points have {len(named)} classes: {', '.join(named[:5])}"
        elif num_jumps > 0.1 * len(rows):
            reason = f"{num_jumps:,} of {len(rows):,} steps are faster than {self._settings.max_knots:g} knots"
        else:
            return
        raise DataError(
            f"{path}: no column names the vessel, and the file does not look like one vessel: {reason}",
            "add a column with the id of the vessel, and name it with --tracks.columns vessel=NAME; or, if the file"
            f" holds one vessel, --tracks.columns vessel={WHOLE_FILE}",
        )

    def _drop_not_available(self, rows: PointArray) -> PointArray:
        counts = self._bad_rows.counts
        zero = (rows["lat"] == 0) & (rows["lon"] == 0)
        counts["points at 0 N 0 E"] += int(zero.sum())
        rows = rows[~zero]
        west = (rows["cog"] < -1) & (rows["cog"] >= -180)  # courses from -180 to 180; -1 is "not available"
        rows["cog"][west] += 360
        for name, missing_value, minimum, reason in (
            ("sog", SOG_NONE, 0, "speeds not available (102.3)"),
            ("cog", COG_NONE, 0, "courses not available (360)"),
            ("heading", HEADING_NONE, 0, "headings not available (511)"),
        ):
            limit = min(missing_value, 360)
            invalid = (rows[name] < minimum) | (rows[name] >= np.float32(limit))
            counts[reason] += int(invalid.sum())
            rows[name][invalid] = np.nan
        return rows


def parse_numbers(
    column: Any, name: str, path: Path, lines: NDArray[np.int64], bad_rows: BadRowPolicy
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return an Arrow column of `n` rows as numbers (NaN: missing), and a mask of the rows that are not numbers."""
    import pyarrow as pa
    import pyarrow.compute as pc

    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    invalid = np.zeros(len(column), bool)
    try:
        numbers = column.cast(pa.float64())
    except pa.ArrowInvalid:
        if not is_text:
            raise
        trimmed = pc.replace_substring_regex(pc.utf8_trim_whitespace(column), r"^([+-]?\d*),(\d+)$", r"\1.\2")
        is_number = pc.match_substring_regex(trimmed, r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")
        invalid = pc.fill_null(pc.and_(pc.invert(is_number), pc.greater(pc.utf8_length(trimmed), 0)), False)
        invalid = invalid.to_numpy(zero_copy_only=False)
        for index in np.flatnonzero(invalid):
            value = trimmed[int(index)].as_py()
            bad_rows.report_row(f'{path}: line {lines[index]}: {name} is "{value}", no number', "fix the row")
        numbers = pc.if_else(is_number, trimmed, pa.scalar(None, trimmed.type)).cast(pa.float64())
    values: Floats = pc.fill_null(numbers, float("nan")).to_numpy(zero_copy_only=False)
    return values, invalid
