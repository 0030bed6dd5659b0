"""Checks of the host: memory, disks, processors, threads, ports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from anabatic.core.text import size
from anabatic.doctor.line import Line
from anabatic.doctor.machine import Machine
from anabatic.doctor.verdicts import say

GIB = 2**30
_HCCL_PORTS, _MOST_HCCL_PORTS = 60000, 32
"""Host ports that HCCL takes from HCCL_IF_BASE_PORT on (hccl_env)."""
_MASTER_PORT = 29500
"""torchrun's default."""
_LISTENS = "0A"
"""Column `st` of /proc/net/tcp."""


def _number(text: object) -> int | None:
    return text if isinstance(text, int) and not isinstance(text, bool) else None


def _devices(machine: Machine) -> int:
    """Devices that the processors must feed; simulated ones compute on the processors themselves."""
    return 0 if machine.simulated else len(machine.nodes) or len(machine.gpu_nodes)


def memory(machine: Machine) -> Iterator[Line]:
    """Host memory, and what a container may use of it."""
    text = machine.files.text("/proc/meminfo") or ""
    told = {name: int(value) * 1024 for name, value in re.findall(r"^(\w+):\s+(\d{1,15}) kB", text, re.M)}
    total, free = told.get("MemTotal", 0), told.get("MemAvailable", 0)
    if not total:
        yield say("memory.unknown")
        return
    limits = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    words = [(machine.files.text(path) or "").strip() for path in limits]
    limit = min([int(word) for word in words if word.isdecimal() and len(word) < 20], default=total)
    npus = len(machine.nodes)
    if limit < total * 0.95:
        yield say("memory.limited", limit=size(limit), total=size(total))
    elif npus and total < npus * 16 * GIB:
        yield say("memory.small", total=size(total), npus=npus)
    elif free < min(8 * GIB, total // 10):
        yield say("memory.low", free=size(free), total=size(total))
    else:
        yield say("memory.ok", total=size(total), free=size(free))


def _places(machine: Machine) -> dict[str, dict[str, Any]]:
    """Label -> path, free, total; what is not of that shape is left out."""
    told = machine.fact("disk", dict)
    return {
        str(label): row
        for label, row in told.items()
        if isinstance(row, dict) and _number(row.get("free")) is not None and _number(row.get("total"))
    }


def disk(machine: Machine) -> Iterator[Line]:
    """Free space where a job writes."""
    places = {label: row for label, row in _places(machine).items() if label != "shm"}
    if not places:
        yield say("disk.unknown")
        return
    told: dict[tuple[int, int], dict[str, Any]] = {}
    for row in places.values():
        told.setdefault((row["free"], row["total"]), row)  # one file system, one line
    bad = False
    for row in told.values():
        free, path = row["free"], row.get("path", "?")
        if free < 20 * GIB:
            bad = True
            yield say("disk.full" if free < 2**28 else "disk.low", path=path, free=size(free))
    home = places.get("home", {})
    if home.get("writable") is False and "ACL_OP_COMPILER_CACHE_DIR" not in machine.env and machine.has_npu:
        bad = True
        yield say("disk.readonly", path=home.get("path", "?"))
    if not bad:
        yield say("disk.ok", places=", ".join(f"{row.get('path', '?')} {size(row['free'])}" for row in told.values()))


def shm(machine: Machine) -> Iterator[Line]:
    """Shared memory: loader workers and collectives on one machine live in it."""
    row = _places(machine).get("shm")
    if row is None:
        yield say("shm.unknown")
    elif row["total"] < GIB:
        yield say("shm.small", total=size(row["total"]))
    elif row["free"] < GIB // 2:
        yield say("shm.full", total=size(row["total"]), free=size(row["free"]))
    else:
        yield say("shm.ok", total=size(row["total"]))


def cpu(machine: Machine) -> Iterator[Line]:
    """Processors, and how many this process may use."""
    told = machine.fact("cpu", dict)
    count, allowed = _number(told.get("count")), _number(told.get("allowed"))
    if not count or not allowed:
        yield say("cpu.unknown")
        return
    text = machine.files.text("/proc/cpuinfo") or ""
    found = re.search(r"^(?:model name|Hardware|CPU part)\s*:\s*(.+)$", text, re.M)
    npus = _devices(machine)
    if npus and allowed < npus:
        yield say("cpu.few", allowed=allowed, npus=npus)
    elif allowed < count:
        yield say("cpu.bound", allowed=allowed, count=count, last=count - 1)
    else:
        yield say("cpu.ok", model=found[1].strip() if found else "CPU", allowed=allowed)


def best_threads(machine: Machine) -> int:
    """Return the threads that each of as many processes as devices should use: 1 to 8."""
    allowed = _number(machine.fact("cpu", dict).get("allowed")) or 1
    return max(1, min(8, allowed // max(_devices(machine), 1)))


def threads(machine: Machine) -> Iterator[Line]:
    """OMP_NUM_THREADS against processors and devices."""
    if not machine.env_known:
        return
    value, npus = machine.env.get("OMP_NUM_THREADS"), _devices(machine)
    allowed = _number(machine.fact("cpu", dict).get("allowed"))
    if value is None:
        yield say("threads.unset")
    elif not value.isdecimal() or not 0 < int(value[:9]) < 10**6:
        yield say("threads.wrong", threads=value[:20], best=best_threads(machine))
    elif allowed and npus and int(value[:9]) * npus > allowed:
        yield say("threads.many", threads=value, npus=npus, allowed=allowed, best=best_threads(machine))
    else:
        yield say("threads.ok", threads=value)


def files(machine: Machine) -> Iterator[Line]:
    """The limit of open files."""
    nofile = _number(machine.fact("limits", dict).get("nofile"))
    if nofile is None:
        return
    few = 0 <= nofile < 4096
    yield say("files.few" if few else "files.ok", nofile=nofile if nofile >= 0 else "unlimited")


def sandbox(machine: Machine) -> Iterator[Line]:
    """What keeps programs that a model has written from files and network (evaluation, rewards, the python tool)."""
    told = machine.fact("sandbox", dict)
    guards, missing = told.get("guards"), told.get("missing")
    if not isinstance(guards, dict) or not isinstance(missing, list):
        return
    if missing:
        reasons = told.get("reasons")
        why = "; ".join(f"{way}: {reason}" for way, reason in reasons.items()) if isinstance(reasons, dict) else "?"
        yield say("sandbox.weak", missing=", ".join(map(str, missing)), why=why[:200])
    else:
        yield say("sandbox.ok", guards=", ".join(dict.fromkeys(map(str, guards.values()))))


def _listening(machine: Machine) -> set[int]:
    ports: set[int] = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (machine.files.text(path) or "").splitlines()[1:]:
            cells = line.split()
            if len(cells) > 3 and cells[3] == _LISTENS and re.fullmatch(r"[0-9A-F]+:[0-9A-F]{4}", cells[1]):
                ports.add(int(cells[1].rpartition(":")[2], 16))
    return ports


def ports(machine: Machine) -> Iterator[Line]:
    """The ports of torchrun and HCCL."""
    if not machine.files.text("/proc/net/tcp"):
        return
    used = _listening(machine)
    master = _port(machine.env.get("MASTER_PORT", ""), _MASTER_PORT)
    wanted = {master}
    shown = str(master)
    if machine.has_npu and not machine.simulated:
        base = _port(machine.env.get("HCCL_IF_BASE_PORT", ""), _HCCL_PORTS)
        wanted |= set(range(base, base + _MOST_HCCL_PORTS))
        shown = f"{master}, {base}-{base + _MOST_HCCL_PORTS - 1}"
        yield from _given_away(machine, base)
    if taken := sorted(used & wanted):
        yield say("ports.used", used=", ".join(map(str, taken)))
    else:
        yield say("ports.ok", wanted=shown)


def _port(text: str, default: int) -> int:
    return int(text) if text.isdecimal() and len(text) < 6 and 0 < int(text) < 65536 else default


def _given_away(machine: Machine, base: int) -> Iterator[Line]:
    """The kernel may give HCCL's ports to any connection unless they are reserved."""
    words = (machine.files.text("/proc/sys/net/ipv4/ip_local_port_range") or "").split()
    reserved = (machine.files.text("/proc/sys/net/ipv4/ip_local_reserved_ports") or "").strip()
    if base == _HCCL_PORTS and not reserved and len(words) == 2 and all(word.isdecimal() for word in words):
        low, high = (int(word[:9]) for word in words)
        if low <= base <= high:
            yield say("ports.ephemeral", low=low, high=high)
