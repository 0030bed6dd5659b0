"""How this program starts itself again."""

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
"""Command line of this program; a command and its options follow."""
REPORTS_VARIABLE = "ANABATIC_REPORTS"
"""Environment variable: folder in which a worker leaves `rank-N.error` and `rank-N.code` for its launcher."""
NATIVE_STDERR_FILE = "rank-{}.native"
"""File there: what libraries have written to the standard error of a rank."""
FAILED_RANKS_FILE = "failed.json"
"""File in that folder: rank and exit code of each worker that ended badly before the others were stopped."""
EXPLAIN_VARIABLE = "ANABATIC_EXPLAIN"
"""Environment variable: `0` leaves out the hint from the knowledge of `anabatic explain`."""
RETRY_VARIABLE = "ANABATIC_RETRY"
"""Environment variable, set for workers that take the place of failed ones."""

SUPERVISED_VARIABLE = "ANABATIC_SUPERVISED"
"""Environment variable of a process whose parent decides, for all below it, when a second Ctrl-C ends at once."""
EXIT_INTERRUPTED = 130
"""Exit code, 128 + SIGINT as shells count, of what Ctrl-C has ended."""
EXIT_PREEMPTED = 143
"""Exit code, 128 + SIGTERM, of a run that a scheduler has ended early and that has saved itself: to be queued again.

Kubernetes never starts a pod again that ends with 0; Kubeflow's `restartPolicy: ExitCode` takes 128 to 255 as worth
another try (kubeflow.org, "PyTorchJob"), Slurm what its `RequeueExit` lists (slurm.conf(5)).
"""
EXIT_USER_ERROR = 2
"""Exit code for what the user has to fix."""
EXIT_RESTART = 4
"""Exit code of a worker that wants to be started again, having written down what it will do in another way: that is no
failure, and costs no restart."""
RESTART_FILE = "again"
"""File beside its reports that says so before it ends: those who wait for it may end first."""
EXIT_RENDEZVOUS_LOST = 3
"""Exit code of an agent that has lost the others or the rendezvous: worth another try."""

_GROUP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""What schedulers, service managers and terminals send to all processes of a job."""
_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when its parent ends."""


def get_reports_folder() -> Path | None:
    """Return the folder for this worker's reports; None where nobody has asked for them."""
    folder = os.environ.get(REPORTS_VARIABLE)
    return Path(folder) if folder else None


def is_supervised() -> bool:
    """True for a worker of a launcher and a stage of a pipeline."""
    return REPORTS_VARIABLE in os.environ or SUPERVISED_VARIABLE in os.environ


def write_exit_code(code: int, rank: int) -> None:
    """Leave an exit code for the launcher, where there is one."""
    if (folder := get_reports_folder()) is not None:
        (folder / f"rank-{rank}.code").write_text(str(code), encoding="utf-8")


@contextmanager
def block_group_signals() -> Iterator[None]:
    """A process that is started here begins with the signals of a group held back, so that none can end it.

    It either admits them when it is ready for them, or never: what serves one process of a job ends with that one, by
    the end of its input, and not by a signal that is meant for the job.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_group_signals() -> None:
    """Take in what was held back since this process was started."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GROUP_SIGNALS)


def ignore_group_signals() -> None:
    """Let the signals of a group pass by; what this process starts in turn meets them as any program does."""
    for number in _GROUP_SIGNALS:
        signal.signal(number, lambda *_: None)  # an ignored signal would stay ignored in every program started here
    unblock_group_signals()


def redirect_native_stderr(path: Path) -> None:
    """Send what libraries write to the standard error to a file; Python's own messages still go where they went.

    What a library says before it takes the process down, as HCCL's watchdog does, would be lost among the lines of all
    ranks; the launcher reads it there.
    """
    terminal = os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 2)
    os.close(file)
    sys.stderr = open(terminal, "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115


def die_with_parent() -> None:
    """Be killed when the process that started us ends: a rank that nobody watches would hold its device for ever."""
    tie_to_parent()
    if os.getppid() == 1:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def tie_to_parent() -> None:
    """The same for `preexec_fn`, where the parent is there, and may be process 1 of a container."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_process(code: int) -> NoReturn:
    """End this process without Python's own end; what was registered for it (`atexit`) still runs.

    Where Python ends while another thread is in a library, that thread is unwound when it asks for Python's lock
    (CPython, `PyThread_exit_thread`), and a C++ destructor on the way aborts the process: exit code 134, not ours.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def build_child_environment() -> dict[str, str]:
    """Return the environment for a child that imports what we import.

    `python -m` puts the current folder before all others on the module path, the `anabatic` script does not:
    a `random.py` of the user must not break the child only. (Python 3.10 does not know the variable.)
    """
    variables = dict(os.environ)
    if not {"", os.getcwd()}.intersection(sys.path):
        variables["PYTHONSAFEPATH"] = "1"
    return variables
