"""`torch.distributed.run` without its tracebacks: the launcher reads the reports of the workers (`worker_reports.py`).

The arguments are those of torch.distributed.run. Each start of the workers has a report folder, `try-0`, `try-1`, ...,
in the folder of ANABATIC_REPORTS. torch is imported inside functions, because the module is run as a program.
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
"""Exceptions of torch's agent that only mean that a worker failed or a signal arrived."""
_SIGNAL_GRACE_SECONDS = 5.0
"""Seconds within which a signal that reached the workers also reaches their agent."""
_LOG_LEVEL_VARIABLE = "TORCH_CPP_LOG_LEVEL"
_LOST_EXCEPTIONS = (
    "RendezvousConnectionError",
    "RendezvousTimeoutError",
    "RendezvousClosedError",
    "RendezvousStateError",
    "DistNetworkError",
    "DistStoreError",
)
"""Exceptions of torch's agent that mean that the other machines or the rendezvous are lost."""


def main() -> None:
    """Run the agent with the arguments of this process."""
    logging.disable(logging.CRITICAL)  # `spawn` reports errors; workers configure their own logging
    sys.unraisablehook = _ignore_thread_join_error
    # The launcher forwards it as SIGTERM. A handler instead of SIG_IGN, which child processes would inherit.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    parent_pid = os.getppid()
    modules = os.environ.pop(PRELOAD_VARIABLE, "")
    server = (
        Forkserver(modules) if modules else None
    )  # it imports in parallel with the agent, and starts before any thread does
    threading.Thread(target=_leave_with_parent, args=(parent_pid,), daemon=True).start()
    _import_quietly()
    if server is not None:
        _install_worker_fork(server)
    root = relaunch.get_reports_folder()
    if root is not None:
        _install_reporting_agent(root, devices=not modules)
        if reason := _await_machine_0(root):
            (root / worker_reports.LOST_FILE).write_text(reason, encoding="utf-8")
            sys.exit(relaunch.EXIT_RENDEZVOUS_LOST)
    rendezvous = None
    if root is not None and (root / worker_reports.MACHINE_FILE).is_file():
        machine = json.loads((root / worker_reports.MACHINE_FILE).read_text(encoding="utf-8"))
        node_rank.take_node_rank(machine["node_rank"], functools.partial(_yield_to_replacement, root))
        rendezvous = MachineRendezvous(**machine, refuse=functools.partial(_refuse_job, root))
        rendezvous.start()
    _install_stop_handler()
    try:
        importlib.import_module("torch.distributed.run").main()
    except Exception as error:
        name = type(error).__name__
        if name in _QUIET_EXCEPTIONS:
            sys.exit(1)
        if name not in _LOST_EXCEPTIONS or root is None:
            raise
        message = describe_store_error(error)
        reason = (
            rendezvous.describe_missing()
            if rendezvous is not None and rendezvous.missing_machines and message.startswith(name)
            else message
        )
        (root / worker_reports.LOST_FILE).write_text(reason, encoding="utf-8")
        sys.exit(relaunch.EXIT_RENDEZVOUS_LOST)
    finally:
        if rendezvous is not None:
            rendezvous.stop_waiting()


def _install_stop_handler() -> None:
    """Pass only the first signal to torch's handler: a second one would end workers that are saving.

    `_terminate_process_handler` of torch 2.13 (elastic/multiprocessing/api.py) raises wherever the agent is, also while
    it waits for workers that save.
    """
    from torch.distributed.elastic.multiprocessing import api

    terminate, stop_request = api._terminate_process_handler, StopRequest(supervised=True)

    def handle_first_signal(signum: int, frame: FrameType | None) -> None:
        if stop_request.classify_signal(signum) == FIRST_SIGNAL:
            terminate(signum, frame)

    setattr(api, terminate.__name__, handle_first_signal)


def _import_quietly() -> None:
    """Import torch so that its stores print no C++ stack for every attempt; the workers keep their log level.

    torch 2.13 reads TORCH_CPP_LOG_LEVEL once, at import (c10/util/Logging.cpp, initLogging).
    """
    level = os.environ.get(_LOG_LEVEL_VARIABLE, "")
    if level in ("", "ERROR"):
        os.environ[_LOG_LEVEL_VARIABLE] = "FATAL"
    importlib.import_module("torch.distributed")
    os.environ[_LOG_LEVEL_VARIABLE] = level or "ERROR"


