"""`anabatic launch --hosts` and `--rdzv`: combine the options, the file and the job."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabatic.config.loading import settings
from anabatic.config.sections.launch import LaunchSettings
from anabatic.core.errors import ConfigError

if TYPE_CHECKING:
    from anabatic.launch.hosts.hostfile import HostEntry


@dataclass(frozen=True)
class RemoteOptions:
    """Options for the machines of the file.

    Attributes:
        python: interpreter on the machines; None: that of this machine.
        working_folder: working folder; None: the current one.
        environment_names: names of further variables to pass.
        run_preflight: compare the machines first.
        nproc: processes on each machine; None: the slots of the file.
    """

    python: str | None = None
    working_folder: str | None = None
    environment_names: tuple[str, ...] = ()
    run_preflight: bool = False
    nproc: int | None = None


def read_hosts(file: Path, remote: RemoteOptions, node_rank: str | None) -> list[HostEntry]:
    """Return the machines of a file.

    Raises:
        ConfigError: the file is invalid, or has fewer slots than `--nproc`.
    """
    from anabatic.launch.hosts import hostfile

    if node_rank is not None:
        raise ConfigError(
            "--node-rank cannot be combined with --hosts", "the order of the file is that of the machines"
        )
    hosts = hostfile.read_hostfile(file)
    for host in hosts:
        if remote.nproc is not None and host.slots is not None and remote.nproc > host.slots:
            raise ConfigError(
                f"--nproc is {remote.nproc}, but {host.name} ({file}:{host.line_number}) has slots={host.slots}",
                "leave --nproc out to use the slots of the file",
            )
    return hosts


def run_on_hosts(
    command: str, job: Any, machines: list[HostEntry], launch: LaunchSettings, remote: RemoteOptions
) -> int:
    """Run a job on the machines of a file and return its exit code.

    Args:
        command: name of the command; empty: only check the machines.

    Raises:
        ConfigError: an option is wrong, or a machine cannot take part for a reason that the user can fix.
        Failure: a machine cannot be reached, or was lost.
    """
    from anabatic.launch import job_secret
    from anabatic.launch.hosts import multi_host, remote_machine, ssh_connection

    if launch.max_nodes > len(machines):
        raise ConfigError(
            f"--nnodes is {launch.max_nodes}, but the file of --hosts names {len(machines)}",
            "leave --nnodes out to use all of them",
        )
    out = settings.job_to_dict(job).get("out") if command else None
    remote_job = remote_machine.RemoteJob(
        command=command,
        recipe=settings.dump_job(job) if command else "",
        launch=launch,
        nproc=remote.nproc,
        python=remote.python or sys.executable,
        folder=remote.working_folder or os.getcwd(),
        environment={
            job_secret.VARIABLE: job_secret.make_secret(),
            **ssh_connection.collect_remote_environment(
                remote.environment_names, include_installation=remote.python is None
            ),
        },
        out=Path(out) if out else None,
        launcher_options=("--check",) if remote.run_preflight else (),
    )
    return multi_host.run(machines[: launch.max_nodes], remote_job)


def parse_rendezvous(text: str, address: str | None, port: str | None) -> tuple[str, str]:
    """Split HOST:PORT of `--rdzv`; an IPv6 address is in brackets.

    Raises:
        ConfigError: the text is not HOST:PORT, or options with the same meaning are also given.
    """
    if address or port:
        raise ConfigError(
            "--rdzv cannot be combined with --master-addr or --master-port",
            "both name the same address: give one of them",
        )
    host, colon, port_text = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port_text:
        raise ConfigError(f"--rdzv is {text}", "give HOST:PORT, for example 192.168.1.10:29500 or [fe80::1]:29500")
    return host, port_text
