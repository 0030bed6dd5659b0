"""What `anabatic sim` does: prepare, make a machine, run the command, tidy up."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence

from anabatic.core import log
from anabatic.core.errors import Failure, UserError
from anabatic.core.text import size
from anabatic.sim import build, environment, machine, process, segment


def run(command: Sequence[str], *, npus: int, chip: str, hbm: str | None) -> int:
    """Run `command` on a simulated machine and return its exit code.

    Raises:
        UserError: a flag is wrong, or something that the simulator needs is missing.
        Failure: the simulator cannot be prepared.
    """
    if os.environ.get(machine.SEGMENT):
        raise UserError("this already runs inside a simulation", "one `anabatic sim` is enough for the whole command")
    wanted = machine.build(npus, chip, hbm)
    built = build.ready()
    sweep()
    name = segment.create(wanted)
    try:
        variables = environment.variables(os.environ, built, name)
        log.debug(f"simulating {npus} x {wanted.chip.soc} with {size(wanted.hbm)} each as {name}")
        return process.run(command, variables, name)
    finally:
        segment.remove(name)


def sweep() -> int:
    """Remove the shared memory of machines whose owner is gone; return how many."""
    gone = [name for name in segment.names() if not _living(name)]
    for name in gone:
        segment.remove(name)
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
    return lines


def clean(builds: bool) -> str:
    """Remove what simulations left behind; with `builds` also the wheels and the compiled simulator."""
    text = f"removed {sweep()} machines that were left behind\n"
    folder = build.folder()
    if builds and folder.is_dir():
        shutil.rmtree(folder)
        text += f"removed {folder}\n"
    return text
