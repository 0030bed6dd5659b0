"""One machine of `--hosts`, and the ssh process that connects to it."""

from __future__ import annotations

import contextlib
import json
import queue
import shlex
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.config.sections.launch import LaunchSettings
from anabatic.core import relaunch
from anabatic.launch.hosts.hostfile import HostEntry

ANSWER_SECONDS = 60.0
"""Seconds for a machine to answer."""
SSH_FAILED_CODE = 255
"""Exit code of ssh when ssh itself failed (ssh(1))."""
_SSH_OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=15",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
    "LogLevel=ERROR",
    "ClearAllForwardings=yes",
)
"""Never ask for a password; detect within a minute that a machine is gone."""
_BOOTSTRAP_CODE = "import json,sys;exec(json.loads(sys.stdin.readline()))"


@dataclass(frozen=True)
class RemoteJob:
    """The job that all machines run.

    Attributes:
        command: command of anabatic, for example `sft`.
        recipe: the resolved settings, as YAML.
        launch: options of the launcher; its `nproc` applies where the hostfile has no slots.
        nproc: processes on each machine, if given by the user; None: the slots of the hostfile.
        python: Python interpreter on the machines.
        folder: working directory on the machines.
        environment: environment variables for the machines.
        out: run folder, for the output of the machines.
        launcher_options: further options of the launcher.
    """

    command: str
    recipe: str
    launch: LaunchSettings
    nproc: int | None
    python: str
    folder: str
    environment: Mapping[str, str]
    out: Path | None = None
    launcher_options: tuple[str, ...] = ()


EventQueue = queue.Queue[tuple["RemoteMachine", str, str]]
"""Machine, kind and text: `out` and `err` carry lines, `end` carries the exit code of ssh."""


class RemoteMachine:
    """One machine and the connection to it.

    Attributes:
        node_rank: index of the machine, from 0.
        name: name in messages.
        answer: its facts about itself; None until it answers.
        exit_code: exit code of ssh; None while it runs.
        stderr_lines: the last lines of its standard error before it answered.
    """

    def __init__(self, node_rank: int, host: HostEntry, name: str, python: str, events: EventQueue) -> None:
        self.node_rank, self.host, self.name, self.events = node_rank, host, name, events
        self.answer: dict[str, Any] | None = None
        self.exit_code: int | None = None
        self.stderr_lines: list[str] = []
        with (
            relaunch.block_group_signals()
        ):  # a signal is forwarded, and must not break the connection to a machine that saves
            self.process = subprocess.Popen(
                build_ssh_command(host, python),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        self._readers = [
            threading.Thread(target=self._read_stream, args=(name,), daemon=True) for name in ("out", "err")
        ]
        for reader in self._readers:
            reader.start()
        threading.Thread(target=self._wait_for_end, daemon=True).start()

    @property
    def is_lost(self) -> bool:
        """True when the connection ended rather than the job: ssh failed (ssh(1): 255), or was killed."""
        return self.exit_code is not None and (self.exit_code == SSH_FAILED_CODE or self.exit_code < 0)

    def send_line(self, value: Any) -> None:
        """Send one line; a lost machine is detected by the end of its ssh process."""
        stream = self.process.stdin
        assert stream is not None
        try:
            stream.write(json.dumps(value) + "\n")
            stream.flush()
        except (BrokenPipeError, ValueError):
            return

    def kill_connection(self) -> None:
        """Close the connection; the processes on the machine end with it."""
        self.process.kill()

    def _read_stream(self, name: str) -> None:
        stream = self.process.stdout if name == "out" else self.process.stderr
        assert stream is not None
        for line in stream:
            self.events.put((self, name, line.rstrip("\n")))

    def _wait_for_end(self) -> None:
        code = self.process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream and stream.close()
        self.events.put((self, "end", str(code)))


def build_ssh_command(host: HostEntry, python: str) -> list[str]:
    """Return the ssh command line that starts `remote_agent.py` on a host."""
    command = ["ssh", "-T", *(argument for option in _SSH_OPTIONS for argument in ("-o", option))]
    command += ["-p", str(host.port)] if host.port is not None else []
    command += ["-l", host.user] if host.user else []
    return [*command, "--", host.name, f"exec {shlex.quote(python)} -u -c {shlex.quote(_BOOTSTRAP_CODE)}"]
