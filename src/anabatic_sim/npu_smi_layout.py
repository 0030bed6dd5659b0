"""Print as `npu-smi` does, letter by letter: pure functions from readings to text.

The layouts were read off captured outputs of drivers 23.0 to 26.0 (ms-swift, telegraf, gpustat, vendor documents) and
hicann/driver's npu_info_print.c: cells are padded by printf and never cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ChipFamily = Literal["A2", "A3", "910", "310P"]
MOST_PROCESSES = 8
"""Of one chip, in the table (MAX_CHIP_PROCESS_NUM)."""
HEALTH_NAMES = ("OK", "Warning", "Alarm", "Critical", "UNKNOWN")


@dataclass(frozen=True)
class SmiProcess:
    """A process and what it holds on one chip."""

    pid: int
    name: str
    used_mib: int


@dataclass(frozen=True)
class SmiReading:
    """One chip, or one of the two dies of an A3 card."""

    npu: int
    chip: int
    logic_id: int
    name: str
    health: str
    watt: float | None
    """None: on the other die."""
    celsius: int
    bus: str
    aicore: int
    used_mib: int
    total_mib: int
    processes: tuple[SmiProcess, ...] = ()
    ddr: str = "0    / 0"
    hugepages: str = "0    / 0"


@dataclass(frozen=True)
class TableLayout:
    """Widths of the table's three columns, and of the parts inside them."""

    widths: tuple[int, int, int]
    version: int
    ids: int
    power: int
    process: tuple[int, int]


HBM_LAYOUT = TableLayout((27, 15, 52), 25, 5, 12, (26, 25))
DDR_LAYOUT = TableLayout((31, 17, 54), 41, 7, 13, (26, 27))


