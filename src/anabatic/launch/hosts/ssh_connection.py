"""`anabatic launch --hosts`: the same job on every machine of a file, through the `ssh` of this machine.

One connection a machine. It carries `remote_agent.py`, the recipe and the environment on standard input, so that `ps`
shows neither; then the numbers of signals. The machines answer first, and nothing starts unless all can take part. ssh
runs
in a session of its own: Ctrl-C reaches the jobs once, from here. Options of ssh as in ssh_config(5).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.config.sections.launch import LaunchSettings
from anabatic.core import relaunch
from anabatic.core.errors import ConfigError
from anabatic.launch.hosts import remote_agent, ssh_errors
from anabatic.launch.hosts.hostfile import HostEntry

_SSH_OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=15",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
    "LogLevel=ERROR",
    "ClearAllForwardings=yes",
)
"""Never ask for a password; notice within a minute when a machine is gone."""
_BOOTSTRAP_CODE = "import json,sys;exec(json.loads(sys.stdin.readline()))"
_FORWARDED_PREFIXES = (
    "ANABATIC_",
    "ASCEND_",
    "HCCL_",
    "NCCL_",
    "GLOO_",
    "HF_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "TORCH_",
    "PYTORCH_",
    "CUDA_",
    "NPU_",
    "ACL_",
    "ACLNN_",
    "TASK_QUEUE_",
    "CPU_AFFINITY_",
    "OMP_",
    "MKL_",
    "GOMP_",
)
"""Variables that the other machines get: what steers collectives, devices and libraries."""
_FORWARDED_NAMES = ("PYTHONSAFEPATH", "NO_COLOR", "LANG", "LC_ALL", "TOOLCHAIN_HOME", "ATB_HOME_PATH")
_INSTALLATION_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Where things are installed: handed on unless another Python is named for the hosts."""
_PROCESS_VARIABLES = (relaunch.REPORTS_VARIABLE, relaunch.RETRY_VARIABLE)
"""Of one process only."""


