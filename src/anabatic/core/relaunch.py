"""Constants and helpers of processes that start this program again: environment variables, exit codes, signals."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

PROGRAM_COMMAND = (sys.executable, "-m", "anabatic")
"""Command line of this program, without a command and its options."""
REPORTS_VARIABLE = "ANABATIC_REPORTS"
"""Environment variable: folder in which a worker writes `rank-N.error` and `rank-N.code` for its launcher."""
NATIVE_STDERR_FILE = "rank-{}.native"
"""File in that folder: what libraries wrote to the standard error of a rank."""
FAILED_RANKS_FILE = "failed.json"
"""File in that folder: rank and exit code of each worker that failed before the others were stopped."""
EXPLAIN_VARIABLE = "ANABATIC_EXPLAIN"
"""Environment variable: `0` omits the hint of the knowledge base of `anabatic explain`."""
RETRY_VARIABLE = "ANABATIC_RETRY"
"""Environment variable, set for workers that replace failed ones."""

SUPERVISED_VARIABLE = "ANABATIC_SUPERVISED"
"""Environment variable of a process whose parent decides, for all its children, when a second Ctrl-C ends them."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, the convention of shells."""
EXIT_PREEMPTED = 143
"""Exit code of a run that a scheduler preempted and that saved a checkpoint: 128 + SIGTERM; to be queued again.

Kubernetes never restarts a pod that ends with 0; Kubeflow's `restartPolicy: ExitCode` retries 128 to 255
(kubeflow.org, "PyTorchJob"), Slurm the codes that its `RequeueExit` lists (slurm.conf(5)).
"""
EXIT_KILLED = 137
"""Exit code that a shell gives for a program ended by SIGKILL: 128 + 9."""
EXIT_USER_ERROR = 2
"""Exit code of an error that the user has to fix."""
EXIT_RESTART = 4
"""Exit code of a worker that requests a restart and has written its changed settings: not a failure, and not counted
as a restart."""
RESTART_FILE = "again"
"""File in the reports folder that announces a restart before the worker ends: ranks waiting for it may end first."""
EXIT_RENDEZVOUS_LOST = 3
"""Exit code of an agent that lost the others or the rendezvous; a retry may succeed."""

_GROUP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that schedulers, service managers and terminals send to all processes of a job."""
_PR_SET_PDEATHSIG = 1
"""prctl(2): option that sets the signal a process gets when its parent ends."""


def get_reports_folder() -> Path | None:
    """Return the folder for the reports of this worker; None without a launcher."""
    folder = os.environ.get(REPORTS_VARIABLE)
    return Path(folder) if folder else None


def write_exit_code(code: int, rank: int) -> None:
    """Write the exit code for the launcher, if there is one."""
    if (folder := get_reports_folder()) is not None:
        (folder / f"rank-{rank}.code").write_text(str(code), encoding="utf-8")


@contextmanager
def block_group_signals() -> Iterator[None]:
    """Block the group signals in processes that are started inside this context.

    A child unblocks them when it can handle them, or never: a helper of one process of a job ends with that process,
    at the end of its input, and not by a signal that is meant for the job.
    """
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def unblock_group_signals() -> None:
    """Unblock the group signals; pending ones are delivered."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GROUP_SIGNALS)


def ignore_group_signals() -> None:
    """Ignore the group signals in this process only; its children handle them as usual."""
    for signum in _GROUP_SIGNALS:
        signal.signal(signum, lambda *_: None)  # an ignored signal would stay ignored in every program started here
    unblock_group_signals()


def redirect_native_stderr(path: Path) -> None:
    """Redirect what native libraries write to standard error to a file; `sys.stderr` of Python stays as it was.

    The last message of a library that aborts the process, such as HCCL's watchdog, would be lost among the lines of
    all ranks; the launcher reads it from the file.
    """
    original_fd = os.dup(2)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stderr = open(original_fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115


def die_with_parent() -> None:
    """Kill this process when its parent ends: an orphaned rank would keep its device forever."""
    tie_to_parent()
    if os.getppid() == 1:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def tie_to_parent() -> None:
    """Do the same in a `preexec_fn`, where the parent exists and may be process 1 of a container."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_process(code: int) -> NoReturn:
    """End this process without the shutdown of the interpreter; `atexit` functions still run.

    If the interpreter shuts down while another thread is in a library, that thread is unwound when it requests the
    GIL (CPython, `PyThread_exit_thread`), and a C++ destructor on the way aborts the process: exit code 134.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def build_child_environment() -> dict[str, str]:
    """Return the environment for a child process with the same module path.

    `python -m` puts the current folder first on the module path, the `anabatic` script does not: a `random.py` of the
    user must not break the child only. (Python 3.10 does not know the variable.)
    """
    variables = dict(os.environ)
    if not {"", os.getcwd()}.intersection(sys.path):
        variables["PYTHONSAFEPATH"] = "1"
    return variables
