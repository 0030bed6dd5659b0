"""The layouts of `npu-smi info` that no simulated chip has: the oldest one (21.0), and those of the 950."""

from __future__ import annotations

from collections.abc import Sequence

from anabatic_sim.npu_smi_layout import MOST_PROCESSES, SmiReading, format_row, format_rule


def oldest(readings: Sequence[SmiReading], version: str) -> str:
    """No hugepages, no process table."""
    widths = (19, 17, 40)
    inner = sum(widths) + 2
    lines = [
        f"+{'-' * inner}+",
        f"| {f'npu-smi {version:<28} Version: {version}':<{inner - 1}}|",
        format_rule(widths, "-"),
        format_row(["NPU     Name", "Health", "Power(W)          Temp(C)"], widths),
        format_row(["Chip    Device", "Bus-Id", "AICore(%)         Memory-Usage(MB)"], widths),
        format_rule(widths, "="),
    ]
    for one in readings:
        power = "NA" if one.watt is None else f"{one.watt:.1f}"
        first, second = (
            f"{power:<17} {one.celsius}",
            f"{one.aicore:<17} {one.used_mib} / {one.total_mib}",
        )
        lines += [
            format_row([f"{one.npu:<7} {one.name}", one.health, first], widths),
            format_row([f"{one.chip:<7} {one.logic_id}", one.bus, second], widths),
            format_rule(widths, "-"),
        ]
    return "\n".join(lines) + "\n"


def newest(readings: Sequence[SmiReading], version: str, wide: bool) -> str:
    """950: four cells a row, no chip ids; the wide one names the process in its container too."""
    widths = (8, 18, 15, 70 if wide else 53)
    gap = 22 if wide else 12
    inner = sum(widths) + 3
    lines = [
        f"+{'-' * inner}+",
        f"| {f'npu-smi {version:<30} Version: {version}':<{inner - 1}}|",
        format_rule(widths, "-"),
        format_row(
            ["NPU ID", "Name", "Health", f"{'Power(W)':<{gap}}{'Temp(C)':<{gap + 3}}Hugepages-Usage(page)"],
            widths,
        ),
        format_row(
            ["", "", "Bus-Id", f"{'NPU Util(%)':<{gap}}{'Memory-Usage(MB)':<{gap + 3}}HBM-Usage(MB)"],
            widths,
        ),
        format_rule(widths, "="),
    ]
    for one in readings:
        power = "NA" if one.watt is None else f"{one.watt:.1f}"
        used = f"{one.used_mib:<6}/ {one.total_mib}"
        lines += [
            format_row(
                [str(one.npu), one.name, one.health, f"{power:<{gap}}{one.celsius:<{gap + 3}}{one.hugepages}"],
                widths,
            ),
            format_row(["", "", one.bus, f"{one.aicore:<{gap}}{one.ddr:<{gap + 3}}{used}"], widths),
            format_rule((27, *widths[2:]), "="),
        ]
    return "\n".join([*lines, *_processes(readings, inner, wide)]) + "\n"


def _processes(readings: Sequence[SmiReading], inner: int, wide: bool) -> list[str]:
    parts = (27, 15, 20, 23, 25) if wide else (27, 15, 26, 26)
    names = ["NPU ID", "Process id", "Process name", "Process memory(MB)", "Process id in container"]
    lines = [format_rule(parts, "-"), format_row(names[: len(parts)], parts), format_rule(parts, "=")]
    for one in readings:
        held = [
            [str(one.npu), str(each.pid), each.name[:15], str(each.used_mib), "NA"]
            for each in one.processes[:MOST_PROCESSES]
        ]
        lines += [format_row(each[: len(parts)], parts) for each in held]
        if not held:
            lines.append(f"| {f'No running processes found in NPU {one.npu}':<{inner - 1}}|")
        lines.append(format_rule(parts, "="))
    return lines