def format_row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a row of cells; a cell that is too long pushes the bars."""
    return "|" + "|".join(f" {cell:<{width - 1}}" for cell, width in zip(cells, widths, strict=True)) + "|"


def format_rule(widths: Sequence[int], letter: str) -> str:
    """Return the line between two rows."""
    return "+" + "+".join(letter * width for width in widths) + "+"


def _pad_pair(text: str, width: int) -> str:
    left, _, right = text.partition("/")
    return f"{left.strip():<{width}}/ {right.strip()}"


def _format_device_rows(reading: SmiReading, family: ChipFamily, frame: TableLayout) -> list[str]:
    power = "-" if reading.watt is None else "NA" if family == "310P" else f"{reading.watt:.1f}"
    wide = 6 if family == "310P" else 5
    first = f"{power:<{frame.power}}{reading.celsius:<18}{_pad_pair(reading.hugepages, wide)}"
    memory = f"{reading.used_mib:<5}/ {reading.total_mib}"
    second = f"{reading.aicore:<{frame.power}}"
    second += memory if family == "310P" else f"{_pad_pair(reading.ddr, 5):<18}{memory}"
    third = {"A3": f"{reading.chip:<5} {reading.logic_id}", "310P": f"{reading.chip:<7} {reading.logic_id}"}.get(
        family, str(reading.chip)
    )
    return [
        format_row([f"{reading.npu:<{frame.ids}} {reading.name}", reading.health, first], frame.widths),
        format_row([third, reading.bus, second], frame.widths),
    ]


def _format_heading(version: str, family: ChipFamily, frame: TableLayout) -> list[str]:
    inner = sum(frame.widths) + 2
    ids = {"A3": f"{'Chip':<5} Phy-ID", "310P": f"{'Chip':<7} Device"}.get(family, "Chip")
    usage = f"{'AICore(%)':<{frame.power}}" + (
        "Memory-Usage(MB)" if family == "310P" else "Memory-Usage(MB)  HBM-Usage(MB)"
    )
    return [
        f"+{'-' * inner}+",
        f"| {f'npu-smi {version:<{frame.version}}Version: {version}':<{inner - 1}}|",
        format_rule(frame.widths, "-"),
        format_row(
            [
                f"{'NPU':<{frame.ids}} Name",
                "Health",
                f"{'Power(W)':<{frame.power}}Temp(C)           Hugepages-Usage(page)",
            ],
            frame.widths,
        ),
        format_row([ids, "Bus-Id", usage], frame.widths),
        format_rule(frame.widths, "="),
    ]


def _format_process_rows(readings: Sequence[SmiReading], frame: TableLayout) -> list[str]:
    widths = (*frame.widths[:2], *frame.process)
    lines = [
        format_rule(frame.widths, "-"),
        format_row([f"{'NPU':<7} Chip", "Process id", "Process name", "Process memory(MB)"], widths),
    ]
    lines.append(format_rule(frame.widths, "="))
    for npu in dict.fromkeys(reading.npu for reading in readings):
        rows = [
            format_row([f"{npu:<7} {reading.chip}", str(process.pid), process.name[:15], str(process.used_mib)], widths)
            for reading in readings
            if reading.npu == npu
            for process in reading.processes[:MOST_PROCESSES]
        ]
        inner = sum(frame.widths) + 2
        lines += rows or [f"| {f'No running processes found in NPU {npu}':<{inner - 1}}|"]
        lines.append(format_rule(frame.widths, "="))
    return lines


def format_info(
    readings: Sequence[SmiReading], version: str, family: ChipFamily, frame: TableLayout | None = None
) -> str:
    """Return the table of `npu-smi info`, in the frame of the family unless another is given."""
    frame = frame or (DDR_LAYOUT if family == "310P" else HBM_LAYOUT)
    lines = _format_heading(version, family, frame)
    for index, reading in enumerate(readings):
        lines += _format_device_rows(reading, family, frame)
        same_card = index + 1 < len(readings) and readings[index + 1].npu == reading.npu
        inner = sum(frame.widths) + 2
        between = format_rule(frame.widths, "-") if family == "310P" else f"+{'-' * inner}+"
        lines.append(between if same_card else format_rule(frame.widths, "="))
    return "\n".join(lines + _format_process_rows(readings, frame)) + "\n"


def format_pairs(rows: Sequence[tuple[str, object] | None], width: int = 30) -> str:
    """Return `key : value` lines; None is an empty line."""
    return "".join("\n" if row is None else f"\t{row[0]:<{width}} : {row[1]}\n" for row in rows)


def format_listing(cards: Sequence[tuple[int, int]]) -> str:
    """Return `npu-smi info -l` for cards and their numbers of chips."""
    rows: list[tuple[str, object] | None] = [("Total Count", len(cards))]
    for npu, chips in cards:
        rows += [None, ("NPU ID", npu), ("Chip Count", chips)]
    return format_pairs(rows)


def format_mapping(readings: Sequence[SmiReading], chip_name: str, family: ChipFamily) -> str:
    """Return `npu-smi info -m`; each card ends with its management controller."""
    names = ["NPU ID", "Chip ID", "Chip Logic ID", *(["Chip Phy-ID"] if family == "A3" else []), "Chip Name"]
    lines = ["".join(f"{name:<31}" for name in names).rstrip()]
    for index, reading in enumerate(readings):
        logic = [reading.logic_id] * (2 if family == "A3" else 1)
        lines.append("".join(f"{cell!s:<31}" for cell in (reading.npu, reading.chip, *logic, chip_name)).rstrip())
        if index + 1 == len(readings) or readings[index + 1].npu != reading.npu:
            dashes = ["-"] * len(logic)
            lines.append("".join(f"{cell!s:<31}" for cell in (reading.npu, reading.chip + 1, *dashes, "Mcu")).rstrip())
    return "".join(f"\t{line}\n" for line in lines)


def format_topology(readings: Sequence[SmiReading], family: ChipFamily, cores: int) -> str:
    """Return `npu-smi info -t topo`: how each pair of chips is joined, and the cores that are nearest."""
    label = "Phy-ID" if family == "A3" else "NPU"
    names = [f"{label}{reading.logic_id}" for reading in readings]
    cores_per_device = max(cores // max(len(readings), 1), 1)
    lines = ["\t   " + "".join(f"{name:<11}" for name in names) + "CPU Affinity"]
    for index, one in enumerate(readings):
        joined = [_link_type(one, other, family) for other in readings]
        first = min(index * cores_per_device, cores - 1)
        near = f"{first}-{min(first + cores_per_device - 1, cores - 1)}"
        lines.append(f"{names[index]:<11}" + "".join(f"{word:<11}" for word in joined) + near)
    return "\n".join(lines) + "\n\nLegend:\n\n" + _LEGEND.format(_A3_LEGEND if family == "A3" else "")


def _link_type(one: SmiReading, other: SmiReading, family: ChipFamily) -> str:
    if one is other:
        return "X"
    if family == "A3":
        return "SIO" if one.npu == other.npu else "HCCS_SW"
    return "HCCS" if family in ("A2", "910") else "PHB"


_LEGEND = """  X    = Self
  SYS  = Path traversing PCIe and NUMA nodes. Nodes are connected through SMP, such as QPI, UPI.
  PHB  = Path traversing PCIe and the PCIe host bridge of a CPU.
  PIX  = Path traversing a single PCIe switch
  PXB  = Path traversing multiple PCIe switches
  HCCS = Connection traversing HCCS.
{}  NA   = Unknown relationship.
"""

_A3_LEGEND = """  SIO  = Path traversing SIO.
  HCCS_SW = Path traversing HCCS switch.
"""

_WATCH_COLUMNS = (
    "NpuID(Idx)",
    "ChipId(Idx)",
    "Pwr(W)",
    "Temp(C)",
    "AI Core(%)",
    "AI Cpu(%)",
    "Ctrl Cpu(%)",
    "Memory(%)",
    "Memory BW(%)",
)


def format_watch_heading() -> str:
    """Return the first line of `npu-smi info watch`."""
    return "".join(f"{name:<12}" for name in _WATCH_COLUMNS) + "\n"


def format_watch(readings: Sequence[SmiReading]) -> str:
    """Return a line per chip of `npu-smi info watch`."""
    lines = []
    for reading in readings:
        memory = 100 * reading.used_mib // max(reading.total_mib, 1)
        power = "-" if reading.watt is None else f"{reading.watt:.1f}"
        cells = (reading.npu, reading.chip, power, reading.celsius, reading.aicore, 0, 0, memory, reading.aicore // 2)
        lines.append("".join(f"{cell!s:<12}" for cell in cells))
    return "\n".join(lines) + "\n"
