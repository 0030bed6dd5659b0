"""Machines to break: a command in a network namespace of its own, which a supervisor starts again when it fails.

As root with iproute2, each machine is a network namespace with its own address, joined to the next by a virtual cable
(ip-netns(8), veth(4)); elsewhere a machine is a process tree and all share 127.0.0.1. The supervisor is what
`Restart=on-failure` and `RestartSec=1` are in a unit of systemd (systemd.service(5)): it starts the same command again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from anabatic.core import heartbeat

RESTART_SECONDS = 1.0
"""A supervisor's pause before it starts a command again."""
ANABATIC = [sys.executable, "-m", "anabatic"]


class Machine:
    """One machine: its command, its processes, its cable.

    Args:
        number: place among the machines.
        space: name of its network namespace; empty: it has none.
        address: its own.
        log: file for what the command writes.
    """

    def __init__(self, number: int, space: str, address: str, log: Path) -> None:
        self.number, self.space, self.address, self.log = number, space, address, log
        self.temporary = log.with_suffix("")
        """Its folder for temporary files, where the launcher keeps its workers' heartbeats."""
        self.temporary.mkdir()
        self.command: list[str] = []
        self.environment: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.done = False
        self.down = False
        """Switched off: the supervisor is gone, too."""
        self.starts = 0
        self._ended = 0.0

    def start(self) -> None:
        """Start the command."""
        inside = ["ip", "netns", "exec", self.space] if self.space else []
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*inside, *self.command],
                env={**self.environment, "TMPDIR": str(self.temporary)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.starts += 1
        self._ended = 0.0

    def tend(self) -> None:
        """Be the supervisor: start the command again when it has failed."""
        if self.done or self.down or self.process is None or self.process.poll() is None:
            return
        if self.process.returncode == 0:
            self.done = True
        elif not self._ended:
            self._ended = time.monotonic()
        elif time.monotonic() - self._ended > RESTART_SECONDS:
            self.start()

    def processes(self) -> list[psutil.Process]:
        """All processes of this machine."""
        if self.space:
            listed = subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True, check=True)
            numbers = [int(word) for word in listed.stdout.split()]
        elif self.process is not None and self.process.poll() is None:
            root = psutil.Process(self.process.pid)
            numbers = [root.pid, *(child.pid for child in root.children(recursive=True))]
        else:
            numbers = []
        found = []
        for number in numbers:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(number))
        return found

    def agent(self) -> psutil.Process | None:
        """The agent of the launcher."""
        return next((one for one in self.processes() if "anabatic.launch.local.elastic_agent" in _words(one)), None)

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes that train, by rank."""
        found = {}
        for beat in self.temporary.glob("anabatic-*/try-*/rank-*.beat"):
            with contextlib.suppress(psutil.NoSuchProcess, OSError):  # it ends while we look
                if (told := heartbeat.read_heartbeat(beat)) is not None:
                    found[int(beat.stem.partition("-")[2])] = psutil.Process(told[0])
        return found

    def kill(self) -> None:
        """kill -9 for all its processes at once."""
        while living := self.processes():
            for one in living:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGKILL)
            if self.process is not None:
                self.process.poll()  # so that it does not stay a zombie, which the tree would still show
            time.sleep(0.02)

    def cable(self, plugged: bool) -> None:
        """Pull the network cable, or plug it in."""
        words = ["ip", "-n", self.space, "link", "set", "eth0", "up" if plugged else "down"]
        subprocess.run(words, check=True)


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def can_isolate() -> bool:
    """True where network namespaces can be made."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


@contextmanager
def machines(count: int, folder: Path) -> Iterator[list[Machine]]:
    """Yield machines that reach one another; what runs on them ends with the block."""
    tag = f"faults{os.getpid()}-{folder.name}"
    isolated = count == 2 and can_isolate()
    found = []
    for number in range(count):
        space, address = (f"{tag}-{number}", f"10.77.0.{number + 1}") if isolated else ("", "127.0.0.1")
        found.append(Machine(number, space, address, folder / f"machine-{number}.log"))
    try:
        if isolated:
            _join(found[0], found[1])
        yield found
    finally:
        for machine in found:
            machine.down = True
            with contextlib.suppress(subprocess.CalledProcessError):  # the namespace was never made
                machine.kill()
            if isolated:
                subprocess.run(["ip", "netns", "del", machine.space], check=False, stderr=subprocess.DEVNULL)


def _join(one: Machine, other: Machine) -> None:
    for machine in (one, other):
        subprocess.run(["ip", "netns", "add", machine.space], check=True)
    ends = ["ip", "link", "add", "eth0", "netns", one.space, "type", "veth", "peer", "name", "eth0"]
    subprocess.run([*ends, "netns", other.space], check=True)
    for machine in (one, other):
        inside = ["ip", "-n", machine.space]
        subprocess.run([*inside, "addr", "add", f"{machine.address}/24", "dev", "eth0"], check=True)
        for name in ("lo", "eth0"):
            subprocess.run([*inside, "link", "set", name, "up"], check=True)


def free_port() -> int:
    """A port that nobody uses here now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Yield its own disk for root (tmpfs(5)), else `folder` itself."""
    folder.mkdir()
    if os.geteuid():
        yield folder
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
