"""Which devices of this machine a job takes: the free ones, by what the driver's tools say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from anabatic.core import log
from anabatic.core.errors import DeviceError
from anabatic.core.text import size, spans
from anabatic.device.table import DEVICES
from anabatic.monitor import sources
from anabatic.monitor.snapshot import Device, Process, Snapshot
from anabatic.monitor.sources import Source
from anabatic.plan.here import torch_has

IDLE_SHARE = 0.15
"""Of a device's memory that may be in use while it counts as free: an idle 910B holds 3 of 64 GiB, a 310P 1.8 of 21
(tables of `npu-smi info`); a container does not see the processes of others, but their memory."""
_FIT = (None, "OK", "Warning", "UNKNOWN")
_RINGS = ("910A", "910B", "910ProA", "910ProB", "910PremiumA")
"""First generation as npu-smi names it: devices 0-3 and 4-7 are two rings, and up to four processes must be in one
(MindCluster, "NPU affinity scheduling")."""
_RING = 4

Found = tuple[Source | None, list[str]]


@dataclass(frozen=True)
class Choice:
    """The devices of a job's processes.

    Attributes:
        kind: a row of the device table.
        devices: of each local rank; fewer where the user's own choice is not understood.
        indices: their numbers in a process that sees all.
        variables: what hides the others.
        line: what was chosen and why; empty: nothing was to choose.
    """

    kind: str
    devices: tuple[Device, ...]
    indices: tuple[int, ...]
    variables: Mapping[str, str]
    line: str = ""


def choose(
    wanted: str, nproc: int, environ: Mapping[str, str], look: Callable[[], Found] = sources.accelerators
) -> Choice | None:
    """Choose devices for as many processes; None where there are none, or another device is trained on.

    Args:
        wanted: the setting device.type.
        environ: where the user's own choice stands.
        look: finds the source that tells of devices.

    Raises:
        DeviceError: there are not as many, or not as many free ones.
    """
    kinds = {"auto": ("npu", "cuda"), "npu": ("npu",), "cuda": ("cuda",)}.get(wanted, ())
    usable = [kind for kind in kinds if torch_has(kind)]
    source = look()[0] if usable else None
    if source is None:
        return None
    snapshot = source.read()
    if snapshot.error is not None:
        log.warn(f"which devices are free is not known, they are taken in their order: {snapshot.error}")
    kind = "npu" if snapshot.devices and snapshot.devices[0].kind == "npu" else "cuda"
    if not snapshot.devices or kind not in usable:
        return None
    here = _numbered(snapshot.devices)
    own = environ.get(DEVICES[kind].visible_env)
    if own is not None:
        named = _named(own, here)
        return Choice(kind, tuple(here[index] for index in named), named, {})
    return _take(kind, nproc, here, snapshot)


def _take(kind: str, nproc: int, here: Mapping[int, Device], snapshot: Snapshot) -> Choice:
    word, variable = "NPU" if kind == "npu" else "GPU", DEVICES[kind].visible_env
    if nproc > len(here):
        raise DeviceError(
            f"{nproc} processes need as many {word}s, and there are {len(here)}",
            f"lower --nproc to at most {len(here)}, or train on the processor by --device.type cpu",
        )
    taken = {index: why for index, device in here.items() if (why := _taken(device, snapshot))}
    free = [index for index in here if index not in taken]
    chosen = _pick(here, free, nproc)
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
        return Choice(kind, devices, tuple(chosen), {})
    rest = f"; {spans(taken)} {'is' if len(taken) == 1 else 'are'} in use" if taken else ""
    line = f"{word} {spans(chosen)} of {len(here)}: nothing runs there{rest}"
    return Choice(kind, devices, tuple(chosen), {variable: _value(kind, devices, chosen)}, line)


def _numbered(devices: Sequence[Device]) -> dict[int, Device]:
    """Return the devices by their numbers in a process that sees all; one that is lost leaves a gap."""
    known = [device.logic_id for device in devices if device.logic_id is not None]
    if len(set(known)) < len(devices):
        return dict(enumerate(devices))
    return dict(sorted(zip(known, devices, strict=True), key=lambda pair: pair[0]))


def _named(text: str, here: Mapping[int, Device]) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if all(word.isdecimal() and int(word) in here for word in words):
        return tuple(int(word) for word in words)
    return tuple(index for word in words for index, device in here.items() if device.uuid == word)


def _taken(device: Device, snapshot: Snapshot) -> str:
    """Return what stands against a device; empty when it is free."""
    if device.health not in _FIT:
        return f"its health is {device.health}"
    running = [one for one in snapshot.processes if _on(one, device)]
    if running:
        more = f" and {len(running) - 1} more" if len(running) > 1 else ""
        return f"{_shown(running[0])}{more}"
    used, total = device.used_mb, device.total_mb
    if used is not None and total and used > IDLE_SHARE * total:
        return f"{used / 1024:.1f} of {total / 1024:.0f} GiB by a process that is not shown here"
    return ""


def _on(process: Process, device: Device) -> bool:
    same = process.chip_id is None or device.chip_id is None or process.chip_id == device.chip_id
    return process.npu_id == device.npu_id and same


def _shown(process: Process) -> str:
    user = f", {process.user}" if process.user else ""
    memory = f" with {size(process.mem_mb << 20)}" if process.mem_mb else ""
    return f"{process.name or 'process'} ({process.pid}{user}){memory}"


def _pick(here: Mapping[int, Device], free: Sequence[int], nproc: int) -> list[int]:
    """Return the least used of the free ones, in ascending order; fewer when there are not enough."""
    pools = [list(free)]
    first = next(iter(here.values()))
    if nproc <= _RING and first.kind == "npu" and (first.name or "").removeprefix("Ascend") in _RINGS:
        rings = [[index for index in free if index // _RING == ring] for ring in range(max(here) // _RING + 1)]
        pools = sorted((ring for ring in rings if len(ring) >= nproc), key=len) or [[]]  # the other stays whole
    ordered = sorted(pools[0], key=lambda index: (here[index].used_mb or 0, index))
    return sorted(ordered[:nproc])


def _value(kind: str, devices: Sequence[Device], chosen: Sequence[int]) -> str:
    """GPUs by their UUIDs: without CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA counts them in another order than the tools."""
    if kind == "cuda" and all(device.uuid for device in devices):
        return ",".join(str(device.uuid) for device in devices)
    return ",".join(map(str, chosen))
