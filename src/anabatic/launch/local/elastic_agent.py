"""`torch.distributed.run` without its tracebacks: reports of the workers (`worker_reports.py`), fixed node ranks.

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
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from anabatic.core import relaunch
from anabatic.core.stop_signals import FIRST_SIGNAL, StopRequest
from anabatic.launch import rendezvous_endpoint
from anabatic.launch.local import placement, worker_reports
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
        take_node_rank(machine["node_rank"], functools.partial(_yield_to_replacement, root))
        rendezvous = MachineRendezvous(**machine, refuse=functools.partial(_refuse_job, root))
        rendezvous.start()
    _install_stop_handler()
    _install_method_names()
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


def _install_method_names() -> None:
    """Let torch's rendezvous take the name of a method from its frame: half a second of CPU less before the workers.

    `get_method_name` of torch 2.13 (elastic/rendezvous/dynamic_rendezvous.py) calls `inspect.stack` twice for each of
    nine events, which looks for the source of every frame among all imported modules.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    if hasattr(dynamic_rendezvous, "get_method_name"):
        dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


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
    return rendezvous_endpoint.await_port(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else ""


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
                    if elastic:  # other machines may continue: only a signal to this agent ends its part
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
    variables, line = placement.replace_lost_devices(nproc, os.environ)
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


class RankedAddress(str):
    """A machine's address that sorts by the machine's number; machines exchange it by pickle.

    Python compares dataclasses (here torch's `_NodeDesc`) field by field, first for equality, then for order.
    """

    node_rank: int

    def __new__(cls, node_rank: int, address: str) -> RankedAddress:
        ranked = super().__new__(cls, address)
        ranked.node_rank = node_rank
        return ranked

    def __reduce__(self) -> Any:
        return RankedAddress, (self.node_rank, str(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankedAddress) and (self.node_rank, str(self)) == (other.node_rank, str(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: str) -> bool:
        return self.node_rank < other.node_rank if isinstance(other, RankedAddress) else super().__lt__(other)

    def __hash__(self) -> int:
        return hash((self.node_rank, str(self)))


def take_node_rank(node_rank: int, on_replaced: Callable[[str], NoReturn]) -> None:
    """Make this process machine `node_rank` in torch's rendezvous.

    `DynamicRendezvousHandler._node_desc_generator` of torch 2.13 names machines by their address, and their ranks
    follow from the order of the names; `_RendezvousJoinOp` decides what a machine does next to take part.

    Args:
        on_replaced: called with the address of a later process with the same machine number; it must raise.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as rendezvous

    generator = rendezvous.DynamicRendezvousHandler._node_desc_generator
    generate = generator.generate
    generator.generate = lambda local_addr=None: generate(RankedAddress(node_rank, local_addr or ""))  # type: ignore[method-assign]
    join = rendezvous._RendezvousJoinOp.__call__
    known: set[Any] = set()

    def join_replacing_former_self(op: Any, context: Any, deadline: float) -> Any:
        state, node = context.state, context.node
        if node in state.last_heartbeats:
            known.add(node)
        others = [other for other in state.last_heartbeats if other != node and _same_machine(other, node)]
        if others and node in known:
            on_replaced(str(others[0].addr))
        elif others and not state.closed:
            _remove_nodes(state, context.settings, others)
        return join(op, context, deadline)

    rendezvous._RendezvousJoinOp.__call__ = join_replacing_former_self  # type: ignore[method-assign, assignment]


def _same_machine(node: Any, other: Any) -> bool:
    return (
        isinstance(node.addr, RankedAddress)
        and isinstance(other.addr, RankedAddress)
        and node.addr.node_rank == other.addr.node_rank
    )


def _remove_nodes(state: Any, settings: Any, nodes: list[Any]) -> None:
    """Remove machines as torch removes those with an expired heartbeat (`_BackendRendezvousStateHolder._sanitize`)."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _remove_participant_epilogue

    took_part = [node for node in nodes if state.participants.pop(node, None) is not None]
    for node in nodes:
        state.last_heartbeats.pop(node, None)
        state.wait_list.discard(node)
        state.redundancy_list.discard(node)
    if took_part:
        _remove_participant_epilogue(state, settings)


if __name__ == "__main__":
    _run_and_exit()
