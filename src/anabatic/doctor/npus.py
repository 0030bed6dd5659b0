"""Checks of what npu-smi says: whether it works, health, temperature, other people's processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from anabatic.core.text import spans
from anabatic.doctor import chips
from anabatic.doctor.hardware import HOT, flags
from anabatic.doctor.line import Line
from anabatic.doctor.machine import Machine
from anabatic.doctor.verdicts import say
from anabatic.monitor import npu_smi
from anabatic.monitor.smi_pairs import Pairs
from anabatic.monitor.smi_table import Device, InfoTable

_GOOD, _WATCHED = "OK", "Warning"
"""Health as npu-smi prints it; everything else is worse (Alarm, Critical, UNKNOWN)."""
_SILENT = (None, "", "NA", "-")
_OCCUPIED, _NO_DRIVER = ("-8020", "-8013"), "-8005"
"""Codes of dcmi: the chips belong to another container; it cannot start."""


def table(machine: Machine) -> InfoTable:
    """Return the table of `npu-smi info`; empty when there is none."""
    if "smi" not in machine.notes:
        machine.notes["smi"] = npu_smi.info(str(machine.fact("npu-smi", dict).get("text", "")))
    found: InfoTable = machine.notes["smi"]
    return found


def note(machine: Machine) -> None:
    """Note what other checks use: driver, how many devices, the chip's name."""
    if not machine.has_npu:
        return
    found = table(machine)
    if found.driver_version:
        machine.notes["driver"] = found.driver_version
    if found.devices:
        machine.notes["count"] = len(found.devices)
        machine.notes["name"] = chips.soc(found.devices[0].name or "")


def smi(machine: Machine) -> Iterator[Line]:
    """Whether npu-smi answers, and with how many devices."""
    if not machine.has_npu:
        return
    told, found = machine.fact("npu-smi", dict), table(machine)
    text = " ".join(str(told.get("text", "")).split())
    if not told and machine.npu_smi:
        if not machine.files.live:
            yield say("npu-smi.unasked", path=machine.npu_smi)
        else:
            runs = os.access(machine.npu_smi, os.X_OK)
            yield say("npu-smi.hung") if runs else say("npu-smi.denied", path=machine.npu_smi)
    elif not told:
        yield say("npu-smi.missing")
    elif told.get("code", 0) is None:
        yield say("npu-smi.hung")
    elif found.devices:
        version = found.tool_version or found.driver_version or "?"
        yield say("npu-smi.ok", version=version, count=len(found.devices))
        if len(found.devices) < len(machine.nodes):
            yield say("npu-smi.fewer", count=len(found.devices), nodes=len(machine.nodes))
    else:
        yield _refused(machine, text)


def _refused(machine: Machine, text: str) -> Line:
    code = next(iter(re.findall(r"ret is (-\d{1,6})", text)), "")
    if code in _OCCUPIED:
        return say("npu-smi.occupied", code=code)
    if code or "drvRet" in text or "no NPU" in text:
        return say("npu-smi.no_driver", code=code or text[:100], flags=flags(machine))
    if "cannot open shared object" in text or re.search(r"lib\w+\.so", text):
        return say("npu-smi.no_library", text=text[:200])
    return say("npu-smi.odd", text=text[:100] or '""')


def ecc(machine: Machine) -> Iterator[Line]:
    """Memory errors that ECC could not correct (`npu-smi info -t ecc`)."""
    if not machine.has_npu:
        return
    told = {str(card): str(text) for card, text in machine.fact("ecc", dict).items()}
    bad, read = [], 0
    for card, text in told.items():
        parsed = npu_smi.parse(text)
        if isinstance(parsed, Pairs) and parsed.npu_id is not None and str(parsed.npu_id) != card:
            bad.append(say("ecc.other", card=card, other=parsed.npu_id))
            continue
        blocks = parsed.blocks if isinstance(parsed, Pairs) else []
        counts = {key: value for block in blocks for key, value in block.values.items() if _DOUBLE.search(key)}
        read += bool(counts)
        if errors := sum(int(value) for value in counts.values() if value.isdecimal() and len(value) < 12):
            bad.append(say("ecc.bad", which=f"NPU {card}", errors=errors, card=card))
    yield from bad
    if read and not bad:
        yield say("ecc.ok", count=read)


_DOUBLE = re.compile(r"^(DDR|HBM) Double Bit Error Count$")


def _names(devices: list[Device]) -> str:
    """`NPU 0-3`; of a single die also which."""
    die = f" die {devices[0].chip_id}" if len(devices) == 1 and devices[0].chip_id else ""
    return f"NPU {spans([device.npu_id for device in devices])}{die}"


def health(machine: Machine) -> Iterator[Line]:
    """Health and temperature of every chip."""
    devices = table(machine).devices if machine.has_npu else []
    if not devices:
        return
    told = [(device, device.health if device.health not in _SILENT else None) for device in devices]
    for bad in dict.fromkeys(state for _, state in told if state and state != _GOOD):
        those = [device for device, state in told if state == bad]
        identity = "health.warning" if bad == _WATCHED else "health.bad"
        yield say(identity, which=_names(those), card=those[0].npu_id, health=bad)
    if hot := [device for device in devices if device.temp_c is not None and device.temp_c >= HOT]:
        yield say("temperature.hot", which=_names(hot), celsius=max(device.temp_c or 0 for device in hot))
    if all(state is None for _, state in told):
        yield say("health.unknown")
    elif all(state == _GOOD for _, state in told):
        warm = [device.temp_c for device in devices if device.temp_c is not None]
        span = "-".join(str(one) for one in sorted({min(warm), max(warm)})) if warm else "?"
        yield say("health.ok", count=len(devices), celsius=f"{span} C")


def busy(machine: Machine) -> Iterator[Line]:
    """Processes on the NPUs: an idle one of 64 GB holds 3 GB by itself, so memory says nothing."""
    found = table(machine) if machine.has_npu else InfoTable()
    if not found.devices or not found.process_table:
        return
    keys = [(device.npu_id, device.chip_id) for device in found.devices]
    used = [any(_on(process.npu_id, process.chip_id, key) for process in found.processes) for key in keys]
    if not any(used):
        yield say("busy.free")
        return
    rows = {(process.pid, process.name or "?") for process in found.processes}
    processes = ", ".join(f"{name} ({pid})" for pid, name in sorted(rows)[:4]) + (" ..." if len(rows) > 4 else "")
    free = [index for index, taken in enumerate(used) if not taken]
    if not free:
        yield say("busy.all", processes=processes)
        return
    cards = [key[0] for key, taken in zip(keys, used, strict=True) if taken]
    yield say("busy.used", which=f"NPU {spans(cards)}", processes=processes, free=",".join(map(str, free)))


def _on(npu: int, chip: int | None, key: tuple[int, int | None]) -> bool:
    return npu == key[0] and (chip is None or key[1] is None or chip == key[1])
