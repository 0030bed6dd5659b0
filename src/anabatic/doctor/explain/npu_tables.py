"""Tables of `npu-smi info` pasted into a log: devices that are not healthy, hot, or full without a process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from anabatic.doctor.checks.hardware import HOT_CELSIUS
from anabatic.monitor.npu_smi import framed_tables
from anabatic.monitor.npu_smi.framed_tables import InfoTable
from anabatic.monitor.snapshot import DeviceReading

HEALTH_CODE, WARNING_CODE, HOT_CODE, MEMORY_CODE = (
    "npu-table-health",
    "npu-table-warning",
    "npu-table-hot",
    "npu-table-memory",
)
_HEADINGS = (b"| Bus-Id", b"| Health")
_FULL_SHARE = 0.8
"""Share of a device's memory from which it counts as full: an idle one holds 5 %."""
MAX_TABLE_LINES = 2000
"""Framed lines of a block that are read."""
_HEALTHY = ("OK", "NA", "-", "", None)


@dataclass(frozen=True)
class TableFault:
    """Devices of a table with the same trouble."""

    code: str
    index: int
    """Line of the first of them."""
    count: int
    text: str
    """Values of the table for each."""


def find_table_faults(block: bytes, lines: Sequence[bytes] | None = None) -> list[TableFault]:
    """Return the troubles that tables in `block` show; nothing, quickly, where there is none."""
    if not any(heading in block for heading in _HEADINGS):
        return []
    lines = block.split(b"\n") if lines is None else lines
    framed = [(index, line) for index, line in enumerate(lines) if line.lstrip()[:1] in (b"|", b"+")][:MAX_TABLE_LINES]
    texts = [line.decode("utf-8", "replace") for _, line in framed]
    table = framed_tables.read_info(texts)
    if table is None:
        return []
    places = [framed[row][0] for row in _find_rows(texts, table.devices)]
    found: dict[str, list[tuple[int, str]]] = {}
    for device, place in zip(table.devices, places, strict=True):
        for code in _list_troubles(device, table):
            found.setdefault(code, []).append((place, _describe(device, table)))
    return [
        TableFault(code, rows[0][0], len(rows), "; ".join(dict.fromkeys(text for _, text in rows)))
        for code, rows in found.items()
    ]


def _find_rows(texts: Sequence[str], devices: Sequence[DeviceReading]) -> list[int]:
    """Return the row in which each device begins; they stand in the order of the table."""
    places, row = [], 0
    for device in devices:
        for at in range(row, len(texts)):
            cells = framed_tables.split_cells(texts[at])
            if len(cells) > 1 and cells[0].split()[:1] == [str(device.npu_id)] and (device.health or "") in cells:
                row = at
                break
        places.append(row)
        row += 1
    return places


def _list_troubles(device: DeviceReading, table: InfoTable) -> Iterator[str]:
    if device.health not in _HEALTHY:
        yield WARNING_CODE if device.health == "Warning" else HEALTH_CODE
    if device.temp_c is not None and device.temp_c >= HOT_CELSIUS:
        yield HOT_CODE
    used, total = _get_memory(device)
    if table.process_table and total and used >= _FULL_SHARE * total and not _has_process(device, table):
        yield MEMORY_CODE


def _get_memory(device: DeviceReading) -> tuple[int, int]:
    if device.hbm_total_mb:
        return device.hbm_used_mb or 0, device.hbm_total_mb
    return device.mem_used_mb or 0, device.mem_total_mb or 0


def _has_process(device: DeviceReading, table: InfoTable) -> bool:
    return any(
        process.npu_id == device.npu_id and process.chip_id in (None, device.chip_id) for process in table.processes
    )


def _describe(device: DeviceReading, table: InfoTable) -> str:
    used, total = _get_memory(device)
    parts = [f"health {device.health}"] if device.health else []
    parts += [f"{device.temp_c} C"] if device.temp_c is not None else []
    parts += [f"{used} of {total} MB used"] if total else []
    parts += ["no process listed"] if table.process_table and not _has_process(device, table) else []
    chip = f" chip {device.chip_id}" if device.chip_id else ""
    return f"NPU {device.npu_id}{chip}: {', '.join(parts)}"
