"""`anabatic launch`: a training command in several processes, on one machine or many, started again when one fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from anabatic.cli.launch_words import machines, number, positive, training_job, whole
from anabatic.config import commands, load
from anabatic.config.launch import Launch
from anabatic.core.errors import ConfigError
from anabatic.launch import scheduler

_USAGE = """Usage: anabatic launch [OPTIONS] -- COMMAND [OPTIONS OF THE COMMAND]
       anabatic launch slurm|k8s|ray [OPTIONS] -- COMMAND [OPTIONS OF THE COMMAND]"""
app = App(
    name="launch",
    help="Run a training command in several processes, on one machine or many, and keep it alive.",
    usage=_USAGE,
    default_parameter=None,
)
app.command("anabatic.cli.launch_k8s:k8s", name="k8s", help="Write a Volcano Job or PyTorchJob, or submit it.")
app.command("anabatic.cli.launch_ray:ray", name="ray", help="Run COMMAND on the nodes of a Ray cluster.")
_Word = Annotated[str | None, Parameter(negative=())]


@app.default
def run(
    *command: str,
    nproc: Annotated[str | None, Parameter(name=("--nproc", "--nproc-per-node", "--npus"), negative=())] = None,
    nnodes: _Word = None,
    node_rank: _Word = None,
    master_addr: _Word = None,
    master_port: _Word = None,
    job_id: Annotated[str, Parameter(negative=())] = "anabatic",
    max_restarts: Annotated[str, Parameter(negative=())] = "0",
    hang_seconds: Annotated[str, Parameter(negative=())] = "1800",
    join_seconds: Annotated[str, Parameter(negative=())] = "600",
    rdzv: _Word = None,
    hosts: Annotated[Path | None, Parameter(negative=())] = None,
    hosts_python: _Word = None,
    hosts_cwd: _Word = None,
    hosts_env: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=False)] = (),
    check: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Run COMMAND, one that trains, in several processes; type the same on every machine, or name them in a file.

    Parameters
    ----------
    command
        The command and its options, after `--`: sft -c recipe.yaml
    nproc
        Processes on this machine, one per device; default: NPROC_PER_NODE, else the command's device.nproc.
    nnodes
        Machines: 2, or 1:4 for a job that goes on with those that are left; default: NNODES or a scheduler's, else 1.
    node_rank
        Place of this machine, from 0; default: NODE_RANK or a scheduler's, else in the order of their addresses.
    master_addr
        Name or address of machine 0, the same on every machine; default: MASTER_ADDR or a scheduler's.
    master_port
        Port there; default: MASTER_PORT, else 29500.
    job_id
        Jobs of another name do not meet on the same port.
    max_restarts
        How often all processes are started again after a failure; they continue from the newest checkpoint.
    hang_seconds
        Seconds without a sign of life after which the processes count as hung and are ended; 0: never.
    join_seconds
        Seconds to wait for the other machines.
    rdzv
        HOST:PORT where the machines meet: --master-addr and --master-port in one word, as torchrun has it.
    hosts
        File with one machine a line; COMMAND is started on all of them over ssh, from here.
    hosts_python
        Python on those machines; default: the path of this one.
    hosts_cwd
        Folder to work in there; default: this one.
    hosts_env
        Name of a further variable to give them, several times: WANDB_API_KEY
    check
        Compare the machines and measure what is between them before COMMAND begins; without COMMAND, only that.
    """
    if not command and not check:
        raise ConfigError("which command?", "for example: anabatic launch --nproc 8 -- sft -c recipe.yaml")
    row, job = training_job(list(command)) if command else (None, None)
    alive: dict[str, Any] = {
        "job_id": job_id,
        "max_restarts": whole("max-restarts", max_restarts) or 0,
        "hang_seconds": number("hang-seconds", hang_seconds),
        "join_seconds": number("join-seconds", join_seconds),
    }
    if rdzv:
        master_addr, master_port = _meeting(rdzv, master_addr, master_port)
    if hosts:
        from anabatic.cli import launch_hosts

        given = launch_hosts.Given(
            nproc=whole("nproc", nproc),
            nnodes=machines(nnodes) if nnodes else None,
            master_addr=master_addr,
            python=hosts_python,
            folder=hosts_cwd,
            variables=hosts_env,
        )
        launch_hosts.refuse({"--node-rank": node_rank})
        return launch_hosts.run(
            row.name if row else "",
            job,
            hosts,
            given,
            words=("--check",) if check else (),
            master_port=whole("master-port", master_port) or 29500,
            **alive,
        )
    told = scheduler.place(os.environ)
    least, most = machines(nnodes or told.get("NNODES") or "1")
    launch = Launch(
        nproc=whole("nproc", nproc or told.get("NPROC_PER_NODE"))
        or (load.tree_of(job)["device"]["nproc"] if row else 1),
        min_nodes=least,
        max_nodes=most,
        node_rank=whole("node-rank", node_rank or told.get("NODE_RANK")) if most > 1 else None,
        master_addr=master_addr or told.get("MASTER_ADDR"),
        master_port=whole("master-port", master_port or told.get("MASTER_PORT")) or 29500,
        **alive,
    )
    return _here(row, job, launch, check, own=bool(master_addr or os.environ.get("MASTER_ADDR")))


