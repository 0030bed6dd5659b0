"""Write and submit a Slurm batch script that runs `anabatic launch` on every machine of an allocation.

Options of sbatch and variables as in sbatch(1) and srun(1), schedmd.com.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from anabatic.core import relaunch
from anabatic.core.errors import ConfigError, Failure
from anabatic.launch import job_secret

DEFAULT_GRES = "npu"
"""Default kind of devices to request."""


@dataclass(frozen=True)
class SlurmJob:
    """Resources and options of a Slurm job.

    Attributes:
        name: name of the job.
        nodes: number of machines.
        nproc: processes, and devices, on each machine.
        gres: the site's name of the devices, `npu` or `gpu`; empty: none are requested.
        grace: seconds before the end of the time limit at which the job is asked to save.
        options: further options of sbatch, for example `--partition=train`, one per line.
        max_restarts: how often failed processes are restarted within the job.
        max_requeues: starts in a row without a new checkpoint after which the job fails; 0: any number.
        setup: shell lines before the command: modules, environments.
    """

    name: str
    nodes: int
    nproc: int
    gres: str = DEFAULT_GRES
    grace: int = 120
    options: tuple[str, ...] = ()
    max_restarts: int = 3
    max_requeues: int = 3
    setup: tuple[str, ...] = ()


ARRAY_TASK = "%a"
"""Stands for the number of an array's task in the words of a command, as it does in sbatch's names of files."""


def is_array(options: Iterable[str]) -> bool:
    """Return whether options of sbatch ask for an array of jobs."""
    return any(re.match(r"--array(=|\s|$)|-a", option) for option in options)


def render_script(batch: SlurmJob, command: list[str]) -> str:
    """Return the batch script that runs a training command.

    In an array of jobs, `%a` in a word of the command is the number of the task.

    Raises:
        ConfigError: a value does not fit on one line of the script, or all tasks of an array would be the same run.
    """
    array = is_array(batch.options)
    if array and not any(ARRAY_TASK in word for word in command):
        raise ConfigError(
            "--array starts several runs, and no word of the command distinguishes them",
            f"write {ARRAY_TASK}, the number of the task, into it: --out runs/seed-{ARRAY_TASK} --seed {ARRAY_TASK}",
        )
    for option, value in (("name", batch.name), *(("option", extra) for extra in batch.options), ("gres", batch.gres)):
        if not value.isprintable() or (not value.strip() and option != "gres"):
            raise ConfigError(f"--{option} is {value!r}", "write one line of text")
    options = [
        _quote_option(f"--job-name={batch.name}"),
        f"--nodes={batch.nodes}",
        "--ntasks-per-node=1",
        *([_quote_option(f"--gres={batch.gres}:{batch.nproc}")] if batch.gres else []),
        f"--signal=TERM@{batch.grace}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%A_%a.log" if array else "--output=%x-%j.log",
        *batch.options,
    ]
    launch = ["anabatic", "launch", f"--nproc={batch.nproc}", f"--max-restarts={batch.max_restarts}"]
    launch += [f"--max-requeues={batch.max_requeues}"]
    if batch.nodes > 1:
        launch += [f"--nnodes={batch.nodes}"]
    rank = 'export NODE_RANK="$SLURM_NODEID"; ' if batch.nodes > 1 else ""
    started = f"{shlex.join([*launch, '--'])} {_join_words(command, array)}"
    inner = f"{_TRAP_SIGNALS}; {rank}{started}; code=$?; {_SHIFT_EXIT_CODE}"
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        "",
        *batch.setup,
        *(_RENDEZVOUS_LINES if batch.nodes > 1 else ()),
        "# One launcher on each machine; it starts the processes. Its log is appended to after every requeue.",
        f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(inner)}",
        "code=$?",
        f'if [ "$code" -ge {_FAILURE_CODE_OFFSET} ] && [ "$code" -lt {_FAILURE_CODE_OFFSET + 64} ]; '
        f"then code=$((code - {_FAILURE_CODE_OFFSET})); fi",
        "# Queued again: a job that was asked to stop and has saved, or whose launcher was killed (SIGKILL).",
        f'if [ "$code" -eq {relaunch.EXIT_PREEMPTED} ] || [ "$code" -eq {relaunch.EXIT_KILLED} ]; then',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
        "",
    ]
    return "\n".join(lines)


def _join_words(words: Sequence[str], array: bool) -> str:
    """Quote words for a shell, which puts the number of an array's task in their `%a`."""
    if not array:
        return shlex.join(words)
    task = '"$SLURM_ARRAY_TASK_ID"'
    return " ".join(
        task.join(shlex.quote(part) if part else "" for part in word.split(ARRAY_TASK)) or "''" for word in words
    )


def _quote_option(text: str) -> str:
    """Quote an option with characters that sbatch does not accept as they are; it reads quotes as a shell does."""
    return text if re.fullmatch(r"[\w=:.,/%@+-]*", text) else shlex.quote(text)


_FAILURE_CODE_OFFSET = 160
"""Offset added to the exit code of a launcher that failed.

srun returns the highest code of all machines and stops the others with SIGTERM, after which they save and exit with
143: without the offset a job that has failed on one machine would be requeued because of the others.
"""
_TRAP_SIGNALS = "trap : TERM INT HUP USR1"
"""Makes the shell wait for its command despite signals: Slurm's signals reach the command as well."""
_SHIFT_EXIT_CODE = (
    f'case "$code" in 0|{relaunch.EXIT_PREEMPTED}) exit "$code";; esac; exit $((code < 64 ? code + '
    f"{_FAILURE_CODE_OFFSET} : code))"
)
_RENDEZVOUS_LINES = (
    'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
    'export MASTER_PORT="$((20000 + SLURM_JOB_ID % 20000))"',
    f'export {job_secret.VARIABLE}="$({job_secret.SHELL_COMMAND})"',
)
"""Machine 0 is the first of the list, as for SLURM_NODEID; jobs on the same machine get different ports; each start has
a secret of its own, which srun hands to the machines."""


def submit_script(text: str) -> str:
    """Submit a batch script with sbatch and return its output.

    Raises:
        ConfigError: there is no sbatch here.
        Failure: sbatch refuses the script.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError("there is no sbatch on the PATH", "leave --submit out, and take the script to a login node")
    result = subprocess.run(["sbatch"], input=text, capture_output=True, text=True, check=False)
    if result.returncode:
        raise Failure(
            f"sbatch refuses with exit code {result.returncode}: {' '.join(result.stderr.split())}",
            "change what it rejects with --option, for example --option=--partition=train",
        )
    return result.stdout.strip()
