"""Starts COMMAND on a simulated machine and leaves nothing behind, also when this process is killed.

Between us and COMMAND stands a small supervisor, forked from here. It adopts every orphan of COMMAND (a child
subreaper, prctl(2)) and holds the reading end of a pipe: the pipe closes when we end, however that happens. Then it
ends what still runs and removes the shared memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from anabatic.core import process_info
from anabatic.core.errors import UserError
from anabatic_sim import shared_memory

GRACE_SECONDS = 3.0
"""Seconds until processes that outlive COMMAND are killed; they are asked to end first."""
_INTERRUPT_WINDOW = 2.0
"""Seconds within which a SIGINT to us and one to the supervisor are the same one, sent to the group."""
_PR_SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_PR_SET_PDEATHSIG = 1  # PR_SET_PDEATHSIG
_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_AWAITED_SIGNALS = (*_FORWARDED_SIGNALS, signal.SIGINT, signal.SIGCHLD)
_INTERRUPT_SIGNAL = signal.SIGRTMIN
"""From us to the supervisor: pass SIGINT on. The SIGINT of a terminal has reached COMMAND already."""


def run_command(
    command: Sequence[str], environment: Mapping[str, str], machine: str, ended: Callable[[int], None]
) -> int:
    """Run `command`; return its exit code, or end by the signal that ended it. `ended` hears of it before.

    Raises:
        UserError: there is no such program.
    """
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        shared_memory.remove_segment(machine)
        if os.path.isfile(command[0]):
            raise UserError(
                f"{command[0]} is not executable",
                f"name its interpreter (python {command[0]}), or chmod +x {command[0]}",
            )
        raise UserError(f'there is no program "{command[0]}"', "the words after -- are typed as in a shell")
    read_end, write_end = os.pipe()  # theirs is held open by us alone: end of file means that we are gone
    sys.stdout.flush()
    sys.stderr.flush()
    old = signal.pthread_sigmask(
        signal.SIG_BLOCK, (*_AWAITED_SIGNALS, _INTERRUPT_SIGNAL)
    )  # none is lost before we wait for it
    ctypes.CDLL(None).prctl(
        _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
    )  # the supervisor's children come to us when it is killed
    supervisor = os.fork()
    if supervisor == 0:
        os.close(write_end)
        _supervise_command(command, environment, machine, read_end)
    os.close(read_end)
    try:
        status = _wait_for_supervisor(supervisor)
        if os.waitstatus_to_exitcode(status) < 0:
            _terminate_children()  # nothing, when it was COMMAND that died of the signal
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
        os.close(write_end)
        shared_memory.remove_segment(machine)
    ended(os.waitstatus_to_exitcode(status))
    return _exit_like(status)


def _wait_for_supervisor(supervisor: int) -> int:
    """Return the supervisor's exit status; pass on the signals that COMMAND has not had."""
    while True:
        info = signal.sigwaitinfo(_AWAITED_SIGNALS)
        number = info.si_signo
        if number == signal.SIGCHLD:
            ended, status = os.waitpid(supervisor, os.WNOHANG)
            if ended:
                return status
            continue
        if number == signal.SIGINT:
            # Ctrl-C comes from the kernel (si_code above 0, sigaction(2)) and goes to the whole foreground group,
            # COMMAND included; one that a process has sent came to us alone.
            if info.si_code > 0:
                continue
            number = _INTERRUPT_SIGNAL
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, number)


def _setup_child() -> None:
    """Runs in the child before COMMAND: signals as usual, and asked to end when the supervisor is killed with us."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    _unblock_signals()


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_AWAITED_SIGNALS, _INTERRUPT_SIGNAL))


def _exit_like(status: int) -> int:
    """Return the exit code, or die of the signal that COMMAND died of, as a shell would see it without us."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    if -code in (signal.SIGKILL, signal.SIGSTOP):
        return 128 - code
    signal.signal(-code, signal.SIG_DFL)
    with contextlib.suppress(OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core dump is COMMAND's
    os.kill(os.getpid(), -code)
    return 128 - code


def _supervise_command(command: Sequence[str], environment: Mapping[str, str], machine: str, pipe: int) -> None:
    """Never returns."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        child = subprocess.Popen(list(command), env=dict(environment), preexec_fn=_setup_child)
        for number in _FORWARDED_SIGNALS:
            signal.signal(number, lambda signum, frame: child.send_signal(signum))
        interrupt_times: list[float] = []

        def forward_interrupt(signum: int, frame: FrameType | None) -> None:
            time.sleep(0.05)  # one that was sent to the whole group is on its way to us, too
            if not interrupt_times or time.monotonic() - interrupt_times[-1] > _INTERRUPT_WINDOW:
                child.send_signal(signal.SIGINT)

        # What reaches us in our group has reached COMMAND, which must not count it twice.
        signal.signal(signal.SIGINT, lambda signum, frame: interrupt_times.append(time.monotonic()))
        signal.signal(_INTERRUPT_SIGNAL, forward_interrupt)
        _unblock_signals()
        status = _wait_for_exit(child, pipe)
        _terminate_children()
    except OSError as error:
        _unblock_signals()
        sys.stderr.write(f"error: {command[0]} cannot be started: {error.strerror}\n")
        status = 126
    finally:
        shared_memory.remove_segment(machine)
        code = status
        if code < 0:
            if -code not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def _wait_for_exit(child: subprocess.Popen[bytes], pipe: int) -> int:
    """Wait for COMMAND or for our own parent's end."""
    ended = os.pidfd_open(child.pid)
    while True:
        ready, _, _ = select.select([pipe, ended], [], [], process_info.SIGNAL_DELAY_SECONDS)
        if ended in ready:
            return child.wait()
        if pipe in ready:
            return -signal.SIGKILL


def _terminate_children() -> None:
    """End what COMMAND left running: everything below us is ours, because orphans come to us."""
    me = os.getpid()
    for number, patience in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, 5.0)):
        children = process_info.list_descendants(me)
        for pid, started in children:
            with contextlib.suppress(ProcessLookupError):
                if process_info.is_alive(pid, started):
                    os.kill(pid, number)
        deadline = time.monotonic() + patience
        while children and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            children = process_info.list_descendants(me)
            time.sleep(0.02)
        if not children:
            return
