"""A device that has gone while a job ran is replaced by a free one when the workers start again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from anabatic.device.table import DEVICES
from anabatic.monitor.snapshot import DeviceReading, Snapshot
from anabatic.monitor.sources import selection
from anabatic.monitor.sources.selection import DeviceSource

FIXED_DEVICES_VARIABLE = "ANABATIC_DEVICES_FIXED"
"""Environment variable: the user, or a scheduler, has chosen the devices; others are not ours to take."""
_UNUSABLE_HEALTH = ("Alarm", "Critical")
"""Health, as npu-smi says it, of a device that is not used again where another one is free."""
_DEVICE_TABLE_ROWS = {"npu": "npu", "gpu": "cuda"}
"""Kind of a device as the monitor names it -> row of the device table."""

SourceLookup = tuple[DeviceSource | None, list[str]]


def has_visible_devices(environ: Mapping[str, str]) -> bool:
    """True when the environment hides devices from the job."""
    return any(environ.get(DEVICES[row].visible_env or "") for row in _DEVICE_TABLE_ROWS.values())


def replace_lost_devices(
    nproc: int, environ: Mapping[str, str], look: Callable[[], SourceLookup] = selection.find_accelerator_source
) -> tuple[dict[str, str], str]:
    """Return the variables for another start of the workers, and a line about it; nothing where no device has gone.

    Args:
        nproc: processes on this machine.
        environ: of the start before.
        look: finds the source that tells of devices.
    """
    source, _ = look()
    snapshot = source.read() if source is not None else Snapshot("none")
    if snapshot.error is not None or not snapshot.devices or environ.get(FIXED_DEVICES_VARIABLE):
        return {}, ""
    kind = snapshot.devices[0].kind
    variable = DEVICES[_DEVICE_TABLE_ROWS[kind]].visible_env or "" if kind in _DEVICE_TABLE_ROWS else ""
    words = environ.get(variable, ",".join(map(str, range(nproc)))).split(",")
    if not variable or not all(word.isdecimal() for word in words):
        return {}, ""
    here = {index if one.logic_id is None else one.logic_id: one for index, one in enumerate(snapshot.devices)}
    used = [int(word) for word in words[:nproc]]
    gone = [number for number in used if number not in here or here[number].health in _UNUSABLE_HEALTH]
    free = [number for number, one in sorted(here.items()) if number not in used and _is_available(one, snapshot)]
    if not gone:
        return {}, ""
    names = ", ".join(map(str, gone))
    if len(free) < len(gone):
        return {}, f"device {names} has gone or is broken, and {len(free) or 'none'} of the others is free"
    taken = dict(zip(gone, free, strict=False))
    # torch_npu sees no device at all unless the numbers ascend (`_device_count_ascend_hal`).
    value = ",".join(map(str, sorted(taken.get(number, number) for number in used)))
    others = ", ".join(map(str, taken.values()))
    return {variable: value}, f"device {names} has gone or is broken: {others} takes its place"


def _is_available(device: DeviceReading, snapshot: Snapshot) -> bool:
    busy = any((one.npu_id, one.chip_id or 0) == (device.npu_id, device.chip_id or 0) for one in snapshot.processes)
    return not busy and device.health not in _UNUSABLE_HEALTH
