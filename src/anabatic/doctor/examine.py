"""All checks, in the order of the report, within a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from anabatic.doctor import cann, hardware, host, network, npus, software, variables
from anabatic.doctor.commands import Later
from anabatic.doctor.line import Line
from anabatic.doctor.machine import Machine
from anabatic.doctor.verdicts import say

Check = Callable[[Machine], Iterator[Line]]
FAILED, WARNED = 1, 2
"""Exit codes."""

CHECKS: tuple[Check, ...] = (
    hardware.npu,
    hardware.nodes,
    hardware.driver,
    hardware.mounts,
    npus.smi,
    hardware.chip,
    npus.health,
    npus.ecc,
    npus.busy,
    hardware.gpu,
    cann.cann,
    cann.set_env,
    cann.toolkit,
    cann.kernels,
    cann.tbe,
    software.python,
    software.torch,
    software.torch_npu,
    software.matrix,
    software.imports,
    software.triton,
    variables.variables,
    host.memory,
    host.disk,
    host.shm,
    host.cpu,
    host.threads,
    host.files,
    host.ports,
    host.sandbox,
    network.network,
    network.device_network,
    network.links,
)


def examine(machine: Machine, seconds: float = 9.5, checks: Sequence[Check] = CHECKS) -> list[Line]:
    """Return the lines of every check; what has not answered after `seconds` is a line of its own.

    The checks run in a thread: a file system that hangs must not hang the report.
    """
    lines: list[Line] = []
    deadline = time.monotonic() + seconds

    def all_checks() -> bool:
        npus.note(machine)
        for check in checks:
            lines.extend(check(machine))
        lines.extend(_cut(machine))
        return True

    done = Later(all_checks).get(deadline)
    return list(lines) if done else [*lines, say("time.stopped", seconds=round(seconds))]


def _cut(machine: Machine) -> Iterator[Line]:
    for folder, (most, count) in sorted(machine.files.cut.items()):
        yield say("time.cut", folder=folder, most=most, count=count)


def exit_code(lines: Iterable[Line], strict: bool = False) -> int:
    """Return 1 when something is broken, with `strict` 2 when something deserves a warning, else 0."""
    states = {line.status for line in lines}
    if "FAIL" in states:
        return FAILED
    return WARNED if strict and "WARN" in states else 0
