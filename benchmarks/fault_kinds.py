"""The faults: what each one does to a job, and the words by which the job is to tell of it."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from anabatic.core import json_reader
from anabatic_sim import fault_injection, shared_memory
from fault_machines import Machine

LOOK = 0.02
"""Seconds between two looks at a job."""
_OFF_SECONDS = 2.0
"""How long a machine without power stays away."""


STOP = threading.Event()
"""All jobs are to end."""


class Stuck(Exception):
    """What was waited for did not come."""


@dataclass
class Site:
    """A job under fault: its machines, and the run folder that they share.

    Attributes:
        disk: the disk that holds the run folder; None when it is not its own.
        hang: seconds without progress after which the launchers act.
        patience: seconds after which a job that does not continue counts as lost.
        reached: the furthest step since the last fault.
    """

    machines: list[Machine]
    run: Path
    disk: Path | None
    hang: float
    patience: float
    reached: int = 0
    ranks: dict[int, psutil.Process] = field(default_factory=dict)

    def wait(self, condition: Callable[[], Any]) -> None:
        """Look after the machines until something is true.

        Raises:
            Stuck: it does not come true, and nothing else moves any more.
        """
        seen, deadline = (0, 0.0), 0.0
        while not condition():
            if all(machine.done for machine in self.machines):  # nothing will move any more
                raise Stuck
            for machine in self.machines:
                machine.tend()
            if self.last() != seen or not deadline:
                seen, deadline = self.last(), time.monotonic() + self.patience
                self.reached = max(self.reached, seen[0])
            if time.monotonic() > deadline or STOP.is_set():
                raise Stuck
            time.sleep(LOOK)

    def last(self) -> tuple[int, float]:
        """Step and time of the newest row of the metrics; zeros without one."""
        path = self.run / "metrics.jsonl"
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            for line in reversed(file.readlines()[:-1] + [b""]):
                found = re.match(rb'\{"step": (\d+), "time": ([\d.]+), "kind": "train"', line)
                if found:
                    return int(found[1]), float(found[2])
        return 0, 0.0

    def begun(self, since: float) -> list[int]:
        """Steps at which the training has begun or gone on since a time."""
        rows = json_reader.read_json_lines(self.run / "events.jsonl")
        return [row["step"] for row in rows if row["event"] in ("start", "resume") and row["time"] > since]

    def workers(self) -> dict[int, tuple[Machine, psutil.Process]]:
        """The processes that train, by rank."""
        return {rank: (machine, one) for machine in self.machines for rank, one in machine.ranks().items()}

    def sizes(self) -> list[int]:
        """How much each machine has written."""
        return [machine.log.stat().st_size for machine in self.machines]

    def read_logs(self, since: list[int]) -> str:
        """What the machines have written since they had written so much."""
        parts = (machine.log.read_bytes()[size:] for machine, size in zip(self.machines, since, strict=True))
        return b"".join(parts).decode("utf-8", "replace")

    def newest(self) -> Path:
        """The newest checkpoint."""
        found = self.run.glob("checkpoint-*")
        return max(found, key=lambda path: int(path.name.partition("-")[2]))


def _rank(site: Site, draw: random.Random) -> None:
    draw.choice([one for _, one in site.workers().values()]).kill()


def _agent(site: Site, draw: random.Random) -> None:
    agents = [agent for machine in site.machines if (agent := machine.agent())]
    draw.choice(agents).kill()


def _launcher(site: Site, draw: random.Random) -> None:
    found = [one for machine in site.machines if (agent := machine.agent()) and (one := agent.parent())]
    draw.choice(found).kill()


def _node(site: Site, draw: random.Random) -> None:
    draw.choice(site.machines).kill()


def _power(site: Site, draw: random.Random) -> None:
    """The cable goes first, so that nobody hears of the end; the machine comes back by itself."""
    machine = draw.choice(site.machines)
    machine.down = True
    machine.cable(False)
    machine.kill()
    back = time.monotonic() + _OFF_SECONDS
    site.wait(lambda: time.monotonic() > back)
    machine.cable(True)
    machine.down = False
    machine.start()


def _part(site: Site, draw: random.Random) -> None:
    """No packet passes for longer than what counts as hanging; all processes live."""
    machine = draw.choice(site.machines)
    machine.cable(False)
    back = time.monotonic() + draw.uniform(1.5, 2.5) * site.hang
    site.wait(lambda: time.monotonic() > back)
    machine.cable(True)


def _stop(site: Site, draw: random.Random) -> None:
    draw.choice([one for _, one in site.workers().values()]).send_signal(signal.SIGSTOP)


def _disk(site: Site, draw: random.Random) -> None:
    """Room for a part of a checkpoint only; it is made free when the job has reported it."""
    before = site.sizes()
    if site.disk is None or os.geteuid():
        worker = site.workers()[0][1]  # a limit on the size of a file, which the next process does not inherit
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        return
    ballast = site.disk / "ballast"
    whole = sum(path.stat().st_blocks * 512 for path in site.newest().iterdir())
    left = int(whole * draw.choice([draw.uniform(0.1, 0.9), draw.uniform(0.93, 0.99)]))
    try:
        with open(ballast, "wb") as file:
            site.wait(lambda: _fill(site.disk, file, left) or _FULL.search(site.read_logs(before)))
    finally:
        ballast.unlink()


def _fill(disk: Path, file: IO[bytes], left: int) -> None:
    """Leave so much room, also when an old checkpoint has just been removed."""
    free = os.statvfs(disk)
    if (spare := free.f_bavail * free.f_frsize - left) > 0:
        with contextlib.suppress(OSError):  # the job was faster
            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, spare)


_FULL = re.compile(r"no space left while writing|checkpoint-\d+ needs .* are free|No space left on device")


def _flip(site: Site, draw: random.Random) -> None:
    """A bit of the newest checkpoint turns over, and a rank is killed so that it is read."""
    _rank(site, draw)
    time.sleep(0.3)  # a save that only had to be sealed is through
    file = draw.choice([path for path in sorted(site.newest().iterdir()) if path.name != "manifest.json"])
    with open(file, "r+b") as opened:
        place = draw.randrange(file.stat().st_size)
        byte = os.pread(opened.fileno(), 1, place)[0]
        os.pwrite(opened.fileno(), bytes([byte ^ 1 << draw.randrange(8)]), place)


def _inject(site: Site, draw: random.Random, kind: str) -> None:
    """Put a fault into the living simulated machine, for a device that a rank works on."""
    sim = site.machines[0].process
    assert sim is not None
    with shared_memory.attach_segment(f"{shared_memory.SHM_PREFIX}{sim.pid}") as live:
        busy = [index for index in range(live.devices) if live.device[index].hbm_used and not live.device[index].lost]
        row = next(row for row in live.fault if not row.kind or row.after < 0)
        row.kind = 0  # whoever reads it meanwhile finds no fault
        row.device, row.after, row.value = draw.choice(busy), 1, 0
        row.kind = fault_injection.FAULT_KINDS[kind]
        del row


def _timeout(site: Site, draw: random.Random) -> None:
    _inject(site, draw, "hccl-timeout")


def _lost(site: Site, draw: random.Random) -> None:
    _inject(site, draw, "lost")


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        what: for the table.
        inject: does it.
        says: what the launchers must write of it.
        where: the job that it hits, `machines` or `npus`.
        intervals: of checkpoints whose steps may be done again.
        isolated: needs machines with their own cable.
    """

    what: str
    inject: Callable[[Site, random.Random], None]
    says: str
    where: str = "machines"
    intervals: int = 1
    isolated: bool = False


