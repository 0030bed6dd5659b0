"""The roll call of a job on several machines: who is there, and whether all run the same.

Each agent leaves its facts in the store by which the machines meet (torch's TCPStore, hosted by machine 0).
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

from anabatic.launch.rendezvous_probe import REMINDER_SECONDS

COMPARED_PACKAGES = ("anabatic", "torch", "torch_npu", "transformers", "peft", "safetensors")
_POLL_SECONDS = 0.5
_CONNECT_SECONDS = 30.0
"""Seconds for one connection, and for an answer."""
_UNKNOWN_GREETING = "invalid value returned from server"
"""In what torch's store says when its greeting is not understood (torch 2.13, TCPStore.cpp, ping)."""
_LEAVE_SECONDS = 5.0
"""Seconds for the store to answer once more."""


def collect_job_facts(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be, or should be, the same on every machine.

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
    """`{"optim": {"lr": 1}}` -> `{"optim.lr": 1}`."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        result.update(flatten_settings(value, f"{name}.") if isinstance(value, dict) else {name: value})
    return result


def describe_differences(found: Mapping[int, Mapping[str, Any]], part: str) -> list[str]:
    """Name what differs from machine 0 in one part of the facts, machine by machine."""
    first = found[0][part]
    told = []
    for number, other in sorted(found.items()):
        for key in sorted(first.keys() | other[part].keys()):
            mine, theirs = first.get(key), other[part].get(key)
            if mine != theirs:
                told.append(
                    f"{key} is {_format_value(mine)} on machine 0 and {_format_value(theirs)} on machine {number}"
                )
    return told


def _format_value(value: Any) -> str:
    return "missing" if value is None else str(value)


class MachineRendezvous(threading.Thread):
    """Registers this machine, says who is missing, and compares once all are here.

    Args:
        job: its name; machines of another job that come to this port are not ours.
        own: this machine's facts.
        refuse: called once when recipes differ, with what differs.
    """

    def __init__(
        self, host: str, port: int, job: str, number: int, size: int, own: dict[str, Any], refuse: Any
    ) -> None:
        super().__init__(daemon=True)
        self.host, self.port, self.number, self.size, self.own, self.refuse = host, port, number, size, own, refuse
        self.job = job
        self._stop_event = threading.Event()
        self.missing_machines = [other for other in range(size) if other != number]

    def run(self) -> None:
        """Work until all are here, and compare; end when the store is gone, whose loss the agent reports."""
        from torch.distributed import DistError

        try:
            found = self.gather_facts()
        except DistError:
            return
        if not found:
            return
        if recipes := describe_differences(found, "recipe"):
            self.refuse(recipes)
        elif self.number == 0:
            for line in describe_differences(found, "versions"):
                sys.stderr.write(f"warning: {line}\n")

    def gather_facts(self, seconds: float = float("inf")) -> dict[int, dict[str, Any]]:
        """Return the facts of every machine once all are here; of none when time is up, or at `stop_waiting`."""
        begun = asked = time.monotonic()
        store = self._connect_store(begun + seconds)
        store.set(self._store_key(self.number), json.dumps(self.own))
        while self.missing_machines and not self._stop_event.is_set():
            self.missing_machines = [
                number for number in self.missing_machines if not store.check([self._store_key(number)])
            ]
            if self.missing_machines and time.monotonic() - begun > seconds:
                return {}
            if self.missing_machines and time.monotonic() - asked > REMINDER_SECONDS:
                asked = time.monotonic()
                sys.stderr.write(f"{self.describe_missing()}\n")
            self._stop_event.wait(_POLL_SECONDS if self.missing_machines else 0)
        if self.missing_machines:
            return {}
        found = {number: json.loads(store.get(self._store_key(number))) for number in range(self.size)}
        store.set(self._store_key(self.number, "knows"), "")
        if self.number == 0:
            self._wait_for_readers(store)
        return found

    def stop_waiting(self) -> None:
        """Wait no longer: Python aborts when it ends beside a thread that is in the store's C++ (torch 2.13)."""
        self._stop_event.set()
        if self.is_alive():
            self.join(_LEAVE_SECONDS)

    def describe_missing(self) -> str:
        """One line about who is not here yet."""
        here = self.size - len(self.missing_machines)
        machines = (
            f"machine{'s' if len(self.missing_machines) > 1 else ''} {', '.join(map(str, self.missing_machines))}"
        )
        return f"waiting for {machines} at {self.host}:{self.port} ({here} of {self.size} are here)"

    def _wait_for_readers(self, store: Any) -> None:
        """The store ends with machine 0, which may be about to leave: let the others read first."""
        deadline = time.monotonic() + REMINDER_SECONDS
        readers = [self._store_key(number, "knows") for number in range(self.size)]
        while not store.check(readers) and time.monotonic() < deadline:
            self._stop_event.wait(_POLL_SECONDS)

    def _store_key(self, number: int, what: str = "facts") -> str:
        return f"anabatic/{self.job}/machine/{number}/{what}"

    def _connect_store(self, deadline: float) -> Any:
        from torch.distributed import DistNetworkError, TCPStore

        while True:
            left = min(_CONNECT_SECONDS, max(1.0, deadline - time.monotonic()))
            try:
                store = TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=left))
            except DistNetworkError:  # machine 0 has not opened it yet; the rendezvous tells when it is too late
                if self._stop_event.wait(_POLL_SECONDS) or time.monotonic() > deadline:
                    raise
                continue
            store.set_timeout(timedelta(seconds=_CONNECT_SECONDS))
            return store


def describe_store_error(error: BaseException) -> str:
    """Return in one line what torch's store says of the way to machine 0."""
    told = " ".join(f"{type(error).__name__}: {error} {error.__cause__ or ''}".split())
    return "what answers there is another program, no training" if _UNKNOWN_GREETING in told else told[:400]
