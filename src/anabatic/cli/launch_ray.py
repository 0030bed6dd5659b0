"""`anabatic launch ray`: a job on the machines of a Ray cluster."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from anabatic.cli.launch_words import given, number, positive, training_job
from anabatic.config import load
from anabatic.config.launch import Launch
from anabatic.core.errors import ConfigError
from anabatic.launch import on_ray

_Word = Annotated[str, Parameter(negative=())]


def ray(
    *command: str,
    address: _Word = "auto",
    nnodes: Annotated[str, Parameter(name=("--nnodes", "--nodes"), negative=())] = "1",
    nproc: Annotated[str | None, Parameter(name=("--nproc", "--nproc-per-node", "--npus"), negative=())] = None,
    resource: _Word = "NPU",
    cpus: _Word = "1",
    pack: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    env: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=False, show_default=False)] = (),
    max_restarts: _Word = "3",
    hang_seconds: _Word = "1800",
    join_seconds: _Word = "600",
) -> int:
    """Run COMMAND on the machines of a Ray cluster, in a placement group of one bundle for each.

    Parameters
    ----------
    command
        The command and its options, after `--`: sft -c recipe.yaml
    address
        The cluster; default: RAY_ADDRESS, else the one that runs on this machine.
    nnodes
        Machines.
    nproc
        Processes, and devices, on each; default: the command's device.nproc.
    resource
        Ray's name of the devices: NPU, GPU or the cluster's own; none for a job on processors.
    cpus
        Cores to reserve on each machine.
    pack
        Let several bundles share a machine.
    env
        A variable for the launchers, several times: HF_HOME=/data/hf
    max_restarts
        How often processes that fail are started again.
    hang_seconds
        Seconds without a sign of life after which the processes count as hung and are ended; 0: never.
    join_seconds
        Seconds to wait for the cluster's machines, and for those of the job.
    """
    if not command:
        raise ConfigError(
            "which command?", "for example: anabatic launch ray --nnodes 2 --nproc 8 -- sft -c recipe.yaml"
        )
    row, job = training_job(list(command))
    pairs = [text.partition("=") for text in env]
    if wrong := [key for key, found, _ in pairs if not (key and found)]:
        raise ConfigError(f'--env is "{wrong[0]}", not KEY=VALUE', "for example --env HF_HOME=/data/hf")
    launch = Launch(
        nproc=given("nproc", nproc, load.tree_of(job)["device"]["nproc"]),
        max_restarts=given("max-restarts", max_restarts, 0),
        hang_seconds=number("hang-seconds", hang_seconds),
        join_seconds=number("join-seconds", join_seconds),
    )
    asked = on_ray.RayJob(
        address=address,
        nodes=positive("nnodes", nnodes),
        nproc=launch.nproc,
        resource="" if resource == "none" else resource,
        cpus=positive("cpus", cpus),
        apart=not pack,
        seconds=launch.join_seconds,
        options=(
            f"--max-restarts={launch.max_restarts}",
            f"--hang-seconds={launch.hang_seconds:g}",
            f"--join-seconds={launch.join_seconds:g}",
        ),
        env=tuple((key, value) for key, _, value in pairs),
    )
    return on_ray.run(asked, row.name.split(), load.dump(job))
