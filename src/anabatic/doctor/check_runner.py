"""All checks, in the order of the report, within a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from anabatic.doctor.checks import cann, environment_variables, hardware, host, network, npu_status, software
from anabatic.doctor.findings.catalog import make_result
from anabatic.doctor.findings.check_result import CheckResult
from anabatic.doctor.subprocess_runner import BackgroundResult
from anabatic.doctor.target_machine import TargetMachine

Check = Callable[[TargetMachine], Iterator[CheckResult]]
EXIT_FAILED, EXIT_WARNED = 1, 2
"""Exit codes."""

CHECKS: tuple[Check, ...] = (
    hardware.check_npus,
    hardware.check_device_nodes,
    hardware.check_driver,
    hardware.check_container_mounts,
    npu_status.check_npu_smi,
    hardware.check_chip,
    npu_status.check_health,
    npu_status.check_ecc,
    npu_status.check_processes,
    hardware.check_gpus,
    cann.check_cann,
    cann.check_set_env,
    cann.check_toolkit,
    cann.check_kernels,
    cann.check_tbe_packages,
    software.check_python,
    software.check_torch,
    software.check_torch_npu,
    software.check_version_matrix,
    software.check_imports,
    software.check_triton,
    environment_variables.check_variables,
    host.check_memory,
    host.check_disk,
    host.check_shm,
    host.check_cpu,
    host.check_threads,
    host.check_open_files,
    host.check_ports,
    host.check_sandbox,
    network.check_host_network,
    network.check_device_addresses,
    network.check_device_links,
)


def run_checks(machine: TargetMachine, seconds: float = 9.5, checks: Sequence[Check] = CHECKS) -> list[CheckResult]:
    """Return the lines of every check; what has not answered after `seconds` is its own line.

    The checks run in a thread: a file system that hangs must not hang the report.
    """
    lines: list[CheckResult] = []
    deadline = time.monotonic() + seconds

    def collect_results() -> bool:
        npu_status.record_npu_notes(machine)
        for check in checks:
            lines.extend(check(machine))
        lines.extend(_report_truncated_folders(machine))
        return True

    done = BackgroundResult(collect_results).wait_result(deadline)
    return list(lines) if done else [*lines, make_result("time.stopped", seconds=round(seconds))]


def _report_truncated_folders(machine: TargetMachine) -> Iterator[CheckResult]:
    for folder, (max_names, count) in sorted(machine.files.truncated_folders.items()):
        yield make_result("time.cut", folder=folder, most=max_names, count=count)


def get_exit_code(lines: Iterable[CheckResult], strict: bool = False) -> int:
    """Return 1 when something is broken, with `strict` 2 when something deserves a warning, else 0."""
    states = {line.status for line in lines}
    if "FAIL" in states:
        return EXIT_FAILED
    return EXIT_WARNED if strict and "WARN" in states else 0
