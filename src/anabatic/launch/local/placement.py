"""Placement of the processes of this machine: free devices, cores near them, and environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.core import cpu_info, log
from anabatic.core.errors import DeviceError
from anabatic.core.formatting import format_size, format_spans, parse_whole
from anabatic.device.table import DEVICES
from anabatic.monitor.npu_smi.unframed_tables import Topology
from anabatic.monitor.snapshot import DeviceProcess, DeviceReading, Snapshot
from anabatic.monitor.sources import npu_smi_command, selection
from anabatic.monitor.sources.selection import DeviceSource
from anabatic.plan.detect_chip import has_torch_backend

_TORCH_NPU_BINDING = "CPU_AFFINITY_CONF"
"""torch_npu's variable for binding threads; it does not change a process that is already bound (Ascend/pytorch
docs)."""
_HCCL_PORTS = ("HCCL_IF_BASE_PORT", 60000, 32)
"""Variable, its default and the number of ports HCCL uses from there (HCCL documentation, HCCL_IF_BASE_PORT)."""


def place_workers(
    device: Mapping[str, Any], nproc: int, environ: Mapping[str, str], multi_node: bool
) -> dict[str, str]:
    """Return the environment variables of the workers, without those that the user has set, and log the choice.

    Args:
        device: the settings of the section `device`.
        multi_node: the job spans several machines.

    Raises:
        DeviceError: there are too few devices, or too few free ones.
    """
    choice = select_devices(device["type"], nproc, environ)
    variables: dict[str, str] = {}
    if choice is not None:
        if choice.summary:
            log.info(choice.summary)
        variables.update(choice.variables)
        variables.update(_collective_variables(choice, multi_node))
    is_bound = environ.get(cpu_info.CORES_VARIABLE) or not environ.get(_TORCH_NPU_BINDING, "0").startswith("0")
    bind = nproc > 1 and device["bind"] == "auto" and not is_bound
    assignment = assign_cores(nproc, _locate_devices(choice), get_allowed_cores()) if bind else None
    if assignment is not None:
        variables[cpu_info.CORES_VARIABLE] = assignment.format_variable()
        log.info(assignment.format_line())
    threads = assignment.threads_per_process if assignment is not None else max(1, len(get_allowed_cores()) // nproc)
    variables["OMP_NUM_THREADS"] = str(threads)
    return {name: value for name, value in variables.items() if not environ.get(name)}


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


def _collective_variables(choice: DeviceSelection, multi_node: bool) -> dict[str, str]:
    """Return the variables of the collectives; jobs on one machine must not share ports (EI0019)."""
    variables = dict(DEVICES[choice.kind].start_env)
    if choice.variables and choice.kind == "npu" and not multi_node:
        name, base_port, count = _HCCL_PORTS
        variables[name] = str(base_port + count * min(choice.indices))
    return variables


def _locate_devices(choice: DeviceSelection | None) -> list[DeviceLocality]:
    """Return the location of the devices, from `npu-smi info -t topo` if sysfs does not report it."""
    if choice is None:
        return []
    localities = [DeviceLocality(device.bus_id or "") for device in choice.devices]
    path = npu_smi_command.find_npu_smi() if choice.kind == "npu" else None
    if path is None or all(read_device_numa_node(locality) for locality in localities):
        return localities
    try:
        from anabatic.monitor.npu_smi import output_parser

        table = output_parser.parse_output(npu_smi_command.run_command([path, "info", "-t", "topo"])[0])
    except (OSError, TimeoutError):
        return localities  # cores are then divided without it
    affinity_by_name = table.cpu_affinity if isinstance(table, Topology) else {}
    cores_by_index = {
        int(match[0]): text for name, text in affinity_by_name.items() if (match := re.search(r"\d+$", name))
    }
    return [
        DeviceLocality(locality.pci_address, cores_by_index.get(index) or "")
        for locality, index in zip(localities, choice.indices, strict=True)
    ]


_PCI_ADDRESS = re.compile(r"(?P<domain>[0-9A-Fa-f]{4,8}):(?P<rest>[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])")

MIN_CORES_PER_PROCESS = 2
"""Fewest cores of a bound process: besides the computing thread, others read data and communicate."""


@dataclass(frozen=True)
class DeviceLocality:
    """Location of a device.

    Attributes:
        pci_address: PCI address; empty: unknown.
        cores: near cores according to the driver, in Linux's list format; empty: unknown.
    """

    pci_address: str = ""
    cores: str = ""


@dataclass(frozen=True)
class CoreAssignment:
    """Cores of the processes.

    Attributes:
        cores: cores of each local rank.
        numa_nodes: NUMA node of each local rank; -1: unknown, or several.
    """

    cores: tuple[tuple[int, ...], ...]
    numa_nodes: tuple[int, ...]

    @property
    def threads_per_process(self) -> int:
        """Return the number of compute threads of each process."""
        return max(1, min(len(cores) for cores in self.cores))

    def format_variable(self) -> str:
        """Return the value of `affinity.CORES_VARIABLE`."""
        return ";".join(format_spans(cores) for cores in self.cores)

    def format_line(self) -> str:
        """Return one log line about the assignment."""
        known = -1 not in self.numa_nodes
        descriptions = [
            f"{format_spans(cores)}{f' (NUMA node {node})' if known else ''}"
            for cores, node in zip(self.cores, self.numa_nodes, strict=True)
        ]
        return (
            f"cores of each process: {'; '.join(descriptions)}; {self.threads_per_process} "
            f"thread{'s' if self.threads_per_process > 1 else ''} each"
        )


def assign_cores(
    nproc: int, localities: Sequence[DeviceLocality], allowed_cores: Iterable[int], root: str | Path = "/"
) -> CoreAssignment | None:
    """Divide cores among the processes of a machine; None with fewer than MIN_CORES_PER_PROCESS for each.

    A process gets cores of its device's NUMA node if these are known and enough for the processes there; otherwise
    all cores are divided among all processes, each part on one node where possible. Threads of one physical core stay
    together.

    Args:
        localities: location of the device of each local rank; empty: no devices.
        allowed_cores: cores that this process may use.
        root: folder that contains `sys`.
    """
    sys = Path(root) / "sys"
    usable_cores = sorted(set(allowed_cores))
    if len(usable_cores) < MIN_CORES_PER_PROCESS * nproc:
        return None
    numa_nodes = _read_numa_nodes(sys)
    ordered_cores = sorted(usable_cores, key=lambda core: (numa_nodes.get(core, -1), _first_sibling(sys, core), core))
    local_cores = (
        [_find_local_cores(Path(root), locality, numa_nodes) for locality in localities]
        if len(localities) == nproc
        else [None] * nproc
    )
    assigned: list[tuple[int, ...]] = [()] * nproc
    for near_cores in dict.fromkeys(local_cores):
        ranks = [rank for rank, other in enumerate(local_cores) if other == near_cores]
        pool = [core for core in ordered_cores if near_cores is None or core in near_cores]
        if len(pool) < MIN_CORES_PER_PROCESS * len(ranks):
            return CoreAssignment(_split_evenly(ordered_cores, nproc), (-1,) * nproc)
        for rank, cores in zip(ranks, _split_evenly(pool, len(ranks)), strict=True):
            assigned[rank] = cores
    return CoreAssignment(tuple(assigned), tuple(_common_numa_node(cores, numa_nodes) for cores in assigned))


def _split_evenly(cores: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    bounds = [len(cores) * part // parts for part in range(parts + 1)]
    return tuple(tuple(cores[start:end]) for start, end in zip(bounds, bounds[1:], strict=False))


def _common_numa_node(cores: Sequence[int], numa_nodes: Mapping[int, int]) -> int:
    nodes = {numa_nodes.get(core, -1) for core in cores}
    return nodes.pop() if len(nodes) == 1 else -1


def _read_numa_nodes(sys: Path) -> dict[int, int]:
    """Return core -> NUMA node."""
    numa_nodes = {}
    for path in sys.glob("devices/system/node/node[0-9]*/cpulist"):
        for core in _read_core_list(path):
            numa_nodes[core] = int(path.parent.name.removeprefix("node"))
    return numa_nodes


def read_device_numa_node(locality: DeviceLocality, root: str | Path = "/") -> int | None:
    """Return the NUMA node of a device from sysfs; None if the firmware does not report it or there is no device."""
    address = _PCI_ADDRESS.fullmatch(locality.pci_address.strip())
    if address is None:
        return None
    name = f"{int(address['domain'], 16):04x}:{address['rest'].lower()}"
    node = _read_text(Path(root) / "sys" / "bus" / "pci" / "devices" / name / "numa_node").strip()
    return parse_whole(node)  # -1: not known


def _find_local_cores(root: Path, locality: DeviceLocality, numa_nodes: Mapping[int, int]) -> frozenset[int] | None:
    """Return the cores near a device; None if unknown."""
    node = read_device_numa_node(locality, root)
    if node is not None:
        return frozenset(core for core, other in numa_nodes.items() if other == node) or None
    return frozenset(_parse_core_list(locality.cores)) or None


def _first_sibling(sys: Path, core: int) -> int:
    siblings = _read_core_list(sys / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    return min(siblings, default=core)


def _read_core_list(path: Path) -> list[int]:
    return _parse_core_list(_read_text(path))


def _parse_core_list(text: str) -> list[int]:
    try:
        return cpu_info.parse_core_list(text)
    except ValueError:
        return []


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def get_allowed_cores() -> set[int]:
    """Return the cores that this process may use."""
    return set(os.sched_getaffinity(0))


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


FIXED_DEVICES_VARIABLE = "ANABATIC_DEVICES_FIXED"
"""Environment variable: the user or a scheduler has chosen the devices, so no other device may be used."""
_UNUSABLE_HEALTH = ("Alarm", "Critical")
"""Health in npu-smi of devices that are replaced when another one is free."""
_DEVICE_TABLE_ROWS = {"npu": "npu", "gpu": "cuda"}
"""Device kind of the monitor -> row of the device table."""


def has_visible_devices(environ: Mapping[str, str]) -> bool:
    """True when the environment restricts the visible devices."""
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
