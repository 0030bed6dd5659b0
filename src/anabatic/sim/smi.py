"""`npu-smi` inside a simulation: the devices of the shared segment in the real layouts.

Memory, processes, health and utilisation are live. Power and temperature are made up from the utilisation; an idle
simulated device uses no memory, a real one about 3 GB.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from anabatic.core.errors import AnabaticError
from anabatic.sim import chips, segment, smi_layout
from anabatic.sim.machine import CANN, SEGMENT
from anabatic.sim.smi_layout import HEALTH, Family, Process, Reading

SAMPLE_SECONDS = 0.1
"""Utilisation is the busy share of this time."""
_IDLE_WATT, _BUSY_WATT = 92.0, 350.0
_BUS = ("C1", "C2", "81", "82", "01", "02", "41", "42")
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


class Refused(Exception):
    """What the tool says instead; it goes to stdout, as the real one's does."""


def version() -> str:
    """Return the driver that belongs to the simulated CANN (compatibility table of CANN 8.5 and 9.x)."""
    return "25.5.1" if os.environ.get(CANN, "").startswith("8.") else "26.0.rc1"


def family_of(soc: str) -> Family:
    """Return which of the layouts a chip has."""
    starts: tuple[tuple[str, Family], ...] = (("Ascend310P", "310P"), ("Ascend910_93", "A3"), ("Ascend910B", "A2"))
    return next((family for start, family in starts if soc.startswith(start)), "910")


def _processes(live: segment.Segment) -> list[tuple[int, str, list[int], bool]]:
    found = []
    for row in live.process:
        if row.pid > 0:
            name = row.name.decode(errors="replace")
            found.append((row.pid, name, list(row.hbm), segment.alive(row.pid, int(row.started))))
    return found


def read(live: segment.Segment, sample: float = SAMPLE_SECONDS) -> list[Reading]:
    """Return every device that is still on the bus."""
    family = family_of(live.soc.decode())
    name = chips.CHIPS[live.soc.decode()].smi
    before = [live.device[index].busy_ns for index in range(live.devices)]
    started = time.monotonic()
    time.sleep(sample)
    spent = (time.monotonic() - started) * 1e9
    processes = _processes(live)
    readings = []
    for index in range(live.devices):
        row = live.device[index]
        if row.lost:
            continue
        busy = min(100, round(100 * (row.busy_ns - before[index]) / spent)) if spent else 0
        gone = sum(held[index] for _, _, held, alive in processes if not alive)  # until its memory is taken back
        npu, chip = divmod(index, 2) if family == "A3" else (index, 0)
        watt = _IDLE_WATT + 3 * (index % 3) + busy * (_BUSY_WATT - _IDLE_WATT) / 100
        mine = tuple(
            Process(pid, word, held[index] >> 20) for pid, word, held, alive in processes if alive and held[index]
        )
        readings.append(
            Reading(
                npu=npu,
                chip=chip,
                logic=index,
                name=name,
                health=HEALTH[min(row.health, 4)],
                watt=None if chip else watt,
                celsius=38 + index % 4 + busy // 6,
                bus=f"{index // 8:04X}:{_BUS[index % 8]}:00.0",
                aicore=busy,
                used_mib=max(row.hbm_used - gone, 0) >> 20,
                total_mib=row.hbm_total >> 20,
                processes=mine,
                ddr="0    / 15137" if family == "910" else "0    / 0",
            )
        )
    return readings


_Rows = list[tuple[str, object] | None]


