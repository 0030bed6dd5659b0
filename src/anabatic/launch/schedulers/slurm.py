"""A batch script for Slurm that runs `anabatic launch` on every machine of an allocation, and its submission.

Options of sbatch and variables as in sbatch(1) and srun(1), schedmd.com.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass

from anabatic.core import relaunch
from anabatic.core.errors import ConfigError, Failure

DEFAULT_GRES = "npu"
"""Kind of devices that is asked for unless another is named."""


@dataclass(frozen=True)
class SlurmJob:
    """What the scheduler is asked for.

    Attributes:
        name: of the job.
        nodes: machines.
        nproc: processes, and devices, on each.
        gres: kind of the devices as the site names it, `npu` or `gpu`; empty: none is asked for.
        grace: seconds before the end of the time limit at which the job is asked to save itself.
        options: further options of sbatch, `--partition=train` say, one a line.
        max_restarts: how often processes that fail are started again within the job.
        max_requeues: starts in a row without a new checkpoint after which it ends with an error; 0: any number.
        setup: lines of the shell before the command: modules, environments.
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


def render_script(batch: SlurmJob, command: list[str]) -> str:
    """Return the batch script that runs a training command.

    Raises:
        ConfigError: a value would not stay on its line of the script.
    """
    for option, value in (("name", batch.name), *(("option", one) for one in batch.options), ("gres", batch.gres)):
        if not value.isprintable() or (not value.strip() and option != "gres"):
            raise ConfigError(f"--{option} is {value!r}", "write one line of text")
    asked = [
        _quote_option(f"--job-name={batch.name}"),
        f"--nodes={batch.nodes}",
        "--ntasks-per-node=1",
        *([_quote_option(f"--gres={batch.gres}:{batch.nproc}")] if batch.gres else []),
        f"--signal=TERM@{batch.grace}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
        *batch.options,
    ]
    launch = ["anabatic", "launch", f"--nproc={batch.nproc}", f"--max-restarts={batch.max_restarts}"]
    launch += [f"--max-requeues={batch.max_requeues}"]
    if batch.nodes > 1:
        launch += [f"--nnodes={batch.nodes}"]
    rank = 'export NODE_RANK="$SLURM_NODEID"; ' if batch.nodes > 1 else ""
    inner = f"{_TRAP_SIGNALS}; {rank}{shlex.join([*launch, '--', *command])}; code=$?; {_SHIFT_EXIT_CODE}"
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in asked),
        "",
        *batch.setup,
        *_RENDEZVOUS_LINES[: 2 if batch.nodes > 1 else 0],
        "# One launcher on each machine; it starts the processes. Its log is appended to after every requeue.",
        f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(inner)}",
        "code=$?",
        f'if [ "$code" -ge {_FAILURE_CODE_OFFSET} ] && [ "$code" -lt {_FAILURE_CODE_OFFSET + 64} ]; '
        f"then code=$((code - {_FAILURE_CODE_OFFSET})); fi",
        f'if [ "$code" -eq {relaunch.EXIT_PREEMPTED} ]; then  # told to leave, and saved: once more',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
        "",
    ]
    return "\n".join(lines)


def _quote_option(text: str) -> str:
    """Quote a word that holds more than sbatch takes as it stands; it reads quotes as a shell does."""
    return text if re.fullmatch(r"[\w=:.,/%@+-]*", text) else shlex.quote(text)


_FAILURE_CODE_OFFSET = 160
"""What is added to the exit code of a launcher that failed by itself.

srun returns the highest code of all machines, and ends those that are left by a SIGTERM, at which they save and say
143: without it a job that has failed on one machine would be put back into the queue because of the others.
"""
_TRAP_SIGNALS = "trap : TERM INT HUP USR1"
"""A shell that waits for its command whatever it is sent: the signals of Slurm reach the command as well."""
_SHIFT_EXIT_CODE = (
    f'case "$code" in 0|{relaunch.EXIT_PREEMPTED}) exit "$code";; esac; exit $((code < 64 ? code + '
    f"{_FAILURE_CODE_OFFSET} : code))"
)
_RENDEZVOUS_LINES = (
    'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
    'export MASTER_PORT="$((20000 + SLURM_JOB_ID % 20000))"',
)
"""Machine 0 is the first of the list, as SLURM_NODEID counts; jobs that share a machine get different ports."""


def submit_script(text: str) -> str:
    """Hand a batch script to sbatch and return what it says.

    Raises:
        ConfigError: there is no sbatch here.
        Failure: it refuses.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError("there is no sbatch on the PATH", "leave --submit out, and take the script to a login node")
    done = subprocess.run(["sbatch"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failure(
            f"sbatch refuses with exit code {done.returncode}: {' '.join(done.stderr.split())}",
            "change what it does not like by --option, for example --option=--partition=train",
        )
    return done.stdout.strip()
