"""Checks of what npu-smi says: whether it works, health, temperature, other people's processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from anabatic.core.formatting import format_spans, parse_whole
from anabatic.doctor import chip_names
from anabatic.doctor.checks.hardware import HOT_CELSIUS, format_docker_flags
from anabatic.doctor.findings.catalog import make_result
from anabatic.doctor.findings.check_result import CheckResult
from anabatic.doctor.target_machine import TargetMachine
from anabatic.monitor.npu_smi import output_parser
from anabatic.monitor.npu_smi.framed_tables import InfoTable
from anabatic.monitor.npu_smi.key_values import KeyValueOutput
from anabatic.monitor.snapshot import DeviceReading

_HEALTH_OK, _HEALTH_WARNING = "OK", "Warning"
"""Health as npu-smi prints it; everything else is worse (Alarm, Critical, UNKNOWN)."""
_NO_HEALTH = (None, "", "NA", "-")
_OCCUPIED_CODES, _NO_DRIVER_CODE = ("-8020", "-8013"), "-8005"
"""Codes of dcmi: the chips belong to another container; it cannot start."""


def parse_info_table(machine: TargetMachine) -> InfoTable:
    """Return the table of `npu-smi info`; empty when there is none."""
    if "smi" not in machine.notes:
        machine.notes["smi"] = output_parser.parse_info_table(str(machine.get_fact("npu-smi", dict).get("text", "")))
    found: InfoTable = machine.notes["smi"]
    return found


def record_npu_notes(machine: TargetMachine) -> None:
    """Note what other checks use: driver, how many devices, the chip's name."""
    if not machine.has_npu:
        return
    found = parse_info_table(machine)
    if found.driver_version:
        machine.notes["driver"] = found.driver_version
    if found.devices:
        machine.notes["count"] = len(found.devices)
        machine.notes["name"] = chip_names.normalize_soc_name(found.devices[0].name or "")


def check_npu_smi(machine: TargetMachine) -> Iterator[CheckResult]:
    """Check that npu-smi answers, and count its devices."""
    if not machine.has_npu:
        return
    npu_smi_facts, table = machine.get_fact("npu-smi", dict), parse_info_table(machine)
    text = " ".join(str(npu_smi_facts.get("text", "")).split())
    if not npu_smi_facts and machine.npu_smi_path:
        if not machine.files.is_live:
            yield make_result("npu-smi.unasked", path=machine.npu_smi_path)
        else:
            runs = os.access(machine.npu_smi_path, os.X_OK)
            yield make_result("npu-smi.hung") if runs else make_result("npu-smi.denied", path=machine.npu_smi_path)
    elif not npu_smi_facts:
        yield make_result("npu-smi.missing")
    elif npu_smi_facts.get("code", 0) is None:
        yield make_result("npu-smi.hung")
    elif table.devices:
        version = table.tool_version or table.driver_version or "?"
        yield make_result("npu-smi.ok", version=version, count=len(table.devices))
        if len(table.devices) < len(machine.npu_node_numbers):
            yield make_result("npu-smi.fewer", count=len(table.devices), nodes=len(machine.npu_node_numbers))
    else:
        yield _explain_refusal(machine, text)


def _explain_refusal(machine: TargetMachine, text: str) -> CheckResult:
    code = next(iter(re.findall(r"ret is (-\d{1,6})", text)), "")
    if code in _OCCUPIED_CODES:
        return make_result("npu-smi.occupied", code=code)
    if code or "drvRet" in text or "no NPU" in text:
        return make_result("npu-smi.no_driver", code=code or text[:100], flags=format_docker_flags(machine))
    if "cannot open shared object" in text or re.search(r"lib\w+\.so", text):
        return make_result("npu-smi.no_library", text=text[:200])
    return make_result("npu-smi.odd", text=text[:100] or '""')


