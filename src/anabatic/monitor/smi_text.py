"""The unframed tables of `npu-smi`: `watch`, `-t topo`, `-m`; and its error lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

from anabatic.monitor.smi_table import decimal, number

Value = int | float | str | None


@dataclass
class Rows:
    """A listing with a heading for every column."""

    optional: ClassVar[tuple[str, ...]] = ()
    columns: list[str] = field(default_factory=list)
    rows: list[dict[str, Value]] = field(default_factory=list)


@dataclass
class Watch(Rows):
    """`npu-smi info watch`: a row per chip and second."""

    kind: ClassVar = "watch"


@dataclass
class Topology:
    """`npu-smi info -t topo`: how each pair of devices is joined (X SYS PHB PIX PXB HCCS SIO HCCS_SW UB NA)."""

    kind: ClassVar = "topo"
    optional: ClassVar[tuple[str, ...]] = ()
    devices: list[str] = field(default_factory=list)
    matrix: dict[str, dict[str, str]] = field(default_factory=dict)
    cpu_affinity: dict[str, str | None] = field(default_factory=dict)
    """The CPUs near each device; None where none is told, as on the A3 with ARM, whose table has no such column."""


@dataclass
class Mapping(Rows):
    """`npu-smi info -m`: a row per chip; rows of a management controller have no logic id."""

    kind: ClassVar = "mapping"


@dataclass
class ErrorText:
    """Anything else: the tool prints its errors as a bare line to stdout, some with the help text behind."""

    kind: ClassVar = "error"
    optional: ClassVar[tuple[str, ...]] = ()
    message: str = ""
    devices: list[Any] = field(default_factory=list)


_WATCH_COLUMN = re.compile(r"[^()]+\([^()]*\)")
_NODE = re.compile(r"(NPU|Phy-ID)\d+")
_COLUMN = re.compile(r"(NPU|Phy-ID|NIC)\d+|(CPU|NUMA)_Affinity")
_AFFINITIES = ("CPU_Affinity", "NUMA_Affinity")
_MAPPED = ("NPU ID", "Slot ID", "Chip ID", "Chip Logic ID", "Chip Phy-ID", "Chip Name")
_MAPPED_COLUMN = re.compile("|".join(re.escape(name) for name in sorted(_MAPPED, key=len, reverse=True)))


def _value(word: str) -> Value:
    if word in ("-", "NA"):
        return None
    whole = number(word)
    if whole is not None:
        return whole
    fraction = decimal(word)
    return word if fraction is None else fraction


def read_watch(lines: list[str]) -> Watch | None:
    """Return the rows below `NpuID(Idx) ...`; None without that line."""
    table: Watch | None = None
    for line in lines:
        if line.lstrip().startswith("NpuID("):
            table = table or Watch([name.strip() for name in _WATCH_COLUMN.findall(line)])
            continue
        words = line.split()
        if table is not None and len(words) == len(table.columns):
            table.rows.append({name: _value(word) for name, word in zip(table.columns, words, strict=True)})
    return table


def _columns(line: str) -> list[str]:
    return line.replace("CPU Affinity", "CPU_Affinity").replace("NUMA Affinity", "NUMA_Affinity").split()


def _affinity(words: list[str], columns: list[str]) -> str | None:
    """Return the CPUs of a row, a list of which may be written with blanks; None where there are none."""
    if "CPU_Affinity" not in columns:
        return None
    told = words if columns == ["CPU_Affinity"] else words[columns.index("CPU_Affinity") :][:1]
    cpus = "".join(told)
    return None if cpus.upper() in ("", "-", "NA", "N/A") else cpus


def read_topology(lines: list[str]) -> Topology | None:
    """Return the matrix below a line of device names; None without one."""
    table: Topology | None = None
    names: list[str] = []
    for line in lines:
        words = _columns(line)
        if not words or not _NODE.fullmatch(words[0]):
            continue
        if len(words) == 1 or _COLUMN.fullmatch(words[1]):
            names = words
            table = table or Topology([name for name in names if _NODE.fullmatch(name)])
        elif table is not None:
            joined = [name for name in names if name not in _AFFINITIES]
            near = [name for name in names if name in _AFFINITIES]
            table.matrix[words[0]] = dict(zip(joined, words[1:]))  # noqa: B905  # a cut row is shorter
            table.cpu_affinity[words[0]] = _affinity(words[1 + len(joined) :], near)
    return table if table is not None and table.matrix else None


def read_mapping(lines: list[str]) -> Mapping | None:
    """Return the rows below `NPU ID ... Chip Name`; None without that line."""
    table: Mapping | None = None
    for line in lines:
        if "NPU ID" in line and "Chip Name" in line and ":" not in line and "|" not in line:
            table = table or Mapping(_MAPPED_COLUMN.findall(line))
            continue
        words = line.split(None, len(table.columns) - 1) if table is not None else []
        if table is not None and len(words) == len(table.columns):
            table.rows.append({name: _value(word.strip()) for name, word in zip(table.columns, words, strict=True)})
    return table


def read_error(lines: list[str]) -> ErrorText:
    """Return the first line that says something."""
    return ErrorText(next((line.strip() for line in lines if line.strip()), ""))
