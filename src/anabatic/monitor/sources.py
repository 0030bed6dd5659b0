"""Which source is read on this machine: DCMI, npu-smi, NVML, the processor, in this order."""

from __future__ import annotations

import glob
from collections.abc import Callable
from typing import Protocol

from anabatic.monitor import source_dcmi, source_host, source_nvml, source_smi
from anabatic.monitor.snapshot import Snapshot


class Source(Protocol):
    """Something that can be read again and again."""

    def read(self) -> Snapshot:
        """Return the devices now; what fails is told in the snapshot's `error`."""
        ...


_ACCELERATORS: tuple[Callable[[], Source | str | None], ...] = (
    source_dcmi.open_source,
    source_smi.open_source,
    source_nvml.open_source,
)


def accelerators() -> tuple[Source | None, list[str]]:
    """Return the first source of accelerators that works here, and why those before it do not."""
    notes: list[str] = []
    for opened in _ACCELERATORS:
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


class Machine:
    """All devices of this machine, from one source that is chosen at the first reading."""

    def __init__(self, processor: bool = True) -> None:
        self._processor = processor
        self._source: Source | None = None
        self._notes: list[str] = []
        self._people = source_host.People()
        self._chosen = False

    def available(self) -> bool:
        """True when there is something to read."""
        if not self._chosen:
            self._source, self._notes = accelerators()
            self._chosen = True
            if self._source is None and self._processor:
                self._source = source_host.Cpu()
        return self._source is not None

    def read(self) -> Snapshot:
        """Return the devices now, with the users of their processes."""
        if not self.available() or self._source is None:
            return Snapshot("none", error="no accelerator can be read", hint="; ".join(self._notes))
        found = self._source.read()
        found.notes = [*self._notes, *found.notes]
        self._people.name(found.processes)
        return found
