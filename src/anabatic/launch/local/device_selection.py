"""Selection of free devices for the processes of a job on this machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anabatic.core import log
from anabatic.core.errors import DeviceError
from anabatic.core.formatting import format_size, format_spans, parse_whole
from anabatic.device.table import DEVICES
from anabatic.monitor.snapshot import DeviceProcess, DeviceReading, Snapshot
from anabatic.monitor.sources import selection
from anabatic.monitor.sources.selection import DeviceSource
from anabatic.plan.detect_chip import has_torch_backend

MAX_IDLE_MEMORY_FRACTION = 0.15
"""Fraction of memory in use up to which a device counts as free: an idle 910B uses 3 of 64 GiB, a 310P 1.8 of 21
(tables of `npu-smi info`); a container sees the memory of others' processes, but not the processes."""
_USABLE_HEALTH = (None, "OK", "Warning", "UNKNOWN")
_RING_CHIPS = ("910A", "910B", "910ProA", "910ProB", "910PremiumA")
"""First generation by its names in npu-smi: devices 0-3 and 4-7 form two rings, and up to four processes must share one
(MindCluster, "NPU affinity scheduling")."""
_RING_SIZE = 4

SourceLookup = tuple[DeviceSource | None, list[str]]


@dataclass(frozen=True)
class DeviceSelection:
    """The devices of a job's processes.

    Attributes:
        kind: a row of the device table.
        devices: device of each local rank; fewer if the user's choice is not understood.
        indices: their indices in a process that sees all devices.
        variables: environment variables that hide the other devices.
        summary: log line about the choice; empty: there was no choice.
    """

    kind: str
    devices: tuple[DeviceReading, ...]
    indices: tuple[int, ...]
    variables: Mapping[str, str]
    summary: str = ""


def select_devices(
    device_type: str,
    nproc: int,
    environ: Mapping[str, str],
    find_source: Callable[[], SourceLookup] = selection.find_accelerator_source,
    reserved: Collection[int] | None = None,
) -> DeviceSelection | None:
    """Select devices for `nproc` processes; None if there are none or the job runs on another device type.

    Args:
        device_type: the setting device.type.
        environ: environment, with the user's own choice.
        find_source: returns the metrics source for devices.
        reserved: for a queue of several jobs: devices of other jobs, which are not selected; the user's own choice is
            then what all jobs share. None: a single job, which takes all of the user's choice.

    Raises:
        DeviceError: there are too few devices, or too few free ones.
    """
    kinds = {"auto": ("npu", "cuda"), "npu": ("npu",), "cuda": ("cuda",)}.get(device_type, ())
    usable = [kind for kind in kinds if has_torch_backend(kind)]
    source = find_source()[0] if usable else None
    if source is None:
        return None
    snapshot = source.read()
    if snapshot.error is not None:
        log.warn(f"which devices are free is not known, they are taken in their order: {snapshot.error}")
    kind = "npu" if snapshot.devices and snapshot.devices[0].kind == "npu" else "cuda"
    if not snapshot.devices or kind not in usable:
        return None
    devices = _index_devices(snapshot.devices)
    visible = environ.get(DEVICES[kind].visible_env)
    if visible is not None:
        indices = _parse_visible_devices(visible, devices)
        if reserved is None:
            return DeviceSelection(kind, tuple(devices[index] for index in indices), indices, {})
        devices = {index: devices[index] for index in indices}
    return _select_available_devices(kind, nproc, devices, snapshot, reserved or ())