def _usages(one: Reading, family: Family) -> _Rows:
    modern = family in ("A2", "A3")
    memory = 100 * one.used_mib // max(one.total_mib, 1)
    ddr = one.total_mib if family == "310P" else 15137 if family == "910" else 0
    rows: _Rows = [
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


def _power(one: Reading, family: Family) -> _Rows:
    return [("NPU Real-time Power(W)", "NA" if one.watt is None else f"{one.watt:.1f}"), ("Chip ID", one.chip)]


def _temp(one: Reading, family: Family) -> _Rows:
    return [("NPU Temperature (C)", one.celsius), ("Chip ID", one.chip)]


def _health(one: Reading, family: Family) -> _Rows:
    bad = one.health != "OK"
    code = {"Warning": "80E01801", "Alarm": "80F38008"}.get(one.health, "81078603")
    text = "node type=SOC, sensor type=Simulated fault"
    return [
        ("Health Status", one.health),
        ("Error Code", code if bad else "NA"),
        ("Error Information", text if bad else "NA"),
    ]


def _memory(one: Reading, family: Family) -> _Rows:
    rows: _Rows = [("DDR Capacity(MB)", one.total_mib if family == "310P" else 0), ("DDR Clock Speed(MHz)", 0)]
    if family != "310P":
        rows += [
            ("HBM Capacity(MB)", one.total_mib),
            ("HBM Clock Speed(MHz)", 1600),
            ("HBM Temperature(C)", one.celsius),
            ("HBM Manufacturer ID", "0x56"),
        ]
    return [*rows, ("Chip ID", one.chip)]


def _common(one: Reading, family: Family) -> _Rows:
    memory = 100 * one.used_mib // max(one.total_mib, 1)
    return [
        ("Chip ID", one.chip),
        ("Memory Usage Rate(%)", memory if family == "310P" else 0),
        *([] if family == "310P" else [("HBM Usage Rate(%)", memory)]),
        ("Aicore Usage Rate(%)", one.aicore),
        ("Temperature(C)", one.celsius),
        ("NPU Real-time Power(W)", "NA" if one.watt is None else f"{one.watt:.1f}"),
    ]


def _ecc(one: Reading, family: Family) -> _Rows:
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


def _board(one: Reading, family: Family) -> _Rows:
    return [
        ("Product Name", "Simulated"),
        ("Model", "NA"),
        ("Manufacturer", "Huawei"),
        ("Serial Number", f"SIM{one.npu:09}"),
        ("Software Version", version()),
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


_TYPES: dict[str, Callable[[Reading, Family], _Rows]] = {
    "usages": _usages, "power": _power, "temp": _temp, "health": _health, "memory": _memory, "common": _common,
    "ecc": _ecc, "board": _board,
}  # fmt: skip
_KNOWN = [
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


def _proc_mem(chosen: Sequence[Reading]) -> str:
    lines: list[str] = []
    for one in chosen:
        lines += [
            f"\tProcess id:{process.pid:<7} Process name:{process.name[:15]:<17} Process memory(MB):{process.mib}\n"
            for process in one.processes
        ] or ["\tNo process in device.\n"]
        lines.append(f"\t{'Chip ID':<30} : {one.chip}\n")
    return "".join([f"\t{'NPU ID':<30} : {chosen[0].npu}\n", *lines])


def _typed(kind: str, readings: list[Reading], family: Family, card: int | None, chip: int | None) -> str:
    if kind == "topo":
        if family == "310P":
            raise Refused("This device does not support querying topo.")
        return smi_layout.topology(readings, family, os.cpu_count() or 1)
    if kind in _KNOWN:
        raise Refused(f"This device does not support querying {kind}.")
    if kind not in _TYPES and kind != "proc-mem":
        raise Refused(f"Error parameter of -t\n\n{_USAGE}")
    if card is None:
        raise Refused(f"This command must input card id.\n\n{_USAGE}")
    chosen = [one for one in readings if one.npu == card and chip in (None, one.chip)]
    if not chosen:
        raise Refused(f"Error parameter of {'-i' if all(one.npu != card for one in readings) else '-c'}\n\n{_USAGE}")
    if kind == "proc-mem":
        return _proc_mem(chosen)
    wide = 40 if kind == "ecc" else 30
    rows: _Rows = []
    if kind == "board":
        rows = [("NPU ID", card), *_board(chosen[0], family), ("Chip Count", len(chosen))]
    else:
        if chip is None and kind != "health":  # the card as a whole
            rows = [("NPU ID", card), ("Chip Count", len(chosen)), None]
        for one in chosen:
            rows += [*([None] if one is not chosen[0] else []), *_TYPES[kind](one, family)]
    return smi_layout.pairs(rows, wide)


def _number(words: list[str], flag: str) -> int | None:
    if flag not in words:
        return None
    place = words.index(flag)
    if place + 1 >= len(words) or not words[place + 1].isdigit():
        raise Refused(f"Error parameter of {flag}\n\n{_USAGE}")
    return int(words[place + 1])


def _watch(live: segment.Segment, words: list[str]) -> str:
    every = _number(words, "-d") or 1
    card = _number(words, "-i")
    sys.stdout.write(smi_layout.watch_heading())
    while True:
        readings = [one for one in read(live, float(every)) if card in (None, one.npu)]
        sys.stdout.write(smi_layout.watch(readings))
        sys.stdout.flush()


def _info(live: segment.Segment, words: list[str]) -> str:
    family = family_of(live.soc.decode())
    allowed = {"-l", "-m", "-t", "-i", "-c", "-d", "watch"}
    unknown = [word for word in words if word.startswith("-") and word not in allowed]
    if unknown or (words and words[0] not in allowed):
        raise Refused(f"Error parameter of {(unknown or words)[0]}\n\n{_USAGE}")
    if words[:1] == ["watch"]:
        return _watch(live, words)
    card, chip = _number(words, "-i"), _number(words, "-c")
    kind = words[words.index("-t") + 1 : words.index("-t") + 2] if "-t" in words else None
    if kind == []:
        raise Refused(f"Error parameter of -t\n\n{_USAGE}")
    quick = bool({"-l", "-m"} & set(words)) or kind in (["topo"], ["proc-mem"], ["board"], ["health"])
    readings = read(live, 0.0 if quick else SAMPLE_SECONDS)
    if not readings:
        raise Refused("There is no NPU card on this server.")
    if "-l" in words:
        cards = [one.npu for one in readings]
        return smi_layout.listing([(npu, cards.count(npu)) for npu in dict.fromkeys(cards)])
    if "-m" in words:
        name = readings[0].name.removeprefix("Ascend")
        return smi_layout.mapping(readings, f"Ascend {name}", family)
    if kind:
        return _typed(kind[0], readings, family, card, chip)
    chosen = [one for one in readings if card in (None, one.npu)]
    if not chosen:
        raise Refused(f"Error parameter of -i\n\n{_USAGE}")
    return smi_layout.info(chosen, version(), family)


def main(words: Sequence[str] | None = None) -> int:
    """Run the tool; return its exit code."""
    given = list(sys.argv[1:] if words is None else words)
    if not given or given[0] in ("-h", "--help") or "-h" in given or "--help" in given:
        sys.stdout.write(_USAGE)
        return 0
    if given[0] in ("-v", "--version"):
        sys.stdout.write(f"npu-smi version: {version()}\n")
        return 0
    try:
        if given[0] != "info":
            raise Refused(f"Error parameter of {given[0]}\n\n{_USAGE}")
        name = os.environ.get(SEGMENT)
        if not name:
            raise Refused("dcmi module initialize failed. ret is -8005")
        with segment.attached(name) as live:
            sys.stdout.write(_info(live, given[1:]))
    except Refused as refused:
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
