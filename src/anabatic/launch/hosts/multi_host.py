"""Run a job on all machines of `--hosts`: print their output, and stop all machines when one fails."""

from __future__ import annotations

import queue
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from types import FrameType
from typing import IO, Any

from anabatic.core import log, relaunch
from anabatic.core.errors import Failure
from anabatic.core.paths import make_write_error
from anabatic.core.process_info import allow_open_files
from anabatic.core.stop_signals import REPEATED_SIGNAL, STOP_NOW, STOP_SIGNALS, StopRequest, is_supervised
from anabatic.launch.hosts import ssh_connection
from anabatic.launch.hosts.hostfile import HostEntry
from anabatic.launch.hosts.remote_machine import EventQueue, RemoteJob, RemoteMachine

_FILES_OF_HOST = 5
"""Open files for one host: three pipes, its log, and one more while its ssh starts."""
_OTHER_FILES = 256
_GRACE_SECONDS = 15.0
"""Seconds the other machines get to end on their own after one has failed, so that they report their own error."""
_ESCALATION_SECONDS = 30.0
"""Seconds between the first stop request, the second one, and closing the connections."""


def run(hosts: Sequence[HostEntry], job: RemoteJob) -> int:
    """Run a job on all hosts and return its exit code.

    Raises:
        ConfigError: a machine cannot take part for a reason that the user can fix.
        Failure: a machine cannot be reached, or its connection is lost.
    """
    allow_open_files(len(hosts) * _FILES_OF_HOST + _OTHER_FILES)
    events: EventQueue = queue.Queue()
    machines = ssh_connection.connect_hosts(hosts, job, events)
    with ExitStack() as stack:
        printer = _OutputPrinter(machines, job, stack)
        return _MultiHostJob(machines, job, events, printer).run()


class _OutputPrinter:
    """Prints every line with the name of its machine, and writes it to `host-N.log`."""

    def __init__(self, machines: list[RemoteMachine], job: RemoteJob, stack: ExitStack) -> None:
        self.name_width = max(len(machine.name) for machine in machines)
        self.log_files: dict[int, IO[str]] = {}
        for machine in machines if job.out is not None else []:
            path = ssh_connection.get_host_log_path(job, machine.node_rank)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - the stack closes it
            except OSError as error:
                raise make_write_error(path, error) from error
            self.log_files[machine.node_rank] = stack.enter_context(file)

    def print_line(self, machine: RemoteMachine, kind: str, text: str) -> None:
        stream = sys.stdout if kind == "out" else sys.stderr
        stream.write(f"{machine.name:<{self.name_width}} | {text}\n")
        stream.flush()
        if machine.node_rank in self.log_files:
            self.log_files[machine.node_rank].write(f"{text}\n")


class _MultiHostJob:
    """Watches the machines until all have ended."""

    def __init__(
        self, machines: list[RemoteMachine], job: RemoteJob, events: EventQueue, printer: _OutputPrinter
    ) -> None:
        self.machines, self.job, self.events, self.printer = machines, job, events, printer
        self.stop_request = StopRequest(supervised=is_supervised())
        self.received_signals: list[int] = []
        self.failed_machines: list[RemoteMachine] = []
        """Machines that failed before any stop request, in order."""
        self.handled_signals = 0
        """Signals that were forwarded."""
        self.stop_orders = 0
        """How often all machines were asked to stop."""
        self.next_order_at = float("inf")
        """Time of the next stop request."""

    def run(self) -> int:
        previous_handlers: dict[signal.Signals, Any] = {}
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                previous_handlers[signum] = signal.signal(signum, self._handle_signal)
        try:
            names = ", ".join(machine.name for machine in self.machines)
            log.info(f"starting on {names}")
            for machine in self.machines:
                arguments = list(ssh_connection.list_launcher_arguments(self.job, machine.host, machine.node_rank))
                machine.send_line({"words": arguments, "recipe": self.job.recipe})
            while any(machine.exit_code is None for machine in self.machines):
                self._poll_events()
            return self._decide_exit_code()
        finally:
            for machine in self.machines:
                if machine.exit_code is None:
                    machine.kill_connection()
            for signum, handler in previous_handlers.items():
                signal.signal(signum, handler)

    def _handle_signal(self, signum: int, frame: FrameType | None) -> None:
        if (action := self.stop_request.classify_signal(signum)) != REPEATED_SIGNAL:
            self.received_signals.append(signal.SIGQUIT if action == STOP_NOW else signum)

    def _poll_events(self) -> None:
        with suppress(queue.Empty):
            machine, kind, text = self.events.get(timeout=0.2)
            if kind == "end":
                self._record_end(machine, int(text))
            else:
                self.printer.print_line(machine, kind, text)
        while self.handled_signals < len(self.received_signals):
            self.handled_signals += 1
            self._order_stop(self.received_signals[self.handled_signals - 1])
        if time.monotonic() >= self.next_order_at:
            self._order_stop(signal.SIGTERM)

    def _record_end(self, machine: RemoteMachine, code: int) -> None:
        machine.exit_code = code
        if not code or self.stop_orders:
            return
        self.failed_machines.append(machine)
        running = [other for other in self.machines if other.exit_code is None]
        enough = machine.is_lost and len(running) >= self.job.launch.min_nodes < self.job.launch.max_nodes
        if running:
            consequence = "the others continue" if enough else "the others are ended"
            log.warn(f"{_describe_end(machine)}: {consequence}")
        if not enough and self.next_order_at == float("inf"):
            self.next_order_at = time.monotonic() + _GRACE_SECONDS

    def _order_stop(self, signum: int) -> None:
        """Stop all machines: the first order lets them save, the second ends them at once, the third kills them."""
        self.stop_orders += 1
        self.next_order_at = (
            time.monotonic() + _ESCALATION_SECONDS
            if not self.received_signals or self.stop_orders > 1
            else float("inf")
        )
        first_signal = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
        for machine in self.machines:
            if machine.exit_code is None and self.stop_orders <= 2:
                machine.send_line(
                    int(first_signal if self.stop_orders == 1 else signal.SIGQUIT)
                )  # a launcher saves for any SIGTERM
            elif machine.exit_code is None:
                machine.kill_connection()

    def _decide_exit_code(self) -> int:
        lost = [machine for machine in self.failed_machines if machine.is_lost]
        enough = len(self.machines) - len(lost) >= self.job.launch.min_nodes
        codes = [machine.exit_code or 0 for machine in self.failed_machines if machine not in lost]
        if lost and not codes and not enough:
            raise Failure(
                f"{_describe_end(lost[0])}; what it said last is in "
                f"{ssh_connection.get_host_log_path(self.job, lost[0].node_rank)}",
                "is the machine running? start the same command again: it continues from the newest checkpoint",
            )
        if codes:
            log.warn(f"{_describe_end(next(failed for failed in self.failed_machines if failed not in lost))} first")
            return max(codes, key=lambda code: code == relaunch.EXIT_USER_ERROR)
        remaining_codes = [machine.exit_code or 0 for machine in self.machines if machine not in lost]
        return next((code for code in remaining_codes if code), 0)


def _describe_end(machine: RemoteMachine) -> str:
    if machine.is_lost:
        return f"the connection to {machine.name} is lost"
    return f"{machine.name} has ended with exit code {machine.exit_code}"
