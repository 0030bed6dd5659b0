"""`torch.distributed.run` without its tracebacks: reports of the workers (`worker_reports.py`), fixed node ranks.

The arguments are those of torch.distributed.run. Each start of the workers has a report folder, `try-0`, `try-1`, ...,
in the folder of ANABATIC_REPORTS. torch is imported inside functions, because the module is run as a program.
"""

from __future__ import annotations

import atexit
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
from typing import TYPE_CHECKING, Any, NoReturn

from anabatic.core import relaunch
from anabatic.core.stop_signals import FIRST_SIGNAL, StopRequest
from anabatic.launch import job_secret, rendezvous_endpoint
from anabatic.launch.local import worker_reports
from anabatic.launch.local.forkserver import PRELOAD_VARIABLE, SIMULATION_VARIABLE, WORKER_COMMAND, Forkserver
from anabatic.launch.rendezvous import describe_store_error

if TYPE_CHECKING:
    from anabatic.launch.machine_rendezvous import JobRendezvous

_QUIET_EXCEPTIONS = ("ChildFailedError", "SignalException")
"""Exceptions of torch's agent that only mean that a worker failed or a signal arrived."""
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
        # Workers that are forked run on a processor, which is not replaced, or on simulated NPUs.
        _install_agent(root, replaces_devices=not modules or SIMULATION_VARIABLE in os.environ)
    machine: dict[str, Any] | None = None
    secret = job_secret.take_secret(os.environ)
    if root is not None and (root / worker_reports.MACHINE_FILE).is_file():
        machine = json.loads((root / worker_reports.MACHINE_FILE).read_text(encoding="utf-8"))
        where = {"host": machine["host"], "port": machine["port"], "seconds": machine["join_seconds"]}
        if not machine["is_host"] and (reason := rendezvous_endpoint.await_port(**where)):
            (root / worker_reports.LOST_FILE).write_text(reason, encoding="utf-8")
            sys.exit(relaunch.EXIT_RENDEZVOUS_LOST)
    handlers = _install_rendezvous(root, {**machine, "secret": secret} if machine is not None else None)
    _install_stop_handler()
    try:
        importlib.import_module("torch.distributed.run").main()
    except Exception as error:
        name = type(error).__name__
        if name in _QUIET_EXCEPTIONS:
            sys.exit(1)
        if name not in _LOST_EXCEPTIONS or root is None:
            raise
        if any(getattr(handler, "is_unused_spare", False) for handler in handlers):
            (root / worker_reports.UNUSED_FILE).touch()
            sys.exit(0)
        reason = str(error) if name == "RendezvousTimeoutError" else describe_store_error(error)
        (root / worker_reports.LOST_FILE).write_text(reason, encoding="utf-8")
        sys.exit(relaunch.EXIT_RENDEZVOUS_LOST)
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):  # it ends already; torch's handler would raise in its clean-up
            signal.signal(signum, signal.SIG_IGN)
        for handler in handlers:
            handler.leave()


def _install_agent(root: Path, replaces_devices: bool) -> None:
    from torch.distributed.launcher import api

    from anabatic.launch.local import reporting_agent

    api.LocalElasticAgent = reporting_agent.make_agent_class(  # type: ignore[misc]
        root, is_elastic=_is_elastic(sys.argv), replaces_devices=replaces_devices
    )


def _is_elastic(arguments: Iterable[str]) -> bool:
    """Return whether the job can continue with fewer machines."""
    nodes_option = next((argument.partition("=")[2] for argument in arguments if argument.startswith("--nnodes=")), "1")
    min_nodes, _, max_nodes = nodes_option.partition(":")
    return bool(max_nodes) and min_nodes != max_nodes


def _install_rendezvous(root: Path | None, machine: dict[str, Any] | None) -> list[JobRendezvous]:
    """Offer our rendezvous to torch's agent; return a list that will hold what the agent makes of it.

    Args:
        machine: arguments of `MachineRendezvous`; None: there is one machine.
    """
    from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

    from anabatic.launch.machine_rendezvous import LocalRendezvous, MachineRendezvous

    made: list[JobRendezvous] = []

    def make_handler(parameters: RendezvousParameters) -> JobRendezvous:
        if machine is None or root is None:
            made.append(LocalRendezvous(parameters.run_id, int(parameters.get("nproc") or 1)))
            return made[-1]
        refuse, replace = functools.partial(_refuse_job, root), functools.partial(_yield_to_replacement, root)
        address = str(parameters.local_addr)
        made.append(MachineRendezvous(**machine, address=address, on_refused=refuse, on_replaced=replace))
        return made[-1]

    rendezvous_handler_registry.register(rendezvous_endpoint.BACKEND, make_handler)
    return made


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


def _refuse_job(root: Path, differences: list[str]) -> NoReturn:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    (root / worker_reports.REFUSED_FILE).write_text("\n".join(differences), encoding="utf-8")
    raise SignalException("refused", signal.SIGTERM)


def _yield_to_replacement(root: Path, address: str) -> NoReturn:
    """Exit and leave the rendezvous open for the process that replaces this one: torch closes it on other errors."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    (root / worker_reports.REPLACED_FILE).write_text(address, encoding="utf-8")
    raise SignalException("replaced", signal.SIGTERM)


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
