"""`torch.distributed.run` without its tracebacks: the launcher reads what the workers left (`worker_reports.py`).

The words are those of torch.distributed.run. Each start of the workers gets a folder of its own for reports, `try-0`,
`try-1`, ..., in the folder that ANABATIC_REPORTS names. torch is imported in functions: the module is run by name.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from anabatic.core import relaunch
from anabatic.core.stop_signals import FIRST_SIGNAL, StopRequest
from anabatic.launch import node_rank, rendezvous_probe
from anabatic.launch.local import device_replacement, worker_reports
from anabatic.launch.local.forkserver import PRELOAD_VARIABLE, WORKER_COMMAND, Forkserver
from anabatic.launch.rendezvous import MachineRendezvous, describe_store_error

_QUIET_EXCEPTIONS = ("ChildFailedError", "SignalException")
"""Exceptions of torch's agent that only say: a worker failed, or a signal came."""
_SIGNAL_GRACE_SECONDS = 5.0
"""Seconds in which a signal that has reached the workers reaches their agent as well."""
_LOG_LEVEL_VARIABLE = "TORCH_CPP_LOG_LEVEL"
_LOST_EXCEPTIONS = (
    "RendezvousConnectionError",
    "RendezvousTimeoutError",
    "RendezvousClosedError",
    "RendezvousStateError",
    "DistNetworkError",
    "DistStoreError",
)
"""Exceptions of torch's agent that say: the other machines, or the place where they meet, are gone."""


def main() -> None:
    """Run the agent with the arguments of this process."""
    logging.disable(logging.CRITICAL)  # `spawn` says what went wrong; the workers' logging is their own
    sys.unraisablehook = _ignore_thread_join_error
    # The launcher hands it on as SIGTERM. Not ignored: what is started here would ignore it, too.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    parent = os.getppid()
    modules = os.environ.pop(PRELOAD_VARIABLE, "")
    server = Forkserver(modules) if modules else None  # it imports while we do, and is started before any thread is
    threading.Thread(target=_leave_with_parent, args=(parent,), daemon=True).start()
    _import_quietly()
    if server is not None:
        _install_worker_fork(server)
    root = relaunch.get_reports_folder()
    if root is not None:
        _install_reporting_agent(root, devices=not modules)
        if why := _await_machine_0(root):
            (root / worker_reports.LOST_FILE).write_text(why, encoding="utf-8")
            sys.exit(relaunch.EXIT_RENDEZVOUS_LOST)
    roll = None
    if root is not None and (root / worker_reports.MACHINE_FILE).is_file():
        machine = json.loads((root / worker_reports.MACHINE_FILE).read_text(encoding="utf-8"))
        node_rank.take_node_rank(machine["number"], functools.partial(_yield_to_replacement, root))
        roll = MachineRendezvous(**machine, refuse=functools.partial(_refuse_job, root))
        roll.start()
    _install_stop_handler()
    try:
        importlib.import_module("torch.distributed.run").main()
    except Exception as error:
        name = type(error).__name__
        if name in _QUIET_EXCEPTIONS:
            sys.exit(1)
        if name not in _LOST_EXCEPTIONS or root is None:
            raise
        told = describe_store_error(error)
        why = roll.describe_missing() if roll is not None and roll.missing_machines and told.startswith(name) else told
        (root / worker_reports.LOST_FILE).write_text(why, encoding="utf-8")
        sys.exit(relaunch.EXIT_RENDEZVOUS_LOST)
    finally:
        if roll is not None:
            roll.stop_waiting()


def _install_stop_handler() -> None:
    """Let the first signal end the agent, and the workers have their time: torch's own handler ends them at the second.

    That is `_terminate_process_handler` of torch 2.13 (elastic/multiprocessing/api.py): it raises wherever the agent
    is, also while it waits for workers that save.
    """
    from torch.distributed.elastic.multiprocessing import api

    end, wish = api._terminate_process_handler, StopRequest(supervised=True)

    def handle_first_signal(number: int, frame: FrameType | None) -> None:
        if wish.classify_signal(number) == FIRST_SIGNAL:
            end(number, frame)

    setattr(api, end.__name__, handle_first_signal)


def _import_quietly() -> None:
    """Import torch so that its stores write no stack of C++ frames for every attempt; the workers keep their level.

    torch 2.13 reads TORCH_CPP_LOG_LEVEL once, at its import (c10/util/Logging.cpp, initLogging).
    """
    level = os.environ.get(_LOG_LEVEL_VARIABLE, "")
    if level in ("", "ERROR"):
        os.environ[_LOG_LEVEL_VARIABLE] = "FATAL"
    importlib.import_module("torch.distributed")
    os.environ[_LOG_LEVEL_VARIABLE] = level or "ERROR"


