"""`anabatic launch ray`: run a job on the machines of a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from anabatic.cli.launch.option_parsing import (
    parse_float,
    parse_int_or_default,
    parse_positive_int,
    resolve_training_job,
)
from anabatic.cli.parsing.function_command import OptionNames
from anabatic.config.loading import settings, yaml_reader
from anabatic.config.sections.launch import LaunchSettings
from anabatic.core.errors import ConfigError
from anabatic.launch.schedulers import ray_cluster


def ray(
    *command: str,
    address: str = "auto",
    nnodes: Annotated[str, OptionNames(("--nnodes", "--nodes"))] = "1",
    nproc: Annotated[str | None, OptionNames(("--nproc", "--nproc-per-node", "--npus"))] = None,
    resource: str = "NPU",
    cpus: str = "1",
    pack: bool = False,
    env: tuple[str, ...] = (),
    runtime_env: str | None = None,
    max_restarts: str = "3",
    hang_seconds: str = "1800",
    join_seconds: str = "600",
) -> int:
    """Run COMMAND on the machines of a Ray cluster, in a placement group with one bundle per machine.

    Parameters
    ----------
    command
        Command and options, after `--`: sft -c recipe.yaml
    address
        Cluster address; default: RAY_ADDRESS, else the cluster on this machine.
    nnodes
        Number of machines.
    nproc
        Processes and devices per machine; default: the command's device.nproc.
    resource
        Ray resource name of the devices: NPU, GPU or a custom name; none: CPU only.
    cpus
        CPU cores to reserve per machine.
    pack
        Allow several bundles on one machine.
    env
        Environment variable for the launchers; can be repeated: HF_HOME=/data/hf
    runtime_env
        YAML or JSON file with the Ray runtime environment of the launchers: env_vars, working_dir, pip, ...
    max_restarts
        Maximum number of restarts of failed processes, and of the job if a machine or the head is lost.
    hang_seconds
        Seconds without a heartbeat after which hung processes are killed; 0: never.
    join_seconds
        Seconds to wait for the machines of the cluster and of the job.
    """
    if not command:
        raise ConfigError(
            "which command?", "for example: anabatic launch ray --nnodes 2 --nproc 8 -- sft -c recipe.yaml"
        )
    row, job = resolve_training_job(list(command))
    pairs = [text.partition("=") for text in env]
    if invalid := [key for key, separator, _ in pairs if not (key and separator)]:
        raise ConfigError(f'--env is "{invalid[0]}", not KEY=VALUE', "for example --env HF_HOME=/data/hf")
    launch = LaunchSettings(
        nproc=parse_int_or_default("nproc", nproc, settings.job_to_dict(job)["device"]["nproc"]),
        max_restarts=parse_int_or_default("max-restarts", max_restarts, 0),
        hang_seconds=parse_float("hang-seconds", hang_seconds),
        join_seconds=parse_float("join-seconds", join_seconds),
    )
    ray_job = ray_cluster.RayJob(
        address=address,
        nodes=parse_positive_int("nnodes", nnodes),
        nproc=launch.nproc,
        resource="" if resource == "none" else resource,
        cpus=parse_positive_int("cpus", cpus),
        spread_nodes=not pack,
        timeout_seconds=launch.join_seconds,
        max_restarts=launch.max_restarts,
        options=(
            f"--max-restarts={launch.max_restarts}",
            f"--hang-seconds={launch.hang_seconds:g}",
            f"--join-seconds={launch.join_seconds:g}",
        ),
        env=tuple((key, value) for key, _, value in pairs),
        runtime_env={} if runtime_env is None else yaml_reader.read_yaml(Path(runtime_env).expanduser()).tree,
    )
    return ray_cluster.run(ray_job, row.name.split(), settings.dump_job(job))