def _ignore_thread_join_error(unraisable: Any) -> None:
    """Hide an error of torch 2.13 when a signal ends the agent in its keep-alive thread, which joins itself."""
    if "cannot join current thread" not in str(unraisable.exc_value):
        sys.__unraisablehook__(unraisable)


def _await_machine_0(root: Path) -> str:
    """Wait for machine 0 if another machine hosts the store; return the problem if it does not answer."""
    path = root / worker_reports.RENDEZVOUS_FILE
    return rendezvous_probe.await_port(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else ""


def _install_worker_fork(server: Forkserver) -> None:
    """Patch `SubprocessHandler._popen` of torch 2.13 (elastic/multiprocessing) to fork workers."""
    atexit.register(server.close)
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    start = SubprocessHandler._popen

    def fork_or_popen(handler: SubprocessHandler, args: tuple[str, ...], environment: dict[str, str]) -> Any:
        is_forkable = (
            handler._stdout is None and handler._stderr is None and tuple(args[: len(WORKER_COMMAND)]) == WORKER_COMMAND
        )
        forked = server.fork_worker(args[len(WORKER_COMMAND) :], environment) if is_forkable else None
        return start(handler, args, environment) if forked is None else forked

    SubprocessHandler._popen = fork_or_popen  # type: ignore[assignment, method-assign]


def _refuse_job(root: Path, differences: list[str]) -> None:
    (root / worker_reports.REFUSED_FILE).write_text("\n".join(differences), encoding="utf-8")
    os.kill(os.getpid(), signal.SIGTERM)


def _yield_to_replacement(root: Path, address: str) -> NoReturn:
    """Exit and leave the rendezvous open for the process that replaces this one: torch closes it on other errors."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    (root / worker_reports.REPLACED_FILE).write_text(address, encoding="utf-8")
    raise SignalException("replaced", signal.SIGTERM)


def _install_reporting_agent(root: Path, devices: bool) -> None:
    """Create a report folder for every start of the workers, and record there which ranks failed first, and how.

    With `devices`, a restart replaces lost devices.

    Patches `LocalElasticAgent._start_workers` and `_monitor_workers` of torch 2.13 (elastic/agent/server): the agent
    stops all workers when one fails, and reports which one only when its restarts are used up.
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
                    if elastic:  # other machines may go on: only a signal to this agent ends its part
                        time.sleep(_SIGNAL_GRACE_SECONDS)
                    else:
                        self._remaining_restarts = 0
                elif relaunch.EXIT_USER_ERROR in codes.values():
                    self._remaining_restarts = 0  # a restart would fail in the same way
                elif Path(os.environ[relaunch.REPORTS_VARIABLE], relaunch.RESTART_FILE).is_file():
                    self._remaining_restarts += 1  # this restart is free
                    _kill_workers(self._pcontext.pids().values() if self._pcontext else ())
            return result

    api.LocalElasticAgent = ReportingAgent  # type: ignore[misc]


def _is_elastic(arguments: Iterable[str]) -> bool:
    """True when the job can continue with fewer machines."""
    nodes_option = next((argument.partition("=")[2] for argument in arguments if argument.startswith("--nnodes=")), "1")
    min_nodes, _, max_nodes = nodes_option.partition(":")
    return bool(max_nodes) and min_nodes != max_nodes


def _kill_workers(pids: Iterable[int]) -> None:
    """Kill workers that wait in a collective for a lost one: they have nothing to save without it."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _replace_devices(nproc: int) -> None:
    variables, line = device_replacement.replace_lost_devices(nproc, os.environ)
    os.environ.update(variables)
    if line:
        sys.stderr.write(f"warning: {line}\n")


def _leave_with_parent(parent_pid: int) -> None:
    """Stop the workers when the parent process was killed: they would hold the devices for ever."""
    while os.getppid() == parent_pid:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


def _run_and_exit() -> None:
    """Run `main` and exit at once: the rendezvous thread may still be in torch's store."""
    code: Any = 0
    try:
        main()
    except SystemExit as system_exit:
        code = system_exit.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    relaunch.exit_process(code)


if __name__ == "__main__":
    _run_and_exit()
