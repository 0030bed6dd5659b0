"""`npu-smi` inside a simulation: the devices of the shared segment in the real layouts.

Memory, processes, health and utilisation are live. Power and temperature are made up from the utilisation; an idle
simulated device uses no memory, a real one about 3 GB.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from anabatic.core import process_info
from anabatic.core.errors import AnabaticError
from anabatic.core.formatting import parse_whole
from anabatic_sim import chips, npu_smi_layout, shared_memory
from anabatic_sim.machine_spec import CANN_VARIABLE, SEGMENT_VARIABLE
from anabatic_sim.npu_smi_layout import HEALTH_NAMES, ChipFamily, SmiProcess, SmiReading

SAMPLE_SECONDS = 0.1
"""Utilisation is the busy share of this time."""
_IDLE_WATT, _BUSY_WATT = 92.0, 350.0
_PCI_BUSES = ("C1", "C2", "81", "82", "01", "02", "41", "42")
"""PCI buses of an Atlas 800T A2."""
_USAGE = """Usage: npu-smi info <watch|proc|-h|-m|-l|-t type> [Options...]

Commands:
       watch          Show all device's status in scrolling format
       -h, --help     Show this help text and exit
       -m             Show all device's mapping information
       -l             Show all device's topology information
       -t type        Show information for type
                      type: board, memory, usages, temp, power, common, health, ecc, proc-mem, topo

Options:
       -i %d          Card ID
       -c %d          Chip ID
       -d %d          Seconds between two lines of watch
"""


class SmiRefusedError(Exception):
    """Message of the tool instead; it goes to stdout, as the real one's does."""


def driver_version() -> str:
    """Return the driver that belongs to the simulated CANN (compatibility table of CANN 8.5 and 9.x)."""
    return "25.5.1" if os.environ.get(CANN_VARIABLE, "").startswith("8.") else "26.0.rc1"


def chip_family(soc: str) -> ChipFamily:
    """Return which of the layouts a chip has."""
    starts: tuple[tuple[str, ChipFamily], ...] = (("Ascend310P", "310P"), ("Ascend910_93", "A3"), ("Ascend910B", "A2"))
    return next((family for start, family in starts if soc.startswith(start)), "910")


def _list_processes(live: shared_memory.SimSegment) -> list[tuple[int, str, list[int], bool]]:
    found = []
    for row in live.process:
        if row.pid > 0:
            name = row.name.decode(errors="replace")
            found.append((row.pid, name, list(row.hbm), process_info.is_alive(row.pid, int(row.started))))
    return found


def read_devices(live: shared_memory.SimSegment, sample: float = SAMPLE_SECONDS) -> list[SmiReading]:
    """Return every device that is still on the bus."""
    family = chip_family(live.soc.decode())
    name = chips.CHIPS[live.soc.decode()].npu_smi_name
    before = [live.device[index].busy_ns for index in range(live.devices)]
    started = time.monotonic()
    time.sleep(sample)
    spent = (time.monotonic() - started) * 1e9
    processes = _list_processes(live)
    readings = []
    for index in range(live.devices):
        row = live.device[index]
        if row.lost:
            continue
        busy = min(100, round(100 * (row.busy_ns - before[index]) / spent)) if spent else 0
        gone = sum(
            held_bytes[index] for _, _, held_bytes, alive in processes if not alive
        )  # until its memory is taken back
        npu, chip = divmod(index, 2) if family == "A3" else (index, 0)
        watt = _IDLE_WATT + 3 * (index % 3) + busy * (_BUSY_WATT - _IDLE_WATT) / 100
        device_processes = tuple(
            SmiProcess(pid, word, held_bytes[index] >> 20)
            for pid, word, held_bytes, alive in processes
            if alive and held_bytes[index]
        )
        readings.append(
            SmiReading(
                npu=npu,
                chip=chip,
                logic_id=index,
                name=name,
                health=HEALTH_NAMES[min(row.health, 4)],
                watt=None if chip else watt,
                celsius=38 + index % 4 + busy // 6,
                bus=f"{index // 8:04X}:{_PCI_BUSES[index % 8]}:00.0",
                aicore=busy,
                used_mib=max(row.hbm_used - gone, 0) >> 20,
                total_mib=row.hbm_total >> 20,
                processes=device_processes,
                ddr="0    / 15137" if family == "910" else "0    / 0",
            )
        )
    return readings