def place_single_process(device: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for training in one process: it uses a free device, or shares the first with a warning."""
    try:
        choice = select_devices(device["type"], 1, environ)
    except DeviceError as error:
        log.warn(f"{error}: the first one is shared")
        return {}
    if choice is None or not choice.summary:
        return {}
    log.info(choice.summary)
    return dict(choice.variables)


def _select_available_devices(
    kind: str,
    nproc: int,
    devices_by_index: Mapping[int, DeviceReading],
    snapshot: Snapshot,
    reserved: Collection[int],
) -> DeviceSelection:
    label, variable = "NPU" if kind == "npu" else "GPU", DEVICES[kind].visible_env
    if nproc > len(devices_by_index):
        raise DeviceError(
            f"{nproc} processes need as many {label}s, and there are {len(devices_by_index)}",
            f"lower --nproc to at most {len(devices_by_index)}, or train on the processor by --device.type cpu",
        )
    unavailable = {
        index: reason
        for index, device in devices_by_index.items()
        if (reason := "another job of the queue" if index in reserved else _explain_unavailable(device, snapshot))
    }
    free = [index for index in devices_by_index if index not in unavailable]
    chosen = _pick_least_used(devices_by_index, free, nproc)
    if len(chosen) < nproc:
        request = f"{nproc} {label}{'s are' if nproc > 1 else ' is'} wanted"
        request += " in one ring of four" if len(free) >= nproc else ""
        reasons = "; ".join(f"{index}: {reason}" for index, reason in list(unavailable.items())[:8])
        raise DeviceError(
            f"{request}, {len(free)} of {len(devices_by_index)} are free ({reasons})",
            f"wait, lower --nproc, or name devices that you will share by {variable}; `anabatic monitor` shows them",
        )
    devices = tuple(devices_by_index[index] for index in chosen)
    if chosen == list(range(len(devices_by_index))):
        return DeviceSelection(kind, devices, tuple(chosen), {})
    remark = f"; {format_spans(unavailable)} {'is' if len(unavailable) == 1 else 'are'} in use" if unavailable else ""
    summary = f"{label} {format_spans(chosen)} of {len(devices_by_index)}: nothing runs there{remark}"
    return DeviceSelection(
        kind, devices, tuple(chosen), {variable: _format_visible_devices(kind, devices, chosen)}, summary
    )


def _index_devices(devices: Sequence[DeviceReading]) -> dict[int, DeviceReading]:
    """Return the devices by their index in a process that sees all; a lost device leaves a gap."""
    known = [device.logic_id for device in devices if device.logic_id is not None]
    if len(set(known)) < len(devices):
        return dict(enumerate(devices))
    return dict(sorted(zip(known, devices, strict=True), key=lambda pair: pair[0]))


def _parse_visible_devices(text: str, devices: Mapping[int, DeviceReading]) -> tuple[int, ...]:
    entries = [entry.strip() for entry in text.split(",")]
    numbers = [number for entry in entries if (number := parse_whole(entry)) in devices and number is not None]
    if len(numbers) == len(entries):
        return tuple(numbers)
    return tuple(index for entry in entries for index, device in devices.items() if device.uuid == entry)


def _explain_unavailable(device: DeviceReading, snapshot: Snapshot) -> str:
    """Return why a device is unavailable; empty when it is free."""
    if device.health not in _USABLE_HEALTH:
        return f"its health is {device.health}"
    running = [process for process in snapshot.processes if _is_process_on_device(process, device)]
    if running:
        more = f" and {len(running) - 1} more" if len(running) > 1 else ""
        return f"{_describe_process(running[0])}{more}"
    used, total = device.used_mb, device.total_mb
    if used is not None and total and used > MAX_IDLE_MEMORY_FRACTION * total:
        return f"{used / 1024:.1f} of {total / 1024:.0f} GiB by a process that is not shown here"
    return ""


def _is_process_on_device(process: DeviceProcess, device: DeviceReading) -> bool:
    same_chip = process.chip_id is None or device.chip_id is None or process.chip_id == device.chip_id
    return process.npu_id == device.npu_id and same_chip


def _describe_process(process: DeviceProcess) -> str:
    user = f", {process.user}" if process.user else ""
    memory = f" with {format_size(process.mem_mb << 20)}" if process.mem_mb else ""
    return f"{process.name or 'process'} ({process.pid}{user}){memory}"


def _pick_least_used(devices: Mapping[int, DeviceReading], free: Sequence[int], nproc: int) -> list[int]:
    """Return the least used free devices, in ascending order; fewer if there are not enough."""
    pools = [list(free)]
    first = next(iter(devices.values()))
    if nproc <= _RING_SIZE and first.kind == "npu" and (first.name or "").removeprefix("Ascend") in _RING_CHIPS:
        rings = [
            [index for index in free if index // _RING_SIZE == ring] for ring in range(max(devices) // _RING_SIZE + 1)
        ]
        pools = sorted((ring for ring in rings if len(ring) >= nproc), key=len) or [[]]  # the other ring stays free
    ordered = sorted(pools[0], key=lambda index: (devices[index].used_mb or 0, index))
    return sorted(ordered[:nproc])


def _format_visible_devices(kind: str, devices: Sequence[DeviceReading], chosen: Sequence[int]) -> str:
    """Name GPUs by their UUIDs: without CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA orders them differently from the tools."""
    if kind == "cuda" and all(device.uuid for device in devices):
        return ",".join(str(device.uuid) for device in devices)
    return ",".join(map(str, chosen))
