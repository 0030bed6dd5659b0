"""What `anabatic sim` does: prepare, make a machine, run the command, tidy up."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anabatic.core import log
from anabatic.core.errors import Failure, UserError
from anabatic.core.paths import cannot_write, write_atomic
from anabatic.core.text import size
from anabatic.sim import build, environment, faults, machine, process, segment
from anabatic.sim.machine import OTHER_FILE, Machine

PROCESS_BYTES = 256 << 20
"""What one process with torch and torch_npu holds before it does anything (measured: 230 to 260 MB)."""


def run(
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
    if os.environ.get(machine.SEGMENT):
        raise UserError("this already runs inside a simulation", "one `anabatic sim` is enough for the whole command")
    wanted = machine.build(npus, chip, hbm, tuple(fault), report, trace)
    _enough_memory(npus)
    # A place that cannot be written is told before an hour of work; if we are killed, the files say so.
    for path in filter(None, (report, trace)):
        write_atomic(
            path, json.dumps({"state": "running", "command": list(command), "pid": os.getpid()}) + "\n", OTHER_FILE
        )
    built = build.ready()
    sweep()
    name = segment.create(wanted)
    folder = _reports() / name
    try:
        variables = environment.variables(os.environ, built, name)
        if report or trace:
            _make(folder)
            variables[machine.REPORT] = str(folder)
        if trace:
            variables[machine.TRACE] = "1"
        log.debug(f"simulating {npus} x {wanted.chip.soc} with {size(wanted.hbm)} each as {name}")
        started = time.monotonic()
        with segment.attached(name) as live:  # still there when its name is gone

            def ended(code: int) -> None:
                if report or trace:
                    _report(wanted, live, folder, command, code, time.monotonic() - started)

            return process.run(command, variables, name, ended)
    finally:
        segment.remove(name)
        shutil.rmtree(folder, ignore_errors=True)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise cannot_write(folder, error, machine.OTHER_CACHE) from error


def _reports() -> Path:
    return build.folder() / "reports"


def _report(wanted: Machine, live: Any, folder: Path, command: Sequence[str], code: int, seconds: float) -> None:
    from anabatic.sim import report, table

    if wanted.report:
        built = report.build(wanted, live, folder, command, code, seconds)
        report.write(built, wanted.report)
        sys.stderr.write(table.render(built))
    if wanted.trace:
        report.write_trace(folder, wanted.trace)


def _enough_memory(npus: int) -> None:
    import psutil

    free = psutil.virtual_memory().available
    if npus * PROCESS_BYTES > free:
        raise UserError(
            f"--npus {npus}: a process for each needs {size(npus * PROCESS_BYTES)}, this host has {size(free)} left",
            f"--npus {max(free // PROCESS_BYTES, 1)} fits",
        )


def sweep() -> int:
    """Remove the shared memory of machines whose owner is gone; return how many."""
    gone = [name for name in segment.names() if not _living(name)]
    for name in gone:
        segment.remove(name)
    living = set(segment.names())
    for folder in _reports().glob(f"{segment.PREFIX}*"):
        if folder.name not in living:
            shutil.rmtree(folder, ignore_errors=True)
    return len(gone)


def _living(name: str) -> bool:
    pid = int(name.removeprefix(segment.PREFIX))
    try:
        with segment.attached(name) as found:
            return segment.alive(pid, int(found.owner_started))
    except Failure:  # of another version, or gone meanwhile
        return segment.start_time(pid) != 0


def status() -> str:
    """Return a table of the machines that live."""
    lines: list[str] = []
    for name in segment.names():
        if not _living(name):
            lines.append(f"{name}  left behind; `anabatic sim clean` removes it")
            continue
        with contextlib.suppress(Failure), segment.attached(name) as machine:  # it may end while we look
            lines += _described(name, machine)
    return "\n".join(lines or ["no simulated machine runs"]) + "\n"


def _described(name: str, found: segment.Segment) -> list[str]:
    lines = [f"{name}  {found.devices} x {found.soc.decode()}  pid {found.owner_pid}"]
    for index in range(found.devices):
        row = found.device[index]
        used, total, peak = size(row.hbm_used), size(row.hbm_total), size(row.hbm_peak)
        lines.append(f"  npu:{index}  HBM {used} of {total}, peak {peak}")
    for user in found.process:
        if user.pid > 0:
            who = user.name.decode(errors="replace")
            lines.append(f"  pid {user.pid} {who}: {size(sum(user.hbm))}")
    return lines + [f"  fault {faults.describe(row)}" for row in found.fault if row.kind]


def clean(builds: bool) -> str:
    """Remove what simulations left behind; with `builds` also the wheels and the compiled simulator.

    Raises:
        UserError: `builds`, and a simulation runs from them.
    """
    text = f"removed {sweep()} machines that were left behind\n"
    folder = build.folder()
    if builds and (alive := segment.names()):
        raise UserError(
            f"{len(alive)} simulations run from {folder}: {', '.join(alive)}",
            "wait for them or end them (`anabatic sim status` lists their processes), then remove the builds",
        )
    if builds and folder.is_dir():
        shutil.rmtree(folder)
        text += f"removed {folder}\n"
    return text