def check_ecc(machine: TargetMachine) -> Iterator[CheckResult]:
    """Memory errors that ECC could not correct (`npu-smi info -t ecc`)."""
    if not machine.has_npu:
        return
    ecc_texts = {str(card): str(text) for card, text in machine.get_fact("ecc", dict).items()}
    bad, read = [], 0
    for card, text in ecc_texts.items():
        parsed = output_parser.parse_output(text)
        if isinstance(parsed, KeyValueOutput) and parsed.npu_id is not None and str(parsed.npu_id) != card:
            bad.append(make_result("ecc.other", card=card, other=parsed.npu_id))
            continue
        blocks = parsed.blocks if isinstance(parsed, KeyValueOutput) else []
        counts = {
            key: value for block in blocks for key, value in block.values.items() if _DOUBLE_BIT_COUNT.search(key)
        }
        read += bool(counts)
        if errors := sum(parse_whole(value, 12) or 0 for value in counts.values()):
            bad.append(make_result("ecc.bad", which=f"NPU {card}", errors=errors, card=card))
    yield from bad
    if read and not bad:
        yield make_result("ecc.ok", count=read)


_DOUBLE_BIT_COUNT = re.compile(r"^(DDR|HBM) Double Bit Error Count$")


def _format_npu_names(devices: list[DeviceReading]) -> str:
    """`NPU 0-3`; of a single die also which."""
    die = f" die {devices[0].chip_id}" if len(devices) == 1 and devices[0].chip_id else ""
    return f"NPU {format_spans([device.npu_id for device in devices])}{die}"


def check_health(machine: TargetMachine) -> Iterator[CheckResult]:
    """Health and temperature of every chip."""
    devices = parse_info_table(machine).devices if machine.has_npu else []
    if not devices:
        return
    health_by_device = [(device, device.health if device.health not in _NO_HEALTH else None) for device in devices]
    for bad in dict.fromkeys(state for _, state in health_by_device if state and state != _HEALTH_OK):
        those = [device for device, state in health_by_device if state == bad]
        identity = "health.warning" if bad == _HEALTH_WARNING else "health.bad"
        yield make_result(identity, which=_format_npu_names(those), card=those[0].npu_id, health=bad)
    if hot := [device for device in devices if device.temp_c is not None and device.temp_c >= HOT_CELSIUS]:
        yield make_result(
            "temperature.hot", which=_format_npu_names(hot), celsius=max(device.temp_c or 0 for device in hot)
        )
    if all(state is None for _, state in health_by_device):
        yield make_result("health.unknown")
    elif all(state == _HEALTH_OK for _, state in health_by_device):
        warm = [device.temp_c for device in devices if device.temp_c is not None]
        span = "-".join(str(one) for one in sorted({min(warm), max(warm)})) if warm else "?"
        yield make_result("health.ok", count=len(devices), celsius=f"{span} C")


def check_processes(machine: TargetMachine) -> Iterator[CheckResult]:
    """Processes on the NPUs: an idle one of 64 GB holds 3 GB by itself, so memory says nothing."""
    found = parse_info_table(machine) if machine.has_npu else InfoTable()
    if not found.devices or not found.process_table:
        return
    keys = [(device.npu_id, device.chip_id) for device in found.devices]
    used = [
        any(_is_process_on_device(process.npu_id, process.chip_id, key) for process in found.processes) for key in keys
    ]
    if not any(used):
        yield make_result("busy.free")
        return
    rows = {(process.pid, process.name or "?") for process in found.processes}
    processes = ", ".join(f"{name} ({pid})" for pid, name in sorted(rows)[:4]) + (" ..." if len(rows) > 4 else "")
    free = [index for index, taken in enumerate(used) if not taken]
    if not free:
        yield make_result("busy.all", processes=processes)
        return
    cards = [key[0] for key, taken in zip(keys, used, strict=True) if taken]
    yield make_result(
        "busy.used", which=f"NPU {format_spans(cards)}", processes=processes, free=",".join(map(str, free))
    )


def _is_process_on_device(npu: int, chip: int | None, key: tuple[int, int | None]) -> bool:
    return npu == key[0] and (chip is None or key[1] is None or chip == key[1])
