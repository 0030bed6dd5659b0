"""A Ray cluster of two machines on this one, made by `ray start --block` as on real ones, and damaged on purpose.

The machines are two raylets with addresses of their own on the loopback device; each offers NPUs that it does not have.
The cluster asks for a token and has no dashboard.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ADDRESSES = ("127.0.0.2", "127.0.0.3")
"""Not 127.0.0.1, in whose place Ray puts the address of the network."""
DEVICES = ("0,1", "2,3")
"""Values of ASCEND_RT_VISIBLE_DEVICES of the machines."""
HEAD, RAYLET = "gcs_server", "raylet"
_START_SECONDS = 60.0


class RayMachine:
    """One machine: `ray start --block` and what it has started.

    Args:
        number: 0 is the head.
        port: of the head.
        folder: for files of Ray and the log of its command.
        environment: variables that the cluster's processes share.
    """

    def __init__(self, number: int, port: int, folder: Path, environment: dict[str, str]) -> None:
        self.number, self.address, self._folder = number, ADDRESSES[number], folder
        self._environment = {**environment, "ASCEND_RT_VISIBLE_DEVICES": DEVICES[number]}
        self._place = ["--address", f"{ADDRESSES[0]}:{port}"]
        if number == 0:
            self._place = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder / 'ray'}"]
        self.log = folder / f"ray-{number}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, or start it again."""
        words = [str(Path(sys.executable).with_name("ray")), "start", "--block", *self._place]
        words += [f"--node-ip-address={self.address}", "--num-cpus=2", '--resources={"NPU": 2}']
        words += ["--object-store-memory=80000000", "--min-worker-port=0", "--max-worker-port=0"]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                words,
                cwd=self._folder,  # a test's own folder goes before the machine that it has started again
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Return its processes, those of a program alone where one is named; `gcs_server`, `raylet`, `ray::RayNode`."""
        if self.process is None or self.process.poll() is not None:
            return []
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if not name or Path(" ".join(one.cmdline()[:1]).partition(" ")[0]).name == name:
                        found.append(one)
        return found

    def kill(self, name: str = "") -> None:
        """kill -9 for the processes of a program; without a name for all of the machine."""
        found = self.processes(name)
        if not name and self.process is not None:
            found.insert(0, psutil.Process(self.process.pid))
        for one in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)

    def has_ended(self) -> bool:
        """Reap it; return whether it has ended. What Ray does about a part that was killed is given its time."""
        return self.process is None or self.process.poll() is not None

    def end(self) -> None:
        """End all of it."""
        below = self.processes()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for one in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(below, timeout=30)


class RayCluster:
    """The head and another machine.

    Attributes:
        variables: by which a command is let in.
    """

    def __init__(self, folder: Path) -> None:
        port = _find_free_port()
        self.address = f"{ADDRESSES[0]}:{port}"
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        shared = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        shared |= {**self.variables, "RAY_USAGE_STATS_ENABLED": "0"}
        self.machines = [RayMachine(number, port, folder, shared) for number in range(len(ADDRESSES))]

    def start(self) -> None:
        """Start the machines that do not run, and wait until all have joined.

        Raises:
            TimeoutError: they do not.
        """
        for machine in self.machines:
            if machine.has_ended():
                machine.start()
        deadline = time.monotonic() + _START_SECONDS
        while not all(machine.processes(RAYLET) and _has_started(machine) for machine in self.machines):
            if time.monotonic() > deadline:
                logs = "\n".join(machine.log.read_text()[-3000:] for machine in self.machines)
                raise TimeoutError(f"the machines of Ray did not come:\n{logs}")
            time.sleep(0.1)


def _has_started(machine: RayMachine) -> bool:
    text = machine.log.read_text()
    return text.rfind("Ray runtime started") > text.rfind("Local node IP")


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Start a cluster with its files in a folder of a short name, and end it."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # the path of a socket has 107 bytes at most
    cluster = RayCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        for machine in reversed(cluster.machines):
            machine.end()
        shutil.rmtree(folder, ignore_errors=True)


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESSES[0], 0))
        return int(probe.getsockname()[1])
