"""The unframed tables of `npu-smi`: `watch`, `-t topo`, `-m`; and its error lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

from anabatic.monitor.npu_smi.framed_tables import parse_float, parse_int

CellValue = int | float | str | None


@dataclass
class ColumnTable:
    """A listing with a heading for every column."""

    columns: list[str] = field(default_factory=list)
    rows: list[dict[str, CellValue]] = field(default_factory=list)


@dataclass
class WatchTable(ColumnTable):
    """`npu-smi info watch`: a row per chip and second."""

    kind: ClassVar = "watch"


@dataclass
class Topology:
    """`npu-smi info -t topo`: how each pair of devices is joined (X SYS PHB PIX PXB HCCS SIO HCCS_SW UB NA)."""

    kind: ClassVar = "topo"
    devices: list[str] = field(default_factory=list)
    matrix: dict[str, dict[str, str]] = field(default_factory=dict)
    cpu_affinity: dict[str, str | None] = field(default_factory=dict)
    """The CPUs near each device; None where the table has none, as on the A3 with ARM, whose table has no such
    column."""


@dataclass
class ChipMapping(ColumnTable):
    """`npu-smi info -m`: a row per chip; rows of a management controller have no logic id."""

    kind: ClassVar = "mapping"


@dataclass
class ErrorOutput:
    """Anything else: the tool prints its errors as a bare line to stdout, some with the help text behind."""

    kind: ClassVar = "error"
    message: str = ""
    devices: list[Any] = field(default_factory=list)


_WATCH_COLUMN = re.compile(r"[^()]+\([^()]*\)")
_DEVICE_NAME = re.compile(r"(NPU|Phy-ID)\d+")
_TOPOLOGY_COLUMN = re.compile(r"(NPU|Phy-ID|NIC)\d+|(CPU|NUMA)_Affinity")
_AFFINITY_COLUMNS = ("CPU_Affinity", "NUMA_Affinity")
_MAPPING_COLUMNS = ("NPU ID", "Slot ID", "Chip ID", "Chip Logic ID", "Chip Phy-ID", "Chip Name")
_MAPPING_COLUMN = re.compile("|".join(re.escape(name) for name in sorted(_MAPPING_COLUMNS, key=len, reverse=True)))


def _parse_cell(word: str) -> CellValue:
    if word in ("-", "NA"):
        return None
    number = parse_int(word)
    if number is not None:
        return number
    fraction = parse_float(word)
    return word if fraction is None else fraction


def read_watch(lines: list[str]) -> WatchTable | None:
    """Return the rows below `NpuID(Idx) ...`; None without that line."""
    table: WatchTable | None = None
    for line in lines:
        if line.lstrip().startswith("NpuID("):
            table = table or WatchTable([name.strip() for name in _WATCH_COLUMN.findall(line)])
            continue
        words = line.split()
        if table is not None and len(words) == len(table.columns):
            table.rows.append({name: _parse_cell(word) for name, word in zip(table.columns, words, strict=True)})
    return table


def _split_columns(line: str) -> list[str]:
    return line.replace("CPU Affinity", "CPU_Affinity").replace("NUMA Affinity", "NUMA_Affinity").split()


def _parse_affinity(words: list[str], columns: list[str]) -> str | None:
    """Return the CPUs of a row, a list of which may be written with blanks; None where there are none."""
    if "CPU_Affinity" not in columns:
        return None
    cells = words if columns == ["CPU_Affinity"] else words[columns.index("CPU_Affinity") :][:1]
    cpus = "".join(cells)
    return None if cpus.upper() in ("", "-", "NA", "N/A") else cpus


def read_topology(lines: list[str]) -> Topology | None:
    """Return the matrix below a line of device names; None without one."""
    table: Topology | None = None
    names: list[str] = []
    for line in lines:
        words = _split_columns(line)
        if not words or not _DEVICE_NAME.fullmatch(words[0]):
            continue
        if len(words) == 1 or _TOPOLOGY_COLUMN.fullmatch(words[1]):
            names = words
            table = table or Topology([name for name in names if _DEVICE_NAME.fullmatch(name)])
        elif table is not None:
            joined = [name for name in names if name not in _AFFINITY_COLUMNS]
            near = [name for name in names if name in _AFFINITY_COLUMNS]
            table.matrix[words[0]] = dict(zip(joined, words[1:]))  # noqa: B905  # a cut row is shorter
            table.cpu_affinity[words[0]] = _parse_affinity(words[1 + len(joined) :], near)
    return table if table is not None and table.matrix else None


def read_mapping(lines: list[str]) -> ChipMapping | None:
    """Return the rows below `NPU ID ... Chip Name`; None without that line."""
    table: ChipMapping | None = None
    for line in lines:
        if "NPU ID" in line and "Chip Name" in line and ":" not in line and "|" not in line:
            table = table or ChipMapping(_MAPPING_COLUMN.findall(line))
            continue
        words = line.split(None, len(table.columns) - 1) if table is not None else []
        if table is not None and len(words) == len(table.columns):
            table.rows.append(
                {name: _parse_cell(word.strip()) for name, word in zip(table.columns, words, strict=True)}
            )
    return table


def read_error(lines: list[str]) -> ErrorOutput:
    """Return the first line that says something."""
    return ErrorOutput(next((line.strip() for line in lines if line.strip()), ""))
