"""Which cores each process of this machine runs on: those beside its device, divided among the processes there.

Sources: Linux Documentation/ABI/testing/sysfs-bus-pci (numa_node), Documentation/ABI/stable/sysfs-devices-node
(cpulist), Documentation/admin-guide/cputopology.rst (thread_siblings_list); `npu-smi info -t topo` names cores where
sysfs does not, in virtual machines for one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from anabatic.core import affinity
from anabatic.core.formatting import format_spans

_PCI_ADDRESS = re.compile(r"(?P<domain>[0-9A-Fa-f]{4,8}):(?P<rest>[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])")

MIN_CORES_PER_PROCESS = 2
"""Cores of a process that is bound: besides the one that computes, threads read data and talk to other processes."""


@dataclass(frozen=True)
class DeviceLocality:
    """Where a device is.

    Attributes:
        pci_address: its PCI address; empty: unknown.
        cores: those that the driver names as near, as Linux writes them; empty: it does not say.
    """

    pci_address: str = ""
    cores: str = ""


@dataclass(frozen=True)
class CoreAssignment:
    """What the processes get.

    Attributes:
        cores: of each local rank.
        numa_nodes: NUMA node of each; -1: unknown, or several.
    """

    cores: tuple[tuple[int, ...], ...]
    numa_nodes: tuple[int, ...]

    @property
    def threads_per_process(self) -> int:
        """Threads for compute of each process."""
        return max(1, min(len(share) for share in self.cores))

    def format_variable(self) -> str:
        """The value of `affinity.CORES_VARIABLE`."""
        return ";".join(format_spans(share) for share in self.cores)

    def format_line(self) -> str:
        """One line about it."""
        known = -1 not in self.numa_nodes
        told = [
            f"{format_spans(share)}{f' (NUMA node {node})' if known else ''}"
            for share, node in zip(self.cores, self.numa_nodes, strict=True)
        ]
        return (
            f"cores of each process: {'; '.join(told)}; {self.threads_per_process} "
            f"thread{'s' if self.threads_per_process > 1 else ''} each"
        )


def assign_cores(
    nproc: int, near: Sequence[DeviceLocality], allowed: Iterable[int], root: str | Path = "/"
) -> CoreAssignment | None:
    """Divide cores among the processes of a machine; None where there are fewer than LEAST for each.

    A process gets cores of its device's NUMA node where these are known and are enough for the processes there;
    otherwise all processes get parts of all cores, cut so that a part lies on one node where that is possible. Threads
    of one physical core stay together.

    Args:
        near: where the device of each local rank is; empty: there are none.
        allowed: cores that this process may use.
        root: folder in which `sys` lies.
    """
    sys = Path(root) / "sys"
    usable = sorted(set(allowed))
    if len(usable) < MIN_CORES_PER_PROCESS * nproc:
        return None
    node_of = _read_numa_nodes(sys)
    order = sorted(usable, key=lambda core: (node_of.get(core, -1), _first_sibling(sys, core), core))
    homes = [_find_local_cores(Path(root), one, node_of) for one in near] if len(near) == nproc else [None] * nproc
    cut: list[tuple[int, ...]] = [()] * nproc
    for home in dict.fromkeys(homes):
        ranks = [rank for rank, other in enumerate(homes) if other == home]
        pool = [core for core in order if home is None or core in home]
        if len(pool) < MIN_CORES_PER_PROCESS * len(ranks):
            return CoreAssignment(_split_evenly(order, nproc), (-1,) * nproc)
        for rank, part in zip(ranks, _split_evenly(pool, len(ranks)), strict=True):
            cut[rank] = part
    return CoreAssignment(tuple(cut), tuple(_common_numa_node(part, node_of) for part in cut))


def _split_evenly(cores: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    ends = [len(cores) * part // parts for part in range(parts + 1)]
    return tuple(tuple(cores[start:end]) for start, end in zip(ends, ends[1:], strict=False))


def _common_numa_node(part: Sequence[int], node_of: Mapping[int, int]) -> int:
    found = {node_of.get(core, -1) for core in part}
    return found.pop() if len(found) == 1 else -1


def _read_numa_nodes(sys: Path) -> dict[int, int]:
    """Core -> NUMA node."""
    found = {}
    for path in sys.glob("devices/system/node/node[0-9]*/cpulist"):
        for core in _read_core_list(path):
            found[core] = int(path.parent.name.removeprefix("node"))
    return found


def read_device_numa_node(near: DeviceLocality, root: str | Path = "/") -> int | None:
    """Return the NUMA node of a device as the bus has it; None where the firmware does not say, or it is not there."""
    bus = _PCI_ADDRESS.fullmatch(near.pci_address.strip())
    if bus is None:
        return None
    name = f"{int(bus['domain'], 16):04x}:{bus['rest'].lower()}"
    node = _read_text(Path(root) / "sys" / "bus" / "pci" / "devices" / name / "numa_node").strip()
    return int(node) if node.isdecimal() else None  # -1: not known


def _find_local_cores(root: Path, near: DeviceLocality, node_of: Mapping[int, int]) -> frozenset[int] | None:
    """The cores beside a device; None where nobody knows."""
    node = read_device_numa_node(near, root)
    if node is not None:
        return frozenset(core for core, other in node_of.items() if other == node) or None
    return frozenset(_parse_core_list(near.cores)) or None


def _first_sibling(sys: Path, core: int) -> int:
    siblings = _read_core_list(sys / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    return min(siblings, default=core)


def _read_core_list(path: Path) -> list[int]:
    return _parse_core_list(_read_text(path))


def _parse_core_list(text: str) -> list[int]:
    try:
        return affinity.parse_core_list(text)
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
