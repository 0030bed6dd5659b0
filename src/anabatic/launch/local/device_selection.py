"""Which devices of this machine a job takes: the free ones, by what the driver's tools say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from anabatic.core import log
from anabatic.core.errors import DeviceError
from anabatic.core.formatting import format_size, format_spans
from anabatic.device.table import DEVICES
from anabatic.monitor.snapshot import DeviceProcess, DeviceReading, Snapshot
from anabatic.monitor.sources import selection
from anabatic.monitor.sources.selection import DeviceSource
from anabatic.plan.detect_chip import has_torch_backend

MAX_IDLE_MEMORY_FRACTION = 0.15
"""Of a device's memory that may be in use while it counts as free: an idle 910B holds 3 of 64 GiB, a 310P 1.8 of 21
(tables of `npu-smi info`); a container does not see the processes of others, but their memory."""
_USABLE_HEALTH = (None, "OK", "Warning", "UNKNOWN")
_RING_CHIPS = ("910A", "910B", "910ProA", "910ProB", "910PremiumA")
"""First generation as npu-smi names it: devices 0-3 and 4-7 are two rings, and up to four processes must be in one
(MindCluster, "NPU affinity scheduling")."""
_RING_SIZE = 4

SourceLookup = tuple[DeviceSource | None, list[str]]


@dataclass(frozen=True)
class DeviceSelection:
    """The devices of a job's processes.

    Attributes:
        kind: a row of the device table.
        devices: of each local rank; fewer where the user's own choice is not understood.
        indices: their numbers in a process that sees all.
        variables: what hides the others.
        summary: what was chosen and why; empty: nothing was to choose.
    """

    kind: str
    devices: tuple[DeviceReading, ...]
    indices: tuple[int, ...]
    variables: Mapping[str, str]
    summary: str = ""


def select_devices(
    wanted: str,
    nproc: int,
    environ: Mapping[str, str],
    look: Callable[[], SourceLookup] = selection.find_accelerator_source,
) -> DeviceSelection | None:
    """Choose devices for as many processes; None where there are none, or another device is trained on.

    Args:
        wanted: the setting device.type.
        environ: where the user's own choice stands.
        look: finds the source that tells of devices.

    Raises:
        DeviceError: there are not as many, or not as many free ones.
    """
    kinds = {"auto": ("npu", "cuda"), "npu": ("npu",), "cuda": ("cuda",)}.get(wanted, ())
    usable = [kind for kind in kinds if has_torch_backend(kind)]
    source = look()[0] if usable else None
    if source is None:
        return None
    snapshot = source.read()
    if snapshot.error is not None:
        log.warn(f"which devices are free is not known, they are taken in their order: {snapshot.error}")
    kind = "npu" if snapshot.devices and snapshot.devices[0].kind == "npu" else "cuda"
    if not snapshot.devices or kind not in usable:
        return None
    here = _index_devices(snapshot.devices)
    own = environ.get(DEVICES[kind].visible_env)
    if own is not None:
        named = _parse_visible_devices(own, here)
        return DeviceSelection(kind, tuple(here[index] for index in named), named, {})
    return _select_available_devices(kind, nproc, here, snapshot)


def _select_available_devices(
    kind: str, nproc: int, here: Mapping[int, DeviceReading], snapshot: Snapshot
) -> DeviceSelection:
    word, variable = "NPU" if kind == "npu" else "GPU", DEVICES[kind].visible_env
    if nproc > len(here):
        raise DeviceError(
            f"{nproc} processes need as many {word}s, and there are {len(here)}",
            f"lower --nproc to at most {len(here)}, or train on the processor by --device.type cpu",
        )
    taken = {index: why for index, device in here.items() if (why := _explain_unavailable(device, snapshot))}
    free = [index for index in here if index not in taken]
    chosen = _pick_least_used(here, free, nproc)
    if len(chosen) < nproc:
        wanted = f"{nproc} {word}{'s are' if nproc > 1 else ' is'} wanted"
        wanted += " in one ring of four" if len(free) >= nproc else ""
        told = "; ".join(f"{index}: {why}" for index, why in list(taken.items())[:8])
        raise DeviceError(
            f"{wanted}, {len(free)} of {len(here)} are free ({told})",
            f"wait, lower --nproc, or name devices that you will share by {variable}; `anabatic monitor` shows them",
        )
    devices = tuple(here[index] for index in chosen)
    if chosen == list(range(len(here))):
        return DeviceSelection(kind, devices, tuple(chosen), {})
    rest = f"; {format_spans(taken)} {'is' if len(taken) == 1 else 'are'} in use" if taken else ""
    line = f"{word} {format_spans(chosen)} of {len(here)}: nothing runs there{rest}"
    return DeviceSelection(
        kind, devices, tuple(chosen), {variable: _format_visible_devices(kind, devices, chosen)}, line
    )


def _index_devices(devices: Sequence[DeviceReading]) -> dict[int, DeviceReading]:
    """Return the devices by their numbers in a process that sees all; one that is lost leaves a gap."""
    known = [device.logic_id for device in devices if device.logic_id is not None]
    if len(set(known)) < len(devices):
        return dict(enumerate(devices))
    return dict(sorted(zip(known, devices, strict=True), key=lambda pair: pair[0]))


def _parse_visible_devices(text: str, here: Mapping[int, DeviceReading]) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if all(word.isdecimal() and int(word) in here for word in words):
        return tuple(int(word) for word in words)
    return tuple(index for word in words for index, device in here.items() if device.uuid == word)


def _explain_unavailable(device: DeviceReading, snapshot: Snapshot) -> str:
    """Return what stands against a device; empty when it is free."""
    if device.health not in _USABLE_HEALTH:
        return f"its health is {device.health}"
    running = [one for one in snapshot.processes if _is_process_on_device(one, device)]
    if running:
        more = f" and {len(running) - 1} more" if len(running) > 1 else ""
        return f"{_describe_process(running[0])}{more}"
    used, total = device.used_mb, device.total_mb
    if used is not None and total and used > MAX_IDLE_MEMORY_FRACTION * total:
        return f"{used / 1024:.1f} of {total / 1024:.0f} GiB by a process that is not shown here"
    return ""


def _is_process_on_device(process: DeviceProcess, device: DeviceReading) -> bool:
    same = process.chip_id is None or device.chip_id is None or process.chip_id == device.chip_id
    return process.npu_id == device.npu_id and same


def _describe_process(process: DeviceProcess) -> str:
    user = f", {process.user}" if process.user else ""
    memory = f" with {format_size(process.mem_mb << 20)}" if process.mem_mb else ""
    return f"{process.name or 'process'} ({process.pid}{user}){memory}"


def _pick_least_used(here: Mapping[int, DeviceReading], free: Sequence[int], nproc: int) -> list[int]:
    """Return the least used of the free ones, in ascending order; fewer when there are not enough."""
    pools = [list(free)]
    first = next(iter(here.values()))
    if nproc <= _RING_SIZE and first.kind == "npu" and (first.name or "").removeprefix("Ascend") in _RING_CHIPS:
        rings = [
            [index for index in free if index // _RING_SIZE == ring] for ring in range(max(here) // _RING_SIZE + 1)
        ]
        pools = sorted((ring for ring in rings if len(ring) >= nproc), key=len) or [[]]  # the other stays whole
    ordered = sorted(pools[0], key=lambda index: (here[index].used_mb or 0, index))
    return sorted(ordered[:nproc])


def _format_visible_devices(kind: str, devices: Sequence[DeviceReading], chosen: Sequence[int]) -> str:
    """GPUs by their UUIDs: without CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA counts them in another order than the tools."""
    if kind == "cuda" and all(device.uuid for device in devices):
        return ",".join(str(device.uuid) for device in devices)
    return ",".join(map(str, chosen))
