"""Run `anabatic sim`: prepare, make a machine, set the variables, run the command, clean up."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anabatic.core import log, process_info
from anabatic.core.errors import Failure, UserError
from anabatic.core.formatting import format_size, parse_whole
from anabatic.core.paths import make_write_error, write_atomic
from anabatic_sim import machine_spec, shared_memory, supervisor
from anabatic_sim.libraries import build_layout, native_build
from anabatic_sim.libraries.build_layout import SimulatorBuild
from anabatic_sim.machine_spec import (
    CANN_VARIABLE,
    INTERPRETER_VARIABLE,
    OTHER_FILE_HINT,
    PACKAGE_VARIABLE,
    SEGMENT_VARIABLE,
    SimMachine,
)
from anabatic_sim.program_name import IS_STANDALONE, PROGRAM

CANN_PYTHON = Path(__file__).parent / "cann_python"
"""Modules that CANN has and programs import: acl, tbe."""
PROCESS_BYTES = 256 << 20
"""Memory of one process with torch and torch_npu before it does anything (measured: 230 to 260 MB)."""


def run_simulation(
    command: Sequence[str],
    *,
    npus: int,
    chip: str,
    hbm: str | None,
    fault: Sequence[str] = (),
    report: Path | None = None,
    trace: Path | None = None,
) -> int:
    """Run `command` on a simulated machine and return its exit code.

    Raises:
        UserError: a flag is wrong, or something that the simulator needs is missing.
        Failure: the simulator cannot be prepared.
    """
    if os.environ.get(machine_spec.SEGMENT_VARIABLE):
        raise UserError("this already runs inside a simulation", f"one `{PROGRAM}` is enough for the whole command")
    machine = machine_spec.build_machine(npus, chip, hbm, tuple(fault), report, trace)
    _require_memory(npus)
    # A place that cannot be written is reported before an hour of work; if we are killed, the files say so.
    for path in filter(None, (report, trace)):
        write_atomic(
            path, json.dumps({"state": "running", "command": list(command), "pid": os.getpid()}) + "\n", OTHER_FILE_HINT
        )
    built = native_build.prepare_build()
    remove_dead_machines()
    name = shared_memory.create_segment(machine)
    folder = _reports_folder() / name
    try:
        variables = build_environment(os.environ, built, name)
        if report or trace:
            _make_report_folder(folder)
            variables[machine_spec.REPORT_VARIABLE] = str(folder)
        if trace:
            variables[machine_spec.TRACE_VARIABLE] = "1"
        log.debug(f"simulating {npus} x {machine.chip.soc} with {format_size(machine.hbm_bytes)} each as {name}")
        started = time.monotonic()
        with shared_memory.attach_segment(name) as live:  # still there when its name is gone

            def write_reports(code: int) -> None:
                if report or trace:
                    _write_reports(machine, live, folder, command, code, time.monotonic() - started)

            return supervisor.run_command(command, variables, name, write_reports)
    finally:
        shared_memory.remove_segment(name)
        shutil.rmtree(folder, ignore_errors=True)


def _make_report_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise make_write_error(folder, error, machine_spec.OTHER_CACHE_HINT) from error


def _reports_folder() -> Path:
    return build_layout.simulator_folder() / "reports"


def _write_reports(
    machine: SimMachine, live: Any, folder: Path, command: Sequence[str], code: int, seconds: float
) -> None:
    from anabatic_sim import simulation_report

    if machine.report_path:
        built = simulation_report.build_report(machine, live, folder, command, code, seconds)
        simulation_report.write_report(built, machine.report_path)
        sys.stderr.write(simulation_report.render_table(built))
    if machine.trace_path:
        simulation_report.write_trace(folder, machine.trace_path)


def _require_memory(npus: int) -> None:
    free = process_info.read_available_memory()
    if npus * PROCESS_BYTES > free:
        raise UserError(
            f"--npus {npus}: a process for each needs {format_size(npus * PROCESS_BYTES)}, this host has "
            f"{format_size(free)} left",
            f"--npus {max(free // PROCESS_BYTES, 1)} fits",
        )


def remove_dead_machines() -> int:
    """Remove the shared memory of machines whose owner is gone; return how many."""
    gone = [name for name in shared_memory.list_machine_names() if not _is_owner_alive(name)]
    for name in gone:
        shared_memory.remove_segment(name)
    for folder in _reports_folder().glob(f"{shared_memory.SHM_PREFIX}*"):
        pid = parse_whole(folder.name.removeprefix(shared_memory.SHM_PREFIX))
        # An owner joins the reports when its shared memory is gone; a folder of our number is an earlier process's.
        if pid is None or pid == os.getpid() or not process_info.read_start_time(pid):
            shutil.rmtree(folder, ignore_errors=True)
    return len(gone)


def _is_owner_alive(name: str) -> bool:
    pid = int(name.removeprefix(shared_memory.SHM_PREFIX))
    try:
        with shared_memory.attach_segment(name) as found:
            return process_info.is_alive(pid, int(found.owner_started))
    except Failure:  # of another version, or gone meanwhile
        return process_info.read_start_time(pid) != 0


def describe_machines() -> str:
    """Return a table of the machines that live."""
    lines: list[str] = []
    for name in shared_memory.list_machine_names():
        if not _is_owner_alive(name):
            lines.append(f"{name}  left behind; `{PROGRAM} clean` removes it")
            continue
        with contextlib.suppress(Failure), shared_memory.attach_segment(name) as machine:  # it may end while we look
            lines += _describe_machine(name, machine)
    return "\n".join(lines or ["no simulated machine runs"]) + "\n"


def _describe_machine(name: str, found: shared_memory.SimSegment) -> list[str]:
    lines = [f"{name}  {found.devices} x {found.soc.decode()}  pid {found.owner_pid}"]
    for index in range(found.devices):
        row = found.device[index]
        used, total, peak = format_size(row.hbm_used), format_size(row.hbm_total), format_size(row.hbm_peak)
        lines.append(f"  npu:{index}  HBM {used} of {total}, peak {peak}")
    for user in found.process:
        if user.pid > 0:
            who = user.name.decode(errors="replace")
            lines.append(f"  pid {user.pid} {who}: {format_size(sum(user.hbm))}")
    return lines + [f"  fault {shared_memory.describe_fault(row)}" for row in found.fault if row.kind]


def clean_simulations(builds: bool) -> str:
    """Remove what simulations left behind; with `builds` also the wheels and the compiled simulator.

    Raises:
        UserError: `builds`, and a simulation runs from them.
    """
    text = f"removed {remove_dead_machines()} machines that were left behind\n"
    folder = build_layout.simulator_folder()
    if builds and (alive := shared_memory.list_machine_names()):
        raise UserError(
            f"{len(alive)} simulations run from {folder}: {', '.join(alive)}",
            f"wait for them or end them (`{PROGRAM} status` lists their processes), then remove the builds",
        )
    if builds and folder.is_dir():
        shutil.rmtree(folder)
        text += f"removed {folder}\n"
    return text


DROPPED_VARIABLES = ("ASCEND_CUSTOM_OPP_PATH", "ATB_HOME_PATH", "RANK_TABLE_FILE", "TORCH_DEVICE_BACKEND_AUTOLOAD")
"""Variables of a real installation, or that would keep torch_npu from loading."""


def build_environment(outer: Mapping[str, str], build: SimulatorBuild, segment: str) -> dict[str, str]:
    """Return the environment of COMMAND: `outer` with the simulated CANN in place of a real one."""
    inner = {key: value for key, value in outer.items() if key not in DROPPED_VARIABLES}
    inner[SEGMENT_VARIABLE] = segment
    inner[CANN_VARIABLE] = build.wheel.cann_release
    inner[PACKAGE_VARIABLE] = str(Path(__file__).parents[1])
    inner[INTERPRETER_VARIABLE] = sys.executable
    _prepend_path(inner, "PYTHONPATH", CANN_PYTHON)
    _prepend_path(inner, "PYTHONPATH", build.entry_point_folder)
    _prepend_path(inner, "PYTHONPATH", build.wheel.folder)
    _prepend_path(inner, "LD_LIBRARY_PATH", build.library_folder)
    # The interpreter that the simulator was built for is the one that `python` means.
    _prepend_path(inner, "PATH", Path(sys.executable).parent)
    _prepend_path(inner, "PATH", build.program_folder)
    if not IS_STANDALONE:
        _prepend_path(inner, "PATH", build.launcher_folder)
    inner["ASCEND_HOME_PATH"] = inner["ASCEND_TOOLKIT_HOME"] = str(build.cann_folder)
    inner["ASCEND_OPP_PATH"] = str(build.cann_folder / "opp")
    if build.torch.is_cuda_build:
        inner["CUDA_VISIBLE_DEVICES"] = ""  # torch_npu refuses a torch that sees another accelerator
    inner["TASK_QUEUE_ENABLE"] = "0"  # operators run at once; the runtime insists on it (csrc/runtime/device.cpp)
    return inner


def _prepend_path(variables: dict[str, str], name: str, path: Path) -> None:
    old = variables.get(name)
    variables[name] = f"{path}{os.pathsep}{old}" if old else str(path)
