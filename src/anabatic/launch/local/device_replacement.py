"""Replacement of lost devices by free ones when the workers of this machine start again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from anabatic.core.formatting import parse_whole
from anabatic.device.table import DEVICES
from anabatic.launch.local.device_selection import SourceLookup
from anabatic.monitor.snapshot import DeviceReading, Snapshot
from anabatic.monitor.sources import selection

FIXED_DEVICES_VARIABLE = "ANABATIC_DEVICES_FIXED"
"""Environment variable: the user or a scheduler has chosen the devices, so no other device may be used."""
_UNUSABLE_HEALTH = ("Alarm", "Critical")
"""Health in npu-smi of devices that are replaced when another one is free."""
_DEVICE_TABLE_ROWS = {"npu": "npu", "gpu": "cuda"}
"""Device kind of the monitor -> row of the device table."""


def has_visible_devices(environ: Mapping[str, str]) -> bool:
    """Return whether the environment restricts the visible devices."""
    return any(environ.get(DEVICES[row].visible_env or "") for row in _DEVICE_TABLE_ROWS.values())


def replace_lost_devices(
    nproc: int, environ: Mapping[str, str], find_source: Callable[[], SourceLookup] = selection.find_accelerator_source
) -> tuple[dict[str, str], str]:
    """Return the variables for the next start of the workers and a log line; both empty if no device was lost.

    Args:
        nproc: processes on this machine.
        environ: environment of the last start.
        find_source: returns the metrics source for devices.
    """
    source, _ = find_source()
    snapshot = source.read() if source is not None else Snapshot("none")
    if snapshot.error is not None or not snapshot.devices or environ.get(FIXED_DEVICES_VARIABLE):
        return {}, ""
    kind = snapshot.devices[0].kind
    variable = DEVICES[_DEVICE_TABLE_ROWS[kind]].visible_env or "" if kind in _DEVICE_TABLE_ROWS else ""
    entries = environ.get(variable, ",".join(map(str, range(nproc)))).split(",")
    numbers = [number for entry in entries if (number := parse_whole(entry)) is not None]
    if not variable or len(numbers) < len(entries):
        return {}, ""
    devices = {
        index if device.logic_id is None else device.logic_id: device for index, device in enumerate(snapshot.devices)
    }
    used = numbers[:nproc]
    lost = [
        device_id for device_id in used if device_id not in devices or devices[device_id].health in _UNUSABLE_HEALTH
    ]
    free = [
        device_id
        for device_id, device in sorted(devices.items())
        if device_id not in used and _is_available(device, snapshot)
    ]
    if not lost:
        return {}, ""
    names = ", ".join(map(str, lost))
    if len(free) < len(lost):
        return {}, f"device {names} has gone or is broken, and {len(free) or 'none'} of the others is free"
    replacements = dict(zip(lost, free, strict=False))
    # torch_npu sees no device at all unless the numbers ascend (`_device_count_ascend_hal`).
    value = ",".join(map(str, sorted(replacements.get(device_id, device_id) for device_id in used)))
    replacement_names = ", ".join(map(str, replacements.values()))
    return {variable: value}, f"device {names} has gone or is broken: {replacement_names} takes its place"


def _is_available(device: DeviceReading, snapshot: Snapshot) -> bool:
    busy = any(
        (process.npu_id, process.chip_id or 0) == (device.npu_id, device.chip_id or 0) for process in snapshot.processes
    )
    return not busy and device.health not in _UNUSABLE_HEALTH
