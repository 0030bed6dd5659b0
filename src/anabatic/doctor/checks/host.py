"""Checks of the host: memory, disks, processors, threads, ports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from anabatic.core.formatting import format_size, parse_whole
from anabatic.doctor.findings.catalog import make_result
from anabatic.doctor.findings.check_result import CheckResult
from anabatic.doctor.target_machine import TargetMachine

GIB = 2**30
_HCCL_BASE_PORT, _NUM_HCCL_PORTS = 60000, 32
"""Host ports that HCCL takes from HCCL_IF_BASE_PORT on (hccl_env)."""
_DEFAULT_MASTER_PORT = 29500
"""torchrun's default."""
_LISTEN_STATE = "0A"
"""Column `st` of /proc/net/tcp."""


def _as_int(text: object) -> int | None:
    return text if isinstance(text, int) and not isinstance(text, bool) else None


def _count_devices(machine: TargetMachine) -> int:
    """Devices that the processors must feed; simulated ones compute on the processors themselves."""
    return 0 if machine.is_simulated else len(machine.npu_node_numbers) or len(machine.gpu_node_names)


def check_memory(machine: TargetMachine) -> Iterator[CheckResult]:
    """Host memory, and what a container may use of it."""
    text = machine.files.read_text("/proc/meminfo") or ""
    sizes = {name: int(value) * 1024 for name, value in re.findall(r"^(\w+):\s+(\d{1,15}) kB", text, re.M)}
    total, free = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    if not total:
        yield make_result("memory.unknown")
        return
    limits = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    words = [(machine.files.read_text(path) or "").strip() for path in limits]
    limit = min([number for word in words if (number := parse_whole(word, 19)) is not None], default=total)
    npus = len(machine.npu_node_numbers)
    if limit < total * 0.95:
        yield make_result("memory.limited", limit=format_size(limit), total=format_size(total))
    elif npus and total < npus * 16 * GIB:
        yield make_result("memory.small", total=format_size(total), npus=npus)
    elif free < min(8 * GIB, total // 10):
        yield make_result("memory.low", free=format_size(free), total=format_size(total))
    else:
        yield make_result("memory.ok", total=format_size(total), free=format_size(free))


def _list_disks(machine: TargetMachine) -> dict[str, dict[str, Any]]:
    """Label -> path, free, total; what is not of that shape is left out."""
    disk_facts = machine.get_fact("disk", dict)
    return {
        str(label): row
        for label, row in disk_facts.items()
        if isinstance(row, dict) and _as_int(row.get("free")) is not None and _as_int(row.get("total"))
    }


def check_disk(machine: TargetMachine) -> Iterator[CheckResult]:
    """Free space where a job writes."""
    places = {label: row for label, row in _list_disks(machine).items() if label != "shm"}
    if not places:
        yield make_result("disk.unknown")
        return
    disks: dict[tuple[int, int], dict[str, Any]] = {}
    for row in places.values():
        disks.setdefault((row["free"], row["total"]), row)  # one file system, one line
    bad = False
    for row in disks.values():
        free, path = row["free"], row.get("path", "?")
        if free < 20 * GIB:
            bad = True
            yield make_result("disk.full" if free < 2**28 else "disk.low", path=path, free=format_size(free))
    home = places.get("home", {})
    if home.get("writable") is False and "ACL_OP_COMPILER_CACHE_DIR" not in machine.env and machine.has_npu:
        bad = True
        yield make_result("disk.readonly", path=home.get("path", "?"))
    if not bad:
        yield make_result(
            "disk.ok", places=", ".join(f"{row.get('path', '?')} {format_size(row['free'])}" for row in disks.values())
        )


def check_shm(machine: TargetMachine) -> Iterator[CheckResult]:
    """Shared memory: loader workers and collectives on one machine live in it."""
    row = _list_disks(machine).get("shm")
    if row is None:
        yield make_result("shm.unknown")
    elif row["total"] < GIB:
        yield make_result("shm.small", total=format_size(row["total"]))
    elif row["free"] < GIB // 2:
        yield make_result("shm.full", total=format_size(row["total"]), free=format_size(row["free"]))
    else:
        yield make_result("shm.ok", total=format_size(row["total"]))


def check_cpu(machine: TargetMachine) -> Iterator[CheckResult]:
    """Processors, and how many this process may use."""
    cpu_facts = machine.get_fact("cpu", dict)
    count, allowed = _as_int(cpu_facts.get("count")), _as_int(cpu_facts.get("allowed"))
    if not count or not allowed:
        yield make_result("cpu.unknown")
        return
    text = machine.files.read_text("/proc/cpuinfo") or ""
    found = re.search(r"^(?:model name|Hardware|CPU part)\s*:\s*(.+)$", text, re.M)
    npus = _count_devices(machine)
    if npus and allowed < npus:
        yield make_result("cpu.few", allowed=allowed, npus=npus)
    elif allowed < count:
        yield make_result("cpu.bound", allowed=allowed, count=count, last=count - 1)
    else:
        yield make_result("cpu.ok", model=found[1].strip() if found else "CPU", allowed=allowed)


def recommend_threads(machine: TargetMachine) -> int:
    """Return the threads that each of as many processes as devices should use: 1 to 8."""
    allowed = _as_int(machine.get_fact("cpu", dict).get("allowed")) or 1
    return max(1, min(8, allowed // max(_count_devices(machine), 1)))


def check_threads(machine: TargetMachine) -> Iterator[CheckResult]:
    """OMP_NUM_THREADS against processors and devices."""
    if not machine.is_env_known:
        return
    value, npus = machine.env.get("OMP_NUM_THREADS"), _count_devices(machine)
    allowed = _as_int(machine.get_fact("cpu", dict).get("allowed"))
    if value is None:
        yield make_result("threads.unset")
    elif not 0 < (threads := parse_whole(value) or 0) < 10**6:
        yield make_result("threads.wrong", threads=value[:20], best=recommend_threads(machine))
    elif allowed and npus and threads * npus > allowed:
        yield make_result("threads.many", threads=value, npus=npus, allowed=allowed, best=recommend_threads(machine))
    else:
        yield make_result("threads.ok", threads=value)


def check_open_files(machine: TargetMachine) -> Iterator[CheckResult]:
    """The limit of open files."""
    nofile = _as_int(machine.get_fact("limits", dict).get("nofile"))
    if nofile is None:
        return
    few = 0 <= nofile < 4096
    yield make_result("files.few" if few else "files.ok", nofile=nofile if nofile >= 0 else "unlimited")


def check_sandbox(machine: TargetMachine) -> Iterator[CheckResult]:
    """Check the isolation of programs that a model has written (evaluation, rewards, the python tool)."""
    sandbox_facts = machine.get_fact("sandbox", dict)
    guards, missing = sandbox_facts.get("guards"), sandbox_facts.get("missing")
    if not isinstance(guards, dict) or not isinstance(missing, list):
        return
    if missing:
        reasons = sandbox_facts.get("reasons")
        why = "; ".join(f"{way}: {reason}" for way, reason in reasons.items()) if isinstance(reasons, dict) else "?"
        yield make_result("sandbox.weak", missing=", ".join(map(str, missing)), why=why[:200])
    else:
        yield make_result("sandbox.ok", guards=", ".join(dict.fromkeys(map(str, guards.values()))))


def _find_listening_ports(machine: TargetMachine) -> set[int]:
    ports: set[int] = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (machine.files.read_text(path) or "").splitlines()[1:]:
            cells = line.split()
            if len(cells) > 3 and cells[3] == _LISTEN_STATE and re.fullmatch(r"[0-9A-F]+:[0-9A-F]{4}", cells[1]):
                ports.add(int(cells[1].rpartition(":")[2], 16))
    return ports


def check_ports(machine: TargetMachine) -> Iterator[CheckResult]:
    """The ports of torchrun and HCCL."""
    if not machine.files.read_text("/proc/net/tcp"):
        return
    used = _find_listening_ports(machine)
    master = _parse_port(machine.env.get("MASTER_PORT", ""), _DEFAULT_MASTER_PORT)
    ports = {master}
    port_text = str(master)
    if machine.has_npu and not machine.is_simulated:
        base = _parse_port(machine.env.get("HCCL_IF_BASE_PORT", ""), _HCCL_BASE_PORT)
        ports |= set(range(base, base + _NUM_HCCL_PORTS))
        port_text = f"{master}, {base}-{base + _NUM_HCCL_PORTS - 1}"
        yield from _check_ephemeral_range(machine, base)
    if taken := sorted(used & ports):
        yield make_result("ports.used", used=", ".join(map(str, taken)))
    else:
        yield make_result("ports.ok", wanted=port_text)


def _parse_port(text: str, default: int) -> int:
    port = parse_whole(text) or 0
    return port if 0 < port < 65536 else default


def _check_ephemeral_range(machine: TargetMachine, base: int) -> Iterator[CheckResult]:
    """The kernel may give HCCL's ports to any connection unless they are reserved."""
    words = (machine.files.read_text("/proc/sys/net/ipv4/ip_local_port_range") or "").split()
    reserved = (machine.files.read_text("/proc/sys/net/ipv4/ip_local_reserved_ports") or "").strip()
    if base == _HCCL_BASE_PORT and not reserved and len(words) == 2:
        low, high = map(parse_whole, words)
        if low is not None and high is not None and low <= base <= high:
            yield make_result("ports.ephemeral", low=low, high=high)
