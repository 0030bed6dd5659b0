"""Rendezvous of a job on several machines: wait for all machines and check that they run the same job.

Each agent writes its facts to the rendezvous store (torch's TCPStore, hosted by machine 0).
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib import metadata
from platform import python_version
from typing import Any

from anabatic.launch.rendezvous_endpoint import REMINDER_SECONDS

COMPARED_PACKAGES = ("anabatic", "torch", "torch_npu", "transformers", "peft", "safetensors")
_POLL_SECONDS = 0.5
_CONNECT_SECONDS = 30.0
"""Timeout of one connection, and of one request."""
_UNKNOWN_GREETING = "invalid value returned from server"
"""Part of the error of torch's store when the server does not understand its greeting (torch 2.13, TCPStore.cpp,
ping)."""
_LEAVE_SECONDS = 5.0
"""Seconds to wait for the last answer of the store."""


def collect_job_facts(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that must, or should, be equal on every machine.

    Args:
        recipe: the resolved settings, flat: dotted key -> value.
    """
    versions: dict[str, str | None] = {"python": python_version()}
    for name in COMPARED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {"recipe": dict(recipe), "versions": versions}


def flatten_settings(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings: `{"optim": {"lr": 1}}` -> `{"optim.lr": 1}`."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        result.update(flatten_settings(value, f"{name}.") if isinstance(value, dict) else {name: value})
    return result


def describe_differences(facts_by_machine: Mapping[int, Mapping[str, Any]], part: str) -> list[str]:
    """Return one line per difference from machine 0 in one part of the facts."""
    first = facts_by_machine[0][part]
    lines = []
    for node_rank, facts in sorted(facts_by_machine.items()):
        for key in sorted(first.keys() | facts[part].keys()):
            expected, actual = first.get(key), facts[part].get(key)
            if expected != actual:
                lines.append(
                    f"{key} is {_format_value(expected)} on machine 0 and {_format_value(actual)} on machine"
                    f" {node_rank}"
                )
    return lines


def _format_value(value: Any) -> str:
    return "missing" if value is None else str(value)


class MachineRendezvous(threading.Thread):
    """Registers this machine, reports which machines are missing, and compares the facts once all are present.

    Args:
        job: job id; machines of another job on the same port are ignored.
        facts: this machine's facts.
        refuse: called once with the differences when recipes differ.
    """

    def __init__(
        self, host: str, port: int, job: str, node_rank: int, size: int, facts: dict[str, Any], refuse: Any
    ) -> None:
        super().__init__(daemon=True)
        self.host, self.port, self.node_rank, self.size, self.facts, self.refuse = (
            host,
            port,
            node_rank,
            size,
            facts,
            refuse,
        )
        self.job = job
        self._stop_event = threading.Event()
        self.missing_machines = [other for other in range(size) if other != node_rank]

    def run(self) -> None:
        """Wait for all machines and compare their facts; return when the store is lost, which the agent reports."""
        from torch.distributed import DistError

        try:
            facts_by_machine = self.gather_facts()
        except DistError:
            return
        if not facts_by_machine:
            return
        if differences := describe_differences(facts_by_machine, "recipe"):
            self.refuse(differences)
        elif self.node_rank == 0:
            for line in describe_differences(facts_by_machine, "versions"):
                sys.stderr.write(f"warning: {line}\n")

    def gather_facts(self, seconds: float = float("inf")) -> dict[int, dict[str, Any]]:
        """Return the facts of every machine once all are present; empty after a timeout or `stop_waiting`."""
        started_at = reminded_at = time.monotonic()
        store = self._connect_store(started_at + seconds)
        store.set(self._store_key(self.node_rank), json.dumps(self.facts))
        while self.missing_machines and not self._stop_event.is_set():
            self.missing_machines = [
                node_rank for node_rank in self.missing_machines if not store.check([self._store_key(node_rank)])
            ]
            if self.missing_machines and time.monotonic() - started_at > seconds:
                return {}
            if self.missing_machines and time.monotonic() - reminded_at > REMINDER_SECONDS:
                reminded_at = time.monotonic()
                sys.stderr.write(f"{self.describe_missing()}\n")
            self._stop_event.wait(_POLL_SECONDS if self.missing_machines else 0)
        if self.missing_machines:
            return {}
        facts_by_machine = {
            node_rank: json.loads(store.get(self._store_key(node_rank))) for node_rank in range(self.size)
        }
        store.set(self._store_key(self.node_rank, "knows"), "")
        if self.node_rank == 0:
            self._wait_for_readers(store)
        return facts_by_machine

    def stop_waiting(self) -> None:
        """Stop waiting: Python aborts at exit while a thread is in the store's C++ code (torch 2.13)."""
        self._stop_event.set()
        if self.is_alive():
            self.join(_LEAVE_SECONDS)

    def describe_missing(self) -> str:
        """Return one line about the missing machines."""
        present = self.size - len(self.missing_machines)
        machines = (
            f"machine{'s' if len(self.missing_machines) > 1 else ''} {', '.join(map(str, self.missing_machines))}"
        )
        return f"waiting for {machines} at {self.host}:{self.port} ({present} of {self.size} are here)"

    def _wait_for_readers(self, store: Any) -> None:
        """Wait until all machines have read the store, which ends with machine 0."""
        deadline = time.monotonic() + REMINDER_SECONDS
        readers = [self._store_key(node_rank, "knows") for node_rank in range(self.size)]
        while not store.check(readers) and time.monotonic() < deadline:
            self._stop_event.wait(_POLL_SECONDS)

    def _store_key(self, node_rank: int, entry: str = "facts") -> str:
        return f"anabatic/{self.job}/machine/{node_rank}/{entry}"

    def _connect_store(self, deadline: float) -> Any:
        from torch.distributed import DistNetworkError, TCPStore

        while True:
            timeout = min(_CONNECT_SECONDS, max(1.0, deadline - time.monotonic()))
            try:
                store = TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=timeout))
            except DistNetworkError:  # machine 0 has not opened it yet; the rendezvous reports the timeout
                if self._stop_event.wait(_POLL_SECONDS) or time.monotonic() > deadline:
                    raise
                continue
            store.set_timeout(timedelta(seconds=_CONNECT_SECONDS))
            return store


def describe_store_error(error: BaseException) -> str:
    """Return one line about an error of torch's store."""
    message = " ".join(f"{type(error).__name__}: {error} {error.__cause__ or ''}".split())
    return "what answers there is another program, no training" if _UNKNOWN_GREETING in message else message[:400]
