"""Assignment of this machine's cores to the processes of a job: near their devices, threads of a core together."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from anabatic.core import cpu_info
from anabatic.core.formatting import format_spans, parse_whole

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
        """Return the value of `cpu_info.CORES_VARIABLE`."""
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