@dataclass(frozen=True)
class RemoteJob:
    """What all machines are to run.

    Attributes:
        command: for example `sft`.
        recipe: the resolved settings, as YAML.
        launch: options of the launcher; its `nproc` holds where the file says no slots.
        nproc: processes on each machine when they were asked for; None: the slots of the file.
        python: interpreter on the machines.
        folder: the folder in which they work.
        environment: what they are given.
        out: run folder, for what the machines print.
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


def collect_remote_environment(more: Sequence[str], installation: bool) -> dict[str, str]:
    """Return the variables that the other machines get.

    Args:
        more: names of further ones.
        installation: also where Python and the libraries are.

    Raises:
        ConfigError: one of `more` is not set.
    """
    here = relaunch.build_child_environment()
    names = {name for name in here if name.startswith(_FORWARDED_PREFIXES)} | set(_FORWARDED_NAMES) | set(more)
    names |= set(_INSTALLATION_VARIABLES) if installation else set()
    for name in more:
        if name not in here:
            raise ConfigError(f"--hosts-env {name}: there is no such variable here", f"export {name}=... first")
    return {name: here[name] for name in sorted(names - set(_PROCESS_VARIABLES)) if name in here}


EventQueue = queue.Queue[tuple["RemoteMachine", str, str]]
"""Machine, kind and text: lines of `out` and `err`, and `end` with the exit code of ssh."""


class RemoteMachine:
    """One machine and the connection to it.

    Attributes:
        number: its place, from 0.
        name: as messages call it.
        answer: what it says of itself; None before it has.
        exit_code: exit code of ssh; None while it runs.
        stderr_lines: the last lines of its standard error before it answered.
    """

    def __init__(self, number: int, host: HostEntry, name: str, python: str, events: EventQueue) -> None:
        self.number, self.host, self.name, self.events = number, host, name, events
        self.answer: dict[str, Any] | None = None
        self.exit_code: int | None = None
        self.stderr_lines: list[str] = []
        with (
            relaunch.block_group_signals()
        ):  # a signal is handed on, and must not cut the connection to the machine that saves
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
        """Whether the connection has ended, and not the job: ssh failed (ssh(1): 255), or was killed."""
        return self.exit_code is not None and (self.exit_code == ssh_errors.SSH_FAILED_CODE or self.exit_code < 0)

    def send_line(self, value: Any) -> None:
        """Hand one line over; a machine that is gone is noticed by its end."""
        stream = self.process.stdin
        assert stream is not None
        try:
            stream.write(json.dumps(value) + "\n")
            stream.flush()
        except (BrokenPipeError, ValueError):
            return

    def kill_connection(self) -> None:
        """Cut the connection; what runs there ends with it."""
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
    """Return the command line of ssh that starts `remote_agent.py` on a host."""
    words = ["ssh", "-T", *(word for option in _SSH_OPTIONS for word in ("-o", option))]
    words += ["-p", str(host.port)] if host.port is not None else []
    words += ["-l", host.user] if host.user else []
    return [*words, "--", host.name, f"exec {shlex.quote(python)} -u -c {shlex.quote(_BOOTSTRAP_CODE)}"]


def connect_hosts(hosts: Sequence[HostEntry], job: RemoteJob, events: EventQueue) -> list[RemoteMachine]:
    """Reach every host and return the machines once all have answered.

    Raises:
        ConfigError: there is no ssh here, or a machine cannot take part for a reason that its owner can mend.
        Failure: a machine cannot be reached.
    """
    if shutil.which("ssh") is None:
        raise ConfigError(
            "there is no ssh on the PATH", "install openssh-client, or start the command on every machine"
        )
    program = Path(remote_agent.__file__).read_text(encoding="utf-8")
    often = Counter(host.name for host in hosts)  # two containers of one machine differ by the port alone
    names = [host.name if often[host.name] == 1 else f"{host.name} port {host.port}" for host in hosts]
    machines = [RemoteMachine(place, host, names[place], job.python, events) for place, host in enumerate(hosts)]
    try:
        several = len(hosts) > 1
        for machine in machines:
            machine.send_line(program)
            who = {"environment": dict(job.environment), "folder": job.folder, "port": job.launch.master_port}
            machine.send_line(
                {**who, "master": job.launch.master_addr if several else "", "first": machine.number == 0}
            )
        _await_answers(machines, events)
        ssh_errors.require_all_ready(machines, job)
    except BaseException:
        for machine in machines:
            machine.kill_connection()
        raise
    return machines


def _await_answers(machines: list[RemoteMachine], events: EventQueue) -> None:
    """Wait until every machine has answered or ended."""
    deadline = time.monotonic() + ssh_errors.ANSWER_SECONDS
    while any(machine.answer is None and machine.exit_code is None for machine in machines):
        try:
            machine, kind, text = events.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            return
        if kind == "end":
            machine.exit_code = int(text)
        elif kind == "out" and text.startswith(remote_agent.ANSWER_PREFIX):
            machine.answer = json.loads(text[len(remote_agent.ANSWER_PREFIX) :])
        elif kind == "err":
            machine.stderr_lines = [*machine.stderr_lines, text][-20:]


def list_launcher_arguments(job: RemoteJob, host: HostEntry, number: int) -> Iterator[str | None]:
    """Yield the words after `anabatic` for one machine; None stands for the recipe's file."""
    launch = job.launch
    yield from ("launch", "--nproc", str(job.nproc or host.slots or launch.nproc))
    if launch.is_multi_node:
        fixed = launch.min_nodes == launch.max_nodes
        yield from ("--nnodes", str(launch.max_nodes) if fixed else f"{launch.min_nodes}:{launch.max_nodes}")
        yield from ("--node-rank", str(number)) if fixed or "--check" in job.launcher_options else ()
        yield from ("--master-addr", str(launch.master_addr), "--master-port", str(launch.master_port))
    yield from ("--job-id", launch.job_id, "--max-restarts", str(launch.max_restarts))
    yield from ("--hang-seconds", f"{launch.hang_seconds:g}", "--join-seconds", f"{launch.join_seconds:g}")
    yield from job.launcher_options
    if job.command:
        yield from ("--", *job.command.split(), "-c", None)


def get_host_log_path(job: RemoteJob, number: int) -> Path:
    """Return the file for what a machine prints, in the run folder on this machine."""
    return Path(job.out or os.curdir) / f"host-{number}.log"
