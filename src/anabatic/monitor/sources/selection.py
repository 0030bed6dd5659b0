"""Select the source of readings on this machine: DCMI, npu-smi, NVML, else the processor as a device."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from anabatic.monitor.snapshot import DeviceProcess, DeviceReading, Snapshot
from anabatic.monitor.sources import dcmi, npu_smi_command, nvml


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
        self._process_owners = ProcessOwners()
        self._is_chosen = False

    def is_available(self) -> bool:
        """True when there is something to read."""
        if not self._is_chosen:
            self._source, self._notes = find_accelerator_source()
            self._is_chosen = True
            if self._source is None and self._processor:
                self._source = CpuSource()
        return self._source is not None

    def read(self) -> Snapshot:
        """Return the devices now, with the users of their processes."""
        if not self.is_available() or self._source is None:
            return Snapshot("none", error="no accelerator can be read", hint="; ".join(self._notes))
        found = self._source.read()
        found.notes = [*self._notes, *found.notes]
        self._process_owners.fill_in_owners(found.processes)
        return found


_FIRST_INTERVAL_SECONDS = 0.1


class CpuSource:
    """The processor as one device, read through psutil."""

    def __init__(self) -> None:
        self._started = False

    def read(self) -> Snapshot:
        """Return the share of the processor used since the last reading, and the machine's memory."""
        import psutil

        busy = psutil.cpu_percent(None if self._started else _FIRST_INTERVAL_SECONDS)
        self._started = True
        memory = psutil.virtual_memory()
        device = DeviceReading(
            0,
            kind="cpu",
            name=f"{os.cpu_count()} CPUs",
            util_pct=busy,
            util_kind="cpu",
            mem_used_mb=(memory.total - memory.available) >> 20,
            mem_total_mb=memory.total >> 20,
        )
        return Snapshot("psutil", [device])


class ProcessOwners:
    """Names the user and the command of processes; what was found is kept while a process lives."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._cached: dict[tuple[int, float], tuple[str, str, str]] = {}
        self._users: dict[int, str] = {}

    def fill_in_owners(self, processes: list[DeviceProcess]) -> None:
        """Fill in user, command and a missing name; a pid of another namespace stays without."""
        known: dict[tuple[int, float], tuple[str, str, str]] = {}
        for process in processes:
            folder = self._proc / str(process.pid)
            try:
                status = folder.stat()
                mark = (process.pid, status.st_ctime)
                if mark not in self._cached:
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
                    short = (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
                    self._cached[mark] = (self._look_up_user(status.st_uid), short, command)
            except OSError:  # ended, or in another pid namespace
                continue
            user, short, command = self._cached[mark]
            if command:  # else it is just becoming another program, or belongs to the kernel
                known[mark] = self._cached[mark]
            if process.name and process.name[:15] != short[:15] and process.name not in command:
                continue  # the tools print pids of the host: in a container that number is somebody else
            process.user, process.command = user, command or None
            process.name = process.name or short or None
        self._cached = known

    def _look_up_user(self, uid: int) -> str:
        if uid not in self._users:
            import pwd

            try:
                self._users[uid] = pwd.getpwuid(uid).pw_name
            except KeyError:
                self._users[uid] = str(uid)
        return self._users[uid]
