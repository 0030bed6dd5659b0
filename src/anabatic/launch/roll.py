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

from anabatic.launch.way import ASK

PACKAGES = ("anabatic", "torch", "torch_npu", "transformers", "peft", "safetensors")
_LOOK = 0.5
_CONNECT = 30.0
"""Seconds for one connection, and for an answer."""
_STRANGER = "invalid value returned from server"
"""In what torch's store says when its greeting is not understood (torch 2.13, TCPStore.cpp, ping)."""
_LEAVE = 5.0
"""Seconds for the store to answer once more."""


def facts(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be, or should be, the same on every machine.

    Args:
        recipe: the resolved settings, flat: dotted key -> value.
    """
    versions: dict[str, str | None] = {"python": python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {"recipe": dict(recipe), "versions": versions}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"optim": {"lr": 1}}` -> `{"optim.lr": 1}`."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        result.update(flat(value, f"{name}.") if isinstance(value, dict) else {name: value})
    return result


def differences(found: Mapping[int, Mapping[str, Any]], part: str) -> list[str]:
    """Name what differs from machine 0 in one part of the facts, machine by machine."""
    first = found[0][part]
    told = []
    for number, other in sorted(found.items()):
        for key in sorted(first.keys() | other[part].keys()):
            mine, theirs = first.get(key), other[part].get(key)
            if mine != theirs:
                told.append(f"{key} is {_shown(mine)} on machine 0 and {_shown(theirs)} on machine {number}")
    return told


def _shown(value: Any) -> str:
    return "missing" if value is None else str(value)


class Roll(threading.Thread):
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
        self._over = threading.Event()
        self.missing = [other for other in range(size) if other != number]

    def run(self) -> None:
        """Work until all are here, and compare; end when the store is gone, whose loss the agent reports."""
        from torch.distributed import DistError

        try:
            found = self.meet()
        except DistError:
            return
        if not found:
            return
        if recipes := differences(found, "recipe"):
            self.refuse(recipes)
        elif self.number == 0:
            for line in differences(found, "versions"):
                sys.stderr.write(f"warning: {line}\n")

    def meet(self, seconds: float = float("inf")) -> dict[int, dict[str, Any]]:
        """Return the facts of every machine once all are here; of none when time is up, or at `end`."""
        begun = asked = time.monotonic()
        store = self._connect(begun + seconds)
        store.set(self._key(self.number), json.dumps(self.own))
        while self.missing and not self._over.is_set():
            self.missing = [number for number in self.missing if not store.check([self._key(number)])]
            if self.missing and time.monotonic() - begun > seconds:
                return {}
            if self.missing and time.monotonic() - asked > ASK:
                asked = time.monotonic()
                sys.stderr.write(f"{self.waiting()}\n")
            self._over.wait(_LOOK if self.missing else 0)
        if self.missing:
            return {}
        found = {number: json.loads(store.get(self._key(number))) for number in range(self.size)}
        store.set(self._key(self.number, "knows"), "")
        if self.number == 0:
            self._wait_for_readers(store)
        return found

    def end(self) -> None:
        """Wait no longer: Python aborts when it ends beside a thread that is in the store's C++ (torch 2.13)."""
        self._over.set()
        if self.is_alive():
            self.join(_LEAVE)

    def waiting(self) -> str:
        """One line about who is not here yet."""
        here = self.size - len(self.missing)
        machines = f"machine{'s' if len(self.missing) > 1 else ''} {', '.join(map(str, self.missing))}"
        return f"waiting for {machines} at {self.host}:{self.port} ({here} of {self.size} are here)"

    def _wait_for_readers(self, store: Any) -> None:
        """The store ends with machine 0, which may be about to leave: let the others read first."""
        deadline = time.monotonic() + ASK
        readers = [self._key(number, "knows") for number in range(self.size)]
        while not store.check(readers) and time.monotonic() < deadline:
            self._over.wait(_LOOK)

    def _key(self, number: int, what: str = "facts") -> str:
        return f"anabatic/{self.job}/machine/{number}/{what}"

    def _connect(self, deadline: float) -> Any:
        from torch.distributed import DistNetworkError, TCPStore

        while True:
            left = min(_CONNECT, max(1.0, deadline - time.monotonic()))
            try:
                store = TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=left))
            except DistNetworkError:  # machine 0 has not opened it yet; the rendezvous tells when it is too late
                if self._over.wait(_LOOK) or time.monotonic() > deadline:
                    raise
                continue
            store.set_timeout(timedelta(seconds=_CONNECT))
            return store


def lost(error: BaseException) -> str:
    """Return in one line what torch's store says of the way to machine 0."""
    told = " ".join(f"{type(error).__name__}: {error} {error.__cause__ or ''}".split())
    return "what answers there is another program, no training" if _STRANGER in told else told[:400]
