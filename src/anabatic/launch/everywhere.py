"""A job on all machines of `--hosts`, from its start to its end: shows what they print, ends all when one fails."""

from __future__ import annotations

import queue
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from types import FrameType
from typing import IO, Any

from anabatic.core import child, log
from anabatic.core.errors import Failure
from anabatic.core.paths import cannot_write
from anabatic.core.stopping import AGAIN, NOW, SIGNALS, Wish
from anabatic.launch import ssh
from anabatic.launch.hosts import Host
from anabatic.launch.ssh import Events, Job, Machine

_GRACE = 15.0
"""Seconds for the others to end by themselves when one machine has failed; they know best what they saw."""
_PATIENCE = 30.0
"""Seconds between telling them to end, telling them again, and cutting the connections."""


def run(hosts: Sequence[Host], job: Job) -> int:
    """Run a job on all hosts and return its exit code.

    Raises:
        ConfigError: a machine cannot take part for a reason that its owner can mend.
        Failure: a machine cannot be reached, or was lost.
    """
    events: Events = queue.Queue()
    machines = ssh.connect(hosts, job, events)
    with ExitStack() as stack:
        show = _Show(machines, job, stack)
        return _Run(machines, job, events, show).run()


class _Show:
    """Prints every line with the name of its machine, and keeps it in `host-N.log`."""

    def __init__(self, machines: list[Machine], job: Job, stack: ExitStack) -> None:
        self.width = max(len(machine.name) for machine in machines)
        self.files: dict[int, IO[str]] = {}
        for machine in machines if job.out is not None else []:
            path = ssh.keep(job, machine.number)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - the stack closes it
            except OSError as error:
                raise cannot_write(path, error) from error
            self.files[machine.number] = stack.enter_context(file)

    def line(self, machine: Machine, kind: str, text: str) -> None:
        stream = sys.stdout if kind == "out" else sys.stderr
        stream.write(f"{machine.name:<{self.width}} | {text}\n")
        stream.flush()
        if machine.number in self.files:
            self.files[machine.number].write(f"{text}\n")


class _Run:
    """Watches the machines until all have ended."""

    def __init__(self, machines: list[Machine], job: Job, events: Events, show: _Show) -> None:
        self.machines, self.job, self.events, self.show = machines, job, events, show
        self.wish = Wish(supervised=child.is_supervised())
        self.received: list[int] = []
        self.failed: list[Machine] = []
        """Those that ended badly by themselves, in order."""
        self.heard = 0
        """Signals that were handed on."""
        self.orders = 0
        """How often all were told to end."""
        self.next = float("inf")
        """When they are told again."""

    def run(self) -> int:
        old: dict[signal.Signals, Any] = {}
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                old[number] = signal.signal(number, self._receive)
        try:
            names = ", ".join(machine.name for machine in self.machines)
            log.info(f"starting on {names}")
            for machine in self.machines:
                words = list(ssh.words(self.job, machine.host, machine.number))
                machine.send({"words": words, "recipe": self.job.recipe})
            while any(machine.code is None for machine in self.machines):
                self._look()
            return self._outcome()
        finally:
            for machine in self.machines:
                if machine.code is None:
                    machine.end()
            for number, handler in old.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if (what := self.wish.take(number)) != AGAIN:
            self.received.append(signal.SIGQUIT if what == NOW else number)

    def _look(self) -> None:
        with suppress(queue.Empty):
            machine, kind, text = self.events.get(timeout=0.2)
            if kind == "end":
                self._ended(machine, int(text))
            else:
                self.show.line(machine, kind, text)
        while self.heard < len(self.received):
            self.heard += 1
            self._order(self.received[self.heard - 1])
        if time.monotonic() >= self.next:
            self._order(signal.SIGTERM)

    def _ended(self, machine: Machine, code: int) -> None:
        machine.code = code
        if not code or self.orders:
            return
        self.failed.append(machine)
        left = [other for other in self.machines if other.code is None]
        enough = machine.lost and len(left) >= self.job.launch.min_nodes < self.job.launch.max_nodes
        if left:
            after = "the others go on" if enough else "the others are ended"
            log.warn(f"{_how(machine)}: {after}")
        if not enough and self.next == float("inf"):
            self.next = time.monotonic() + _GRACE

    def _order(self, number: int) -> None:
        """Tell all to end: the first time to save, the second time at once, then without asking."""
        self.orders += 1
        self.next = time.monotonic() + _PATIENCE if not self.received or self.orders > 1 else float("inf")
        first = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        for machine in self.machines:
            if machine.code is None and self.orders <= 2:
                machine.send(int(first if self.orders == 1 else signal.SIGQUIT))  # a launcher saves for any SIGTERM
            elif machine.code is None:
                machine.end()

    def _outcome(self) -> int:
        lost = [machine for machine in self.failed if machine.lost]
        enough = len(self.machines) - len(lost) >= self.job.launch.min_nodes
        codes = [machine.code or 0 for machine in self.failed if machine not in lost]
        if lost and not codes and not enough:
            raise Failure(
                f"{_how(lost[0])}; what it said last is in {ssh.keep(self.job, lost[0].number)}",
                "is the machine running? start the same command again: it continues from the newest checkpoint",
            )
        if codes:
            log.warn(f"{_how(next(one for one in self.failed if one not in lost))} first")
            return max(codes, key=lambda code: code == child.MISTAKE)
        rest = [machine.code or 0 for machine in self.machines if machine not in lost]
        return next((code for code in rest if code), 0)


def _how(machine: Machine) -> str:
    if machine.lost:
        return f"the connection to {machine.name} is lost"
    return f"{machine.name} has ended with exit code {machine.code}"