def _here(row: commands.Command | None, job: Any, launch: Launch, check: bool, own: bool) -> int:
    """Compare the machines where that is asked for, and run the command where there is one.

    Args:
        own: the name of machine 0 is the user's, not one that a scheduler gives before that machine runs.
    """
    if launch.several and launch.master_addr and not own:
        scheduler.await_name(launch.master_addr, launch.join_seconds)
    if check:
        from anabatic.launch import preflight

        preflight.run(launch, load.tree_of(job) if row else None)
    if row is None:
        return 0
    from anabatic.cli import job as jobs

    return jobs.spread(row, job, launch)


@app.command
def slurm(
    *command: str,
    nnodes: Annotated[str, Parameter(name=("--nnodes", "--nodes"), negative=())] = "1",
    nproc: Annotated[str | None, Parameter(name=("--nproc", "--nproc-per-node", "--npus"), negative=())] = None,
    name: Annotated[str, Parameter(negative=())] = "anabatic",
    gres: _Word = None,
    grace: Annotated[str, Parameter(negative=())] = "120",
    max_restarts: Annotated[str, Parameter(negative=())] = "3",
    option: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=False, allow_leading_hyphen=True)] = (),
    setup: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=False)] = (),
    submit: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Print a batch script for Slurm that runs COMMAND on the machines of an allocation, or submit it.

    Parameters
    ----------
    command
        The command and its options, after `--`: sft -c recipe.yaml
    nnodes
        Machines.
    nproc
        Processes on each, one per device; default: the command's device.nproc.
    name
        Name of the job.
    gres
        Kind of the devices as the site names it, gpu for one; an empty text asks for none; default: npu.
    grace
        Seconds before the end of the time limit at which the job is told to save itself.
    max_restarts
        How often processes that fail are started again within the job.
    option
        Another option of sbatch, several times: --option=--partition=train --option=--time=24:00:00
    setup
        A line of the shell before the command, several times: "source /opt/venv/bin/activate"
    submit
        Hand the script to sbatch.
    """
    if not command:
        raise ConfigError("which command?", "for example: anabatic launch slurm --nnodes 2 -- sft -c recipe.yaml")
    _, job = training_job(list(command))  # what is wrong with it is told here, not after a night in the queue
    from anabatic.launch import slurm as scripts

    batch = scripts.Batch(
        name=name,
        nodes=positive("nnodes", nnodes),
        nproc=positive("nproc", nproc) if nproc else load.tree_of(job)["device"]["nproc"],
        gres=scripts.DEVICES if gres is None else gres,
        grace=positive("grace", grace),
        options=option,
        restarts=whole("max-restarts", max_restarts) or 0,
        setup=setup,
    )
    text = scripts.script(batch, list(command))
    sys.stdout.write(f"{scripts.submit(text)}\n" if submit else text)
    return 0


def _meeting(text: str, address: str | None, port: str | None) -> tuple[str, str]:
    """Split HOST:PORT; an IPv6 address stands in brackets."""
    if address or port:
        raise ConfigError("--rdzv stands beside --master-addr or --master-port", "they say the same: give one of them")
    host, colon, number = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not number:
        raise ConfigError(f"--rdzv is {text}", "give HOST:PORT, for example 192.168.1.10:29500 or [fe80::1]:29500")
    return host, number
