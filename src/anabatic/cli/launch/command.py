"""`anabatic launch`: run a training command in several processes on one or many machines, restarted on failure."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from anabatic.api import job_runner
from anabatic.cli.launch import hosts as hosts_module
from anabatic.cli.launch.option_parsing import (
    parse_float,
    parse_int,
    parse_int_or_default,
    parse_node_range,
    parse_positive_int,
    resolve_training_job,
)
from anabatic.cli.parsing.function_command import OptionNames
from anabatic.config.loading import settings as settings_module
from anabatic.config.sections.launch import LaunchSettings
from anabatic.core.errors import ConfigError
from anabatic.launch.schedulers import env_variables


def run(
    *command: str,
    nproc: Annotated[str | None, OptionNames(("--nproc", "--nproc-per-node", "--npus"))] = None,
    nnodes: str | None = None,
    node_rank: str | None = None,
    master_addr: str | None = None,
    master_port: str | None = None,
    job_id: str = "anabatic",
    max_restarts: str = "0",
    max_requeues: str = "3",
    hang_seconds: str = "1800",
    join_seconds: str = "600",
    rdzv: str | None = None,
    hosts: Path | None = None,
    hosts_python: str | None = None,
    hosts_cwd: str | None = None,
    hosts_env: tuple[str, ...] = (),
    preflight: Annotated[bool, OptionNames(("--check",))] = False,
) -> int:
    """Run a training COMMAND in several processes. Run it on every machine, or list the machines in a file.

    Parameters
    ----------
    command
        Command and options, after `--`: sft -c recipe.yaml
    nproc
        Processes on this machine, one per device; default: NPROC_PER_NODE, else the command's device.nproc.
    nnodes
        Number of machines: 2, or 1:4 to continue with the remaining ones; default: NNODES or the scheduler's, else 1.
    node_rank
        Rank of this machine, from 0; default: NODE_RANK or the scheduler's, else the order of addresses.
    master_addr
        Host name or address of machine 0, the same on every machine; default: MASTER_ADDR or the scheduler's.
    master_port
        Port on machine 0; default: MASTER_PORT, else 29500.
    job_id
        Job name that keeps jobs on the same port apart.
    max_restarts
        Maximum number of restarts after a failure; processes continue from the newest checkpoint.
    max_requeues
        Maximum number of consecutive starts by Slurm without a new checkpoint; 0: unlimited.
    hang_seconds
        Seconds without a heartbeat after which hung processes are killed; 0: never.
    join_seconds
        Seconds to wait for the other machines.
    rdzv
        Rendezvous HOST:PORT, as in torchrun: --master-addr and --master-port in one option.
    hosts
        File with one machine per line; COMMAND is started on each over ssh.
    hosts_python
        Python interpreter on those machines; default: this one's path.
    hosts_cwd
        Working directory on those machines; default: the current one.
    hosts_env
        Environment variable to pass on; can be repeated: WANDB_API_KEY
    preflight
        Compare the machines and measure the network between them before COMMAND starts; without COMMAND, only that.
    """
    if not command and not preflight:
        raise ConfigError("which command?", "for example: anabatic launch --nproc 8 -- sft -c recipe.yaml")
    row, job = resolve_training_job(list(command)) if command else (None, None)
    tree = settings_module.job_to_dict(job) if row else None
    if rdzv:
        master_addr, master_port = hosts_module.parse_rendezvous(rdzv, master_addr, master_port)
    remote = hosts_module.RemoteOptions(hosts_python, hosts_cwd, hosts_env, preflight, nproc=parse_int("nproc", nproc))
    host_entries = hosts_module.read_hosts(hosts, remote, node_rank) if hosts else []
    if host_entries:
        nnodes, master_addr = nnodes or str(len(host_entries)), master_addr or host_entries[0].name
    env = env_variables.read_launch_variables(os.environ)
    min_nodes, max_nodes = parse_node_range(nnodes or env.get("NNODES") or "1")
    default_nproc = tree["device"]["nproc"] if tree else 1
    launch = LaunchSettings(
        nproc=parse_int_or_default("nproc", env.get("NPROC_PER_NODE") if nproc is None else nproc, default_nproc),
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_rank=parse_int("node-rank", node_rank or env.get("NODE_RANK")) if max_nodes > 1 else None,
        master_addr=master_addr or env.get("MASTER_ADDR"),
        master_port=parse_int_or_default(
            "master-port", env.get("MASTER_PORT") if master_port is None else master_port, 29500
        ),
        job_id=job_id,
        max_restarts=parse_int_or_default("max-restarts", max_restarts, 0),
        max_requeues=parse_int_or_default("max-requeues", max_requeues, 3),
        hang_seconds=parse_float("hang-seconds", hang_seconds),
        join_seconds=parse_float("join-seconds", join_seconds),
    )
    if host_entries:
        return hosts_module.run_on_hosts(row.name if row else "", job, host_entries, launch, remote)
    if launch.is_multi_node and launch.master_addr and not (master_addr or os.environ.get("MASTER_ADDR")):
        env_variables.await_host_name(launch.master_addr, launch.join_seconds)
    if preflight:
        from anabatic.launch.preflight import check_machines

        check_machines.run(launch, tree)
    if row is None:
        return 0
    return job_runner.launch_processes(row, job, launch)


def slurm(
    *command: str,
    nnodes: Annotated[str, OptionNames(("--nnodes", "--nodes"))] = "1",
    nproc: Annotated[str | None, OptionNames(("--nproc", "--nproc-per-node", "--npus"))] = None,
    name: str = "anabatic",
    gres: str | None = None,
    grace: str = "120",
    max_restarts: str = "3",
    max_requeues: str = "3",
    option: Annotated[tuple[str, ...], OptionNames(takes_hyphens=True)] = (),
    setup: tuple[str, ...] = (),
    submit: bool = False,
) -> int:
    """Print a Slurm batch script that runs COMMAND on the machines of an allocation, or submit it.

    Parameters
    ----------
    command
        Command and options, after `--`: sft -c recipe.yaml
    nnodes
        Number of machines.
    nproc
        Processes per machine, one per device; default: the command's device.nproc.
    name
        Job name.
    gres
        GRES name of the devices at your site, for example gpu; empty: none; default: npu.
    grace
        Seconds before the time limit at which the job saves a checkpoint and stops.
    max_restarts
        Maximum number of restarts of failed processes within the job.
    max_requeues
        Maximum number of consecutive starts without a new checkpoint; 0: unlimited.
    option
        Additional sbatch option; can be repeated: --option=--partition=train --option=--time=24:00:00
    setup
        Shell line to run before the command; can be repeated: "source /opt/venv/bin/activate"
    submit
        Submit the script with sbatch.
    """
    if not command:
        raise ConfigError("which command?", "for example: anabatic launch slurm --nnodes 2 -- sft -c recipe.yaml")
    from anabatic.launch.schedulers import slurm as slurm_scripts

    first_task = [word.replace(slurm_scripts.ARRAY_TASK, "0") for word in command]
    words = first_task if slurm_scripts.is_array(option) else list(command)
    _, job = resolve_training_job(words)  # errors are reported now, not after a night in the queue
    default_nproc = settings_module.job_to_dict(job)["device"]["nproc"]
    launch = LaunchSettings(
        nproc=parse_int_or_default("nproc", nproc, default_nproc),
        max_restarts=parse_int_or_default("max-restarts", max_restarts, 0),
        max_requeues=parse_int_or_default("max-requeues", max_requeues, 3),
    )
    batch = slurm_scripts.SlurmJob(
        name=name,
        nodes=parse_positive_int("nnodes", nnodes),
        nproc=launch.nproc,
        gres=slurm_scripts.DEFAULT_GRES if gres is None else gres,
        grace=parse_positive_int("grace", grace),
        options=option,
        max_restarts=launch.max_restarts,
        max_requeues=launch.max_requeues,
        setup=setup,
    )
    text = slurm_scripts.render_script(batch, list(command))
    sys.stdout.write(f"{slurm_scripts.submit_script(text)}\n" if submit else text)
    return 0
