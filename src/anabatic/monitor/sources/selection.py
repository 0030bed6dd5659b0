"""Which source is read on this machine: DCMI, npu-smi, NVML, the processor, in this order."""

from __future__ import annotations

import glob
from collections.abc import Callable
from typing import Protocol

from anabatic.monitor.snapshot import Snapshot
from anabatic.monitor.sources import dcmi, host, npu_smi_command, nvml


class DeviceSource(Protocol):
    """Something that can be read again and again."""

    def read(self) -> Snapshot:
        """Return the devices now; a failure is in the snapshot's `error`."""
        ...


_SOURCE_OPENERS: tuple[Callable[[], DeviceSource | str | None], ...] = (
    dcmi.open_source,
    npu_smi_command.open_source,
    nvml.open_source,
)


def find_accelerator_source() -> tuple[DeviceSource | None, list[str]]:
    """Return the first source of accelerators that works here, and why those before it do not."""
    notes: list[str] = []
    for opened in _SOURCE_OPENERS:
        source = opened()
        if isinstance(source, str):
            notes.append(source)
        elif source is not None:
            return source, notes
    nodes = sorted(glob.glob("/dev/davinci[0-9]*"))
    if nodes and not notes:
        notes.append(
            f"{len(nodes)} NPU device nodes are here, but no npu-smi: mount /usr/local/bin/npu-smi and"
            " /usr/local/Ascend/driver into the container"
        )
    return None, notes


class MachineSource:
    """All devices of this machine, from one source that is chosen at the first reading."""

    def __init__(self, processor: bool = True) -> None:
        self._processor = processor
        self._source: DeviceSource | None = None
        self._notes: list[str] = []
        self._process_owners = host.ProcessOwners()
        self._is_chosen = False

    def is_available(self) -> bool:
        """True when there is something to read."""
        if not self._is_chosen:
            self._source, self._notes = find_accelerator_source()
            self._is_chosen = True
            if self._source is None and self._processor:
                self._source = host.CpuSource()
        return self._source is not None

    def read(self) -> Snapshot:
        """Return the devices now, with the users of their processes."""
        if not self.is_available() or self._source is None:
            return Snapshot("none", error="no accelerator can be read", hint="; ".join(self._notes))
        found = self._source.read()
        found.notes = [*self._notes, *found.notes]
        self._process_owners.fill_in_owners(found.processes)
        return found
