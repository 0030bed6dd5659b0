"""The framed tables of `npu-smi`: `info` in its five layouts, and `info -t info-vnpu`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from anabatic.core.formatting import parse_whole
from anabatic.monitor.snapshot import DeviceProcess, DeviceReading

TableLayout = Literal["ddr", "hbm", "950"]


@dataclass
class InfoTable:
    """`npu-smi info`."""

    kind: ClassVar = "info"
    tool_version: str | None = None
    driver_version: str | None = None
    layout: TableLayout | None = None
    devices: list[DeviceReading] = field(default_factory=list)
    """One for each row pair: a chip, or a die of a two-die card."""
    processes: list[DeviceProcess] = field(default_factory=list)
    """At most eight of one chip are printed (MAX_CHIP_PROCESS_NUM)."""
    no_process_npus: list[int] = field(default_factory=list)
    process_table: bool = False
    process_mem_unit: str | None = None
    warnings: list[str] = field(default_factory=list)
    unparsed_lines: list[str] = field(default_factory=list)
    container_column: bool = False
    ambiguous_ids: dict[int, int] = field(default_factory=dict)
    """Place in `devices` -> number behind the chip id in a table without a header: a logic id or a physical one."""
    error: str | None = None


@dataclass
class VirtualTable:
    """`npu-smi info -t info-vnpu`: the virtual NPUs of one chip."""

    kind: ClassVar = "vnpu"
    total_vnpu: int | None = None
    free_total: dict[str, str] | None = None
    vnpus: list[dict[str, int | str | None]] = field(default_factory=list)


_VERSION_CELL = re.compile(r"npu-smi\s+(\S+).*?Version:\s*(\S+)")
_IDLE_CELL = re.compile(r"No running processes found in NPU\s+(\d{1,18})")
_MEMORY_UNIT = re.compile(r"Process memory\s*\((\w+)\)")
_SLASH = re.compile(r"\s*/\s*")
_BUS_ID = re.compile(r"[0-9A-Fa-fx]{4,8}:[0-9A-Fa-fx]{2}:[0-9A-Fa-fx]{2}\.[0-9A-Fa-fx]")
_MEBI = 1 << 20


def parse_int(word: str | None) -> int | None:
    """Return a whole number, None for `NA`, `-` and anything else."""
    return parse_whole(word)


def parse_float(word: str | None) -> float | None:
    """Return a number with or without a fraction, None for anything else."""
    return float(word) if word is not None and re.fullmatch(r"-?[0-9]{1,15}(\.[0-9]{1,15})?", word) else None


def split_cells(line: str) -> list[str]:
    """Return the cells of a framed row; the last bar may be missing."""
    parts = [part.strip() for part in line.strip().split("|")[1:]]
    return parts[:-1] if len(parts) > 1 and not parts[-1] else parts


def _parse_used_total(word: str | None) -> tuple[int | None, int | None]:
    used, _, total = (word or "").partition("/")
    return parse_int(used), parse_int(total)


def _split_values(cell: str) -> tuple[list[str], list[str]]:
    """Return the single values and the `used/total` pairs of a cell, each in order."""
    words = _SLASH.sub("/", cell).split()
    return [word for word in words if "/" not in word], [word for word in words if "/" in word]


def _get_word(words: Sequence[str], index: int) -> str | None:
    return words[index] if index < len(words) else None


class _InfoTableReader:
    """The state between two lines: which table, and the device whose second row is to come."""

    def __init__(self) -> None:
        self.table = InfoTable()
        self.second_id_name: str | None = None
        self.pending_device: DeviceReading | None = None

    def read_line(self, line: str) -> None:
        text = line.strip()
        if not text or text == "..." or text.startswith("+"):
            self.pending_device = self.pending_device if text == "..." else None
            return
        if text.upper().startswith("[WARNING]"):
            self.table.warnings.append(text)
            return
        row = split_cells(line) if text.startswith("|") else []
        if not row or not (
            self._read_heading(row, text)
            or self._read_process(row)
            or self._read_first_row(row)
            or self._read_second_row(row)
        ):
            self.table.unparsed_lines.append(line)

    def _read_heading(self, row: list[str], text: str) -> bool:
        table = self.table
        version, idle = _VERSION_CELL.search(row[0]), _IDLE_CELL.search(row[0])
        if version:
            table.tool_version, table.driver_version = version[1], version[2]
        elif idle:
            table.no_process_npus.append(int(idle[1]))
        elif "Bus-Id" in row:
            table.layout = "950" if "NPU Util" in text else "hbm" if "HBM-Usage" in text else "ddr"
            self.second_id_name = row[0].partition(" ")[2].strip() or None
        elif "Process id" in row:
            unit = _MEMORY_UNIT.search(text)
            table.process_table, table.process_mem_unit = True, unit[1] if unit else None
            table.container_column = any(cell.startswith("Process id in") for cell in row)
        else:
            return row[0].startswith("NPU") and "Health" in row
        return True

    def _read_process(self, row: list[str]) -> bool:
        ids = row[0].split()
        npu, pid = parse_int(_get_word(ids, 0)), parse_int(_get_word(row, 1))
        if npu is None or pid is None or self.pending_device is not None or len(row) < 4:
            return False
        memory = parse_int(row[3])
        if memory is None and not self.table.process_table:
            return False  # a 950 whose name is a number
        # A real process holds more than 1 MiB: below that, a table headed `(B)` counts MB as all others do.
        if memory is not None and self.table.process_mem_unit == "B" and memory >= _MEBI:
            memory //= _MEBI
        chip = parse_int(_get_word(ids, 1))
        self.table.processes.append(DeviceProcess(npu, chip, pid, row[2] or None, memory, parse_int(_get_word(row, 4))))
        return True

    def _read_first_row(self, row: list[str]) -> bool:
        wide = len(row) >= 4  # 950: the name has its own cell
        identity = [row[0], row[1]] if wide else [*row[0].split(None, 1), ""][:2]
        npu = parse_int(identity[0]) if identity else None
        rest = row[2:] if wide else row[1:]
        if self.pending_device is not None or npu is None or not identity[1] or not rest or _BUS_ID.fullmatch(rest[0]):
            return False
        singles, pairs = _split_values(_get_word(rest, 1) or "")
        device = DeviceReading(npu, name=identity[1], health=rest[0] or None)
        device.power_w, device.temp_c = parse_float(_get_word(singles, 0)), parse_int(_get_word(singles, 1))
        device.hugepages_used, device.hugepages_total = _parse_used_total(_get_word(pairs, 0))
        if self.table.layout is not None:
            device.util_kind = "npu" if self.table.layout == "950" else "aicore"
        self.table.devices.append(device)
        self.pending_device = device
        return True

    def _read_second_row(self, row: list[str]) -> bool:
        device, wide = self.pending_device, len(row) >= 4
        rest = row[2:] if wide else row[1:]
        if device is None or not rest:
            return False
        self.pending_device = None
        ids = row[0].split()
        device.chip_id, second = parse_int(_get_word(ids, 0)), parse_int(_get_word(ids, 1))
        if self.second_id_name == "Phy-ID":
            device.phy_id = second
        elif self.second_id_name == "Device":
            device.logic_id = second
        elif second is not None:
            self.table.ambiguous_ids[len(self.table.devices) - 1] = second
        device.bus_id = None if rest[0] in ("", "NA", "-") else rest[0]
        singles, pairs = _split_values(_get_word(rest, 1) or "")
        device.util_pct = parse_int(_get_word(singles, 0))
        device.mem_used_mb, device.mem_total_mb = _parse_used_total(_get_word(pairs, 0))
        if self.table.layout != "ddr":
            device.hbm_used_mb, device.hbm_total_mb = _parse_used_total(_get_word(pairs, 1))
        return True


def read_info(lines: list[str]) -> InfoTable | None:
    """Return the table of `npu-smi info`, whole, cut or a fragment; None without a framed row."""
    if not any(line.lstrip().startswith(("|", "+-", "+=")) for line in lines):
        return None
    reader = _InfoTableReader()
    for line in lines:
        reader.read_line(line)
    return reader.table


def read_virtual(lines: list[str]) -> VirtualTable | None:
    """Return the table of `info-vnpu`; None for other text."""
    if not any("Total number of vnpu" in line or "NPU resource static info" in line for line in lines):
        return None
    table, names = VirtualTable(), list[str]()
    for line in lines:
        row = split_cells(line) if line.lstrip().startswith("|") else []
        words = row[0].split() if row else []
        total = re.search(r"Total number of vnpu:\s*(\d{1,18})", line)
        if total:
            table.total_vnpu = int(total[1])
        elif len(row) >= 5 and parse_int(row[0]) is not None:
            fields = {"container_id": row[2] or None, "status": parse_int(row[3]), "template": row[4] or None}
            table.vnpus.append({"vnpu_id": parse_int(row[0]), "vgroup_id": parse_int(row[1]), **fields})
        elif words[:1] == ["AICORE"]:
            names = words
            header = line
        elif names and len(row) == 1 and words and all(word.isalpha() for word in words):
            names = _append_units(names, header, line)
        elif names and len(words) == len(names) and "/" in row[0]:
            table.free_total = dict(zip(names, words, strict=True))
    return table


def _append_units(names: list[str], header: str, units: str) -> list[str]:
    """Put each unit behind the name that it stands below."""
    starts = [match.start() for match in re.finditer(r"[^\s|]+", header)]
    with_units = list(names)
    for match in re.finditer(r"[^\s|]+", units):
        below = sum(start <= match.start() for start in starts[: len(names)])
        if below:
            with_units[below - 1] += f" {match[0]}"
    return with_units