_LabelledRows = list[tuple[str, object] | None]


def _usages_rows(one: SmiReading, family: ChipFamily) -> _LabelledRows:
    modern = family in ("A2", "A3")
    memory = 100 * one.used_mib // max(one.total_mib, 1)
    ddr = one.total_mib if family == "310P" else 15137 if family == "910" else 0
    rows: _LabelledRows = [
        ("DDR Capacity(MB)", ddr),
        ("DDR Usage Rate(%)", memory if family == "310P" else 0),
        ("DDR Hugepages Total(page)", 0),
        ("DDR Hugepages Usage Rate(%)", 0),
    ]
    if family != "310P":
        rows += [("HBM Capacity(MB)", one.total_mib), ("HBM Usage Rate(%)", memory)]
    rows.append(("Aicore Usage Rate(%)", one.aicore))
    if modern:
        rows.append(("Aivector Usage Rate(%)", one.aicore))
    rows += [("Aicpu Usage Rate(%)", 0), ("Ctrlcpu Usage Rate(%)", 0), ("DDR Bandwidth Usage Rate(%)", 0)]
    if family != "310P":
        rows.append(("HBM Bandwidth Usage Rate(%)", one.aicore // 2))
    if modern:
        rows += [("NPU Utilization(%)", one.aicore), ("Aicube Usage Rate(%)", one.aicore)]
    return [*rows, ("Chip ID", one.chip)]


def _power_rows(one: SmiReading, family: ChipFamily) -> _LabelledRows:
    return [("NPU Real-time Power(W)", "NA" if one.watt is None else f"{one.watt:.1f}"), ("Chip ID", one.chip)]


def _temp_rows(one: SmiReading, family: ChipFamily) -> _LabelledRows:
    return [("NPU Temperature (C)", one.celsius), ("Chip ID", one.chip)]


def _health_rows(one: SmiReading, family: ChipFamily) -> _LabelledRows:
    bad = one.health != "OK"
    code = {"Warning": "80E01801", "Alarm": "80F38008"}.get(one.health, "81078603")
    text = "node type=SOC, sensor type=Simulated fault"
    return [
        ("Health Status", one.health),
        ("Error Code", code if bad else "NA"),
        ("Error Information", text if bad else "NA"),
    ]


def _memory_rows(one: SmiReading, family: ChipFamily) -> _LabelledRows:
    rows: _LabelledRows = [("DDR Capacity(MB)", one.total_mib if family == "310P" else 0), ("DDR Clock Speed(MHz)", 0)]
    if family != "310P":
        rows += [
            ("HBM Capacity(MB)", one.total_mib),
            ("HBM Clock Speed(MHz)", 1600),
            ("HBM Temperature(C)", one.celsius),
            ("HBM Manufacturer ID", "0x56"),
        ]
    return [*rows, ("Chip ID", one.chip)]


def _common_rows(one: SmiReading, family: ChipFamily) -> _LabelledRows:
    memory = 100 * one.used_mib // max(one.total_mib, 1)
    return [
        ("Chip ID", one.chip),
        ("Memory Usage Rate(%)", memory if family == "310P" else 0),
        *([] if family == "310P" else [("HBM Usage Rate(%)", memory)]),
        ("Aicore Usage Rate(%)", one.aicore),
        ("Temperature(C)", one.celsius),
        ("NPU Real-time Power(W)", "NA" if one.watt is None else f"{one.watt:.1f}"),
    ]


def _ecc_rows(one: SmiReading, family: ChipFamily) -> _LabelledRows:
    kinds = [
        f"{memory} {text}"
        for memory in ("DDR", "HBM")
        for text in (
            "Single Bit Error Count",
            "Double Bit Error Count",
            "Single Bit Aggregate Total Err Cnt",
            "Double Bit Aggregate Total Err Cnt",
            "Single Bit Isolated Pages Count",
            "Double Bit Isolated Pages Count",
        )
    ]
    broken = (
        {"HBM Double Bit Error Count", "HBM Double Bit Aggregate Total Err Cnt"} if one.health == "Alarm" else set()
    )
    return [*((kind, int(kind in broken)) for kind in kinds), ("Chip ID", one.chip)]


def _board_rows(one: SmiReading, family: ChipFamily) -> _LabelledRows:
    return [
        ("Product Name", "Simulated"),
        ("Model", "NA"),
        ("Manufacturer", "Huawei"),
        ("Serial Number", f"SIM{one.npu:09}"),
        ("Software Version", driver_version()),
        ("Firmware Version", "7.8.0.6.201"),
        ("Compatibility", "OK"),
        ("Board ID", "0x60"),
        ("PCB ID", "A"),
        ("BOM ID", "1"),
        ("PCIe Bus Info", one.bus),
        ("Slot ID", one.npu),
        ("Class ID", "NA"),
        ("PCI Vendor ID", "0x19E5"),
        ("PCI Device ID", "0xD802"),
        ("Subsystem Vendor ID", "0x19E5"),
        ("Subsystem Device ID", "0x3003"),
    ]


_TYPE_FORMATTERS: dict[str, Callable[[SmiReading, ChipFamily], _LabelledRows]] = {
    "usages": _usages_rows,
    "power": _power_rows,
    "temp": _temp_rows,
    "health": _health_rows,
    "memory": _memory_rows,
    "common": _common_rows,
    "ecc": _ecc_rows,
    "board": _board_rows,
}
_UNSUPPORTED_TYPES = [
    "flash",
    "sensors",
    "volt",
    "mac-addr",
    "product",
    "ip",
    "sys-time",
    "i2c_check",
    "work-mode",
    "ecc-enable",
    "p2p-enable",
    "ssh-enable",
    "license",
    "customized-info",
    "device-share",
    "nve-level",
    "aicpu-config",
    "pcie-err",
    "err-count",
    "boot-area",
    "vnpu-mode",
    "info-vnpu",
    "vnpu-svm",
    "cpu-num-cfg",
    "phyid-remap",
    "first-power-on-date",
    "key-manage",
    "template-info",
    "hccs",
    "sio-info",
    "spod-info",
    "hccs-bw",
    "cpu-freq-up",
    "op-timeout",
]
"""The real tool knows these; the simulated device does not."""


def _format_proc_mem(chosen: Sequence[SmiReading]) -> str:
    lines: list[str] = []
    for one in chosen:
        lines += [
            f"\tProcess id:{process.pid:<7} Process name:{process.name[:15]:<17} Process "
            f"memory(MB):{process.used_mib}\n"
            for process in one.processes
        ] or ["\tNo process in device.\n"]
        lines.append(f"\t{'Chip ID':<30} : {one.chip}\n")
    return "".join([f"\t{'NPU ID':<30} : {chosen[0].npu}\n", *lines])


def _format_type(kind: str, readings: list[SmiReading], family: ChipFamily, card: int | None, chip: int | None) -> str:
    if kind == "topo":
        if family == "310P":
            raise SmiRefusedError("This device does not support querying topo.")
        return npu_smi_layout.format_topology(readings, family, os.cpu_count() or 1)
    if kind in _UNSUPPORTED_TYPES:
        raise SmiRefusedError(f"This device does not support querying {kind}.")
    if kind not in _TYPE_FORMATTERS and kind != "proc-mem":
        raise SmiRefusedError(f"Error parameter of -t\n\n{_USAGE}")
    if card is None:
        raise SmiRefusedError(f"This command must input card id.\n\n{_USAGE}")
    chosen = [one for one in readings if one.npu == card and chip in (None, one.chip)]
    if not chosen:
        raise SmiRefusedError(
            f"Error parameter of {'-i' if all(one.npu != card for one in readings) else '-c'}\n\n{_USAGE}"
        )
    if kind == "proc-mem":
        return _format_proc_mem(chosen)
    wide = 40 if kind == "ecc" else 30
    rows: _LabelledRows = []
    if kind == "board":
        rows = [("NPU ID", card), *_board_rows(chosen[0], family), ("Chip Count", len(chosen))]
    else:
        if chip is None and kind != "health":  # the card as a whole
            rows = [("NPU ID", card), ("Chip Count", len(chosen)), None]
        for one in chosen:
            rows += [*([None] if one is not chosen[0] else []), *_TYPE_FORMATTERS[kind](one, family)]
    return npu_smi_layout.format_pairs(rows, wide)


def _parse_number(words: list[str], flag: str) -> int | None:
    if flag not in words:
        return None
    place = words.index(flag)
    number = parse_whole(words[place + 1]) if place + 1 < len(words) else None
    if number is None:
        raise SmiRefusedError(f"Error parameter of {flag}\n\n{_USAGE}")
    return number


def _print_watch(live: shared_memory.SimSegment, words: list[str]) -> str:
    every = _parse_number(words, "-d") or 1
    card = _parse_number(words, "-i")
    sys.stdout.write(npu_smi_layout.format_watch_heading())
    while True:
        readings = [one for one in read_devices(live, float(every)) if card in (None, one.npu)]
        sys.stdout.write(npu_smi_layout.format_watch(readings))
        sys.stdout.flush()


def _format_info(live: shared_memory.SimSegment, words: list[str]) -> str:
    family = chip_family(live.soc.decode())
    allowed = {"-l", "-m", "-t", "-i", "-c", "-d", "watch"}
    unknown = [word for word in words if word.startswith("-") and word not in allowed]
    if unknown or (words and words[0] not in allowed):
        raise SmiRefusedError(f"Error parameter of {(unknown or words)[0]}\n\n{_USAGE}")
    if words[:1] == ["watch"]:
        return _print_watch(live, words)
    card, chip = _parse_number(words, "-i"), _parse_number(words, "-c")
    kind = words[words.index("-t") + 1 : words.index("-t") + 2] if "-t" in words else None
    if kind == []:
        raise SmiRefusedError(f"Error parameter of -t\n\n{_USAGE}")
    quick = bool({"-l", "-m"} & set(words)) or kind in (["topo"], ["proc-mem"], ["board"], ["health"])
    readings = read_devices(live, 0.0 if quick else SAMPLE_SECONDS)
    if not readings:
        raise SmiRefusedError("There is no NPU card on this server.")
    if "-l" in words:
        cards = [one.npu for one in readings]
        return npu_smi_layout.format_listing([(npu, cards.count(npu)) for npu in dict.fromkeys(cards)])
    if "-m" in words:
        name = readings[0].name.removeprefix("Ascend")
        return npu_smi_layout.format_mapping(readings, f"Ascend {name}", family)
    if kind:
        return _format_type(kind[0], readings, family, card, chip)
    chosen = [one for one in readings if card in (None, one.npu)]
    if not chosen:
        raise SmiRefusedError(f"Error parameter of -i\n\n{_USAGE}")
    return npu_smi_layout.format_info(chosen, driver_version(), family)


def main(words: Sequence[str] | None = None) -> int:
    """Run the tool; return its exit code."""
    given = list(sys.argv[1:] if words is None else words)
    if not given or given[0] in ("-h", "--help") or "-h" in given or "--help" in given:
        sys.stdout.write(_USAGE)
        return 0
    if given[0] in ("-v", "--version"):
        sys.stdout.write(f"npu-smi version: {driver_version()}\n")
        return 0
    try:
        if given[0] != "info":
            raise SmiRefusedError(f"Error parameter of {given[0]}\n\n{_USAGE}")
        name = os.environ.get(SEGMENT_VARIABLE)
        if not name:
            raise SmiRefusedError("dcmi module initialize failed. ret is -8005")
        with shared_memory.attach_segment(name) as live:
            sys.stdout.write(_format_info(live, given[1:]))
    except SmiRefusedError as refused:
        sys.stdout.write(f"{refused}\n")
        return 1
    except AnabaticError:
        sys.stdout.write("dcmi module initialize failed. ret is -8005\n")
        return 1
    except (BrokenPipeError, KeyboardInterrupt):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