KINDS = {
    "rank": Kind("kill -9 of a rank", _rank, r"rank \d+ ended without a message \(killed by SIGKILL\)"),
    "agent": Kind("kill -9 of an agent", _agent, r"the launcher's agent has ended \(killed by SIGKILL\)"),
    "launcher": Kind("kill -9 of a launcher", _launcher, r"SIGTERM: saving|stopped after step \d+: saved"),
    "node": Kind(
        "kill -9 of all of a machine",
        _node,
        r"(rank \d+\]? .*|another machine failed): all processes start again|agent has ended",
    ),
    "power": Kind(
        "a machine without power for 2 s", _power, r"no process has moved|start again|starting again", isolated=True
    ),
    "part": Kind("machines cut off from each other", _part, r"no process has moved|start again", isolated=True),
    "stop": Kind("SIGSTOP of a rank", _stop, r"rank \d+ stands after step \d+: the process is stopped \(SIGSTOP\)"),
    "disk": Kind("disk full during a save", _disk, _FULL.pattern),
    "flip": Kind("flipped bit in the newest checkpoint", _flip, r"is not used: \S+ does not match", intervals=2),
    "hccl": Kind("HCCL timeout, simulated NPU", _timeout, r"^warning: .*(507048|EI0002)", where="npus"),
    "lost": Kind("device lost, simulated NPU", _lost, r"^warning: .*507899", where="npus"),
}