def _ignore_thread_join_error(what: Any) -> None:
    """Leave out what torch 2.13 says when a signal ends the agent in its keep-alive thread: that joins itself."""
    if "cannot join current thread" not in str(what.exc_value):
        sys.__unraisablehook__(what)


def _await_machine_0(root: Path) -> str:
    """Wait for machine 0 where another one holds the store; return why it does not answer."""
    path = root / worker_reports.RENDEZVOUS_FILE
    return rendezvous_probe.await_port(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else ""


def _install_worker_fork(server: Forkserver) -> None:
    """Start workers by a fork: `SubprocessHandler._popen` of torch 2.13 (elastic/multiprocessing)."""
    atexit.register(server.close)
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    start = SubprocessHandler._popen

    def fork_or_popen(handler: SubprocessHandler, words: tuple[str, ...], environment: dict[str, str]) -> Any:
        plain = (
            handler._stdout is None
            and handler._stderr is None
            and tuple(words[: len(WORKER_COMMAND)]) == WORKER_COMMAND
        )
        forked = server.fork_worker(words[len(WORKER_COMMAND) :], environment) if plain else None
        return start(handler, words, environment) if forked is None else forked

    SubprocessHandler._popen = fork_or_popen  # type: ignore[assignment, method-assign]


def _refuse_job(root: Path, differences: list[str]) -> None:
    (root / worker_reports.REFUSED_FILE).write_text("\n".join(differences), encoding="utf-8")
    os.kill(os.getpid(), signal.SIGTERM)


def _yield_to_replacement(root: Path, address: str) -> NoReturn:
    """End, and leave the rendezvous open for the process that has taken our place: torch closes it for other errors."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    (root / worker_reports.REPLACED_FILE).write_text(address, encoding="utf-8")
    raise SignalException("replaced", signal.SIGTERM)


def _install_reporting_agent(root: Path, devices: bool) -> None:
    """Give every start of the workers a folder, and leave there who failed by itself and how.

    With `devices` a later start does without those that have gone.

    `LocalElasticAgent._start_workers` and `_monitor_workers` of torch 2.13 (elastic/agent/server): the agent stops all
    workers when one fails, and tells nobody which one it was until its restarts are used up.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.launcher import api

    elastic = _is_elastic(sys.argv)

    class ReportingAgent(LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> Any:
            folder = worker_reports.create_attempt_folder(root, [worker.global_rank for worker in worker_group.workers])
            os.environ[relaunch.REPORTS_VARIABLE] = str(folder)
            if len(worker_reports.list_attempt_folders(root)) > 1:
                os.environ[relaunch.RETRY_VARIABLE] = "1"
                if devices:
                    _replace_devices(len(worker_group.workers))
            return super()._start_workers(worker_group)

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.is_failed():
                codes = {str(rank): failure.exitcode for rank, failure in result.failures.items()}
                Path(os.environ[relaunch.REPORTS_VARIABLE], relaunch.FAILED_RANKS_FILE).write_text(
                    json.dumps(codes), encoding="utf-8"
                )
                if worker_reports.is_stop_requested(codes.values()):
                    if elastic:  # the others may be wanted further: only a signal of our own ends this machine's part
                        time.sleep(_SIGNAL_GRACE_SECONDS)
                    else:
                        self._remaining_restarts = 0
                elif relaunch.EXIT_USER_ERROR in codes.values():
                    self._remaining_restarts = 0  # another start would end in the same way
                elif Path(os.environ[relaunch.REPORTS_VARIABLE], relaunch.RESTART_FILE).is_file():
                    self._remaining_restarts += 1  # this one is free
                    _kill_workers(self._pcontext.pids().values() if self._pcontext else ())
            return result

    api.LocalElasticAgent = ReportingAgent  # type: ignore[misc]


def _is_elastic(words: Iterable[str]) -> bool:
    """True when the job continues with fewer machines."""
    given = next((word.partition("=")[2] for word in words if word.startswith("--nnodes=")), "1")
    least, _, most = given.partition(":")
    return bool(most) and least != most


def _kill_workers(pids: Iterable[int]) -> None:
    """End workers that wait in a collective for one that has gone: they have nothing to save without it."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _replace_devices(nproc: int) -> None:
    variables, line = device_replacement.replace_lost_devices(nproc, os.environ)
    os.environ.update(variables)
    if line:
        sys.stderr.write(f"warning: {line}\n")


def _leave_with_parent(parent: int) -> None:
    """Stop the workers when whoever started us was killed: they would hold the devices for ever."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


def _run_and_exit() -> None:
    """Run `main` and leave at once: the roll call may still be in torch's store."""
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    relaunch.exit_process(code)


if __name__ == "__main__":
    _run_and_exit()
