"""Run a job on a Ray cluster: a placement group with one bundle per machine, and the launcher in each bundle.

Ray finds the machines; `ray_driver.py` places a launcher on each and follows it. This process watches the driver and
the head of the cluster, and starts the job again, from its newest checkpoint, when a machine or the head was lost.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any, TypeVar

from anabatic.core import extras, log, ray_address, relaunch
from anabatic.core.errors import ConfigError, Failure
from anabatic.core.stop_signals import STOP_SIGNALS
from anabatic.launch.schedulers.ray_node import END_SECONDS, LEASE_SECONDS

_LOOK_SECONDS = 0.5
_CONNECT_SECONDS = 60.0
"""A driver that has not connected by then never will: Ray asks a head that does not answer again and again."""
_HEAD_TRIES = 6
"""Looks in a row at which a head does not answer before it counts as lost."""
_RESUME_HINT = "then start the same command again: it continues from the newest checkpoint"


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """Resources and options of a job on Ray.

    Attributes:
        address: address of the cluster; `auto`: RAY_ADDRESS, else the cluster on this machine.
        resource: Ray's resource name of the devices, `NPU` or `GPU`; empty: only cores are requested.
        cpus: cores of each bundle.
        spread_nodes: place every bundle on a separate machine.
        timeout_seconds: timeout for the cluster to reserve the resources.
        max_restarts: how often the job is started again after a machine or the head was lost.
        options: options of `anabatic launch` on every machine.
        env: variables of the launchers; Ray forwards none of the driver's.
        runtime_env: Ray's runtime environment of the launchers.
    """

    address: str = "auto"
    nodes: int = 1
    nproc: int = 1
    resource: str = "NPU"
    cpus: int = 1
    spread_nodes: bool = True
    timeout_seconds: float = 600.0
    max_restarts: int = 3
    options: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    runtime_env: dict[str, Any] = field(default_factory=dict)

    @property
    def bundle_resources(self) -> dict[str, float]:
        """Return the resources of one bundle."""
        return {"CPU": float(self.cpus), **({self.resource: float(self.nproc)} if self.resource else {})}

    @classmethod
    def from_dict(cls: type[_Job], tree: dict[str, Any]) -> _Job:
        """Make a job of what `asdict` and JSON made of one."""
        env = tuple((str(key), str(value)) for key, value in tree["env"])
        return cls(**{**tree, "options": tuple(tree["options"]), "env": env})


_Job = TypeVar("_Job", bound=RayJob)


def run(job: RayJob, command: list[str], recipe: str) -> int:
    """Run a training command on the cluster and return its exit code.

    Raises:
        ConfigError: ray is not installed, or there is no cluster at the address.
        Failure: the cluster lacks the requested resources, or a machine or the head was lost too often.
    """
    extras.require_installed("ray", "anabatic launch ray")
    ray_address.require_head(job.address)
    address = ray_address.split_address(job.address)
    received: list[int] = []
    material = json.dumps({"job": asdict(job), "command": command, "recipe": recipe})
    with _record_signals(received):
        for restarts in range(job.max_restarts + 1):
            attempt = _Attempt(job, material, received, address, is_first=not restarts)
            outcome = attempt.run()
            if outcome is not None:
                return outcome
            address = attempt.address
            if received:
                raise Failure(f"{attempt.loss}; the job is stopped", f"look at its machines, {_RESUME_HINT}")
            if restarts < job.max_restarts:
                log.warn(f"{attempt.loss}; starting again from the newest checkpoint ({restarts + 1} of "
                         f"{job.max_restarts})")  # fmt: skip
                attempt.await_cluster()
    raise Failure(
        f"{attempt.loss}, after {job.max_restarts} restarts",
        f"`ray status` shows which machines are left; start what is missing by `ray start`, {_RESUME_HINT}",
    )


class _Attempt:
    """One driver, from its start to its end.

    Attributes:
        address: of the cluster's head, once it is known.
        loss: what was lost, as a sentence.
    """

    def __init__(
        self, job: RayJob, material: str, received: list[int], address: tuple[str, int] | None, is_first: bool
    ) -> None:
        self.job, self._received, self._material = job, received, material
        self.address, self.loss = address, ""
        self._is_connected, self._is_first, self._lost_at = False, is_first, 0.0

    def run(self) -> int | None:
        """Run the driver; return the job's exit code, None when a machine or the head was lost.

        A cluster that comes back is asked until it takes a driver: its head answers before its machines are there.

        Raises:
            ConfigError, Failure: what the driver raised.
        """
        deadline = time.monotonic() + self.job.timeout_seconds
        while "unreachable" in (event := self._run_driver()):
            if self._is_first or self._received or time.monotonic() > deadline:
                raise ray_address.make_connect_error(self.job.address, event["unreachable"])
            time.sleep(_LOOK_SECONDS)
        return self._conclude(event)

    def _run_driver(self) -> dict[str, Any]:
        read_end, write_end = os.pipe()
        words = [sys.executable, "-m", __name__.replace("ray_cluster", "ray_driver"), str(write_end)]
        driver = subprocess.Popen(
            words, stdin=subprocess.PIPE, pass_fds=[write_end], env=relaunch.build_child_environment()
        )
        os.close(write_end)
        assert driver.stdin is not None
        try:
            with driver.stdin as stdin:
                stdin.write(self._material.encode())
            with os.fdopen(read_end, "rb", buffering=0) as pipe:
                return self._follow(driver, pipe)
        finally:
            driver.kill()
            driver.wait()

    def await_cluster(self) -> None:
        """Wait until the head answers.

        Raises:
            Failure: it does not within the time of `job`.
        """
        deadline = time.monotonic() + self.job.timeout_seconds
        while self.address is not None and not self._received and not ray_address.answers(self.address):
            if time.monotonic() > deadline:
                raise Failure(
                    f"{self.loss}; it did not come back within {self.job.timeout_seconds:g} s",
                    f"start it again by `ray start --head` and the machines by `ray start --address`, {_RESUME_HINT}",
                )
            time.sleep(_LOOK_SECONDS)

    def _follow(self, driver: subprocess.Popen[bytes], pipe: Any) -> dict[str, Any]:
        """Return the last event of the driver; empty when it ended, or was ended, without one."""
        deadline = time.monotonic() + _CONNECT_SECONDS
        unanswered, is_told, rest = 0, False, b""
        while True:
            if select.select([pipe], [], [], _LOOK_SECONDS)[0]:
                piece = os.read(pipe.fileno(), 65536)
                if not piece:
                    self._lost_at = time.monotonic()
                    return {}
                *lines, rest = (rest + piece).split(b"\n")
                for event in map(json.loads, lines):
                    if "connected" not in event:
                        return dict(event)
                    self.address, self._is_connected = ray_address.split_address(event["connected"]), True
            if self._received and not is_told:
                is_told = True
                driver.send_signal(signal.SIGTERM)
            if not self._is_connected and time.monotonic() > deadline:
                return {"unreachable": f"no answer within {_CONNECT_SECONDS:g} s"}
            unanswered = 0 if self.address is None or ray_address.answers(self.address) else unanswered + 1
            if unanswered == _HEAD_TRIES:
                return self._end_without_head(driver, pipe)

    def _end_without_head(self, driver: subprocess.Popen[bytes], pipe: Any) -> dict[str, Any]:
        """Let the driver ask its launchers to save, which needs no head, for as long as they live without a driver."""
        self._lost_at = time.monotonic()
        driver.send_signal(signal.SIGTERM)
        has_told = bool(select.select([pipe], [], [], LEASE_SECONDS)[0]) and bool(os.read(pipe.fileno(), 65536))
        return {"headless": True, "ended": has_told}

    def _conclude(self, event: dict[str, Any]) -> int | None:
        head = "the head of the Ray cluster" + (f" at {self.address[0]}:{self.address[1]}" if self.address else "")
        if "code" in event:
            return int(event["code"])
        if "error" in event:
            is_config, message, hint = event["error"]
            raise (ConfigError if is_config else Failure)(message, hint)
        if "lost" in event:
            self.loss = str(event["lost"])
            return None
        self.loss = f"{head} does not answer" if "headless" in event else f"the connection to {head} has ended"
        if not event.get("ended"):  # launchers that nobody polls exit: two trainings must not write one run folder
            _sleep_until(self._lost_at + END_SECONDS + 1.0, self._received)
        return None


def _sleep_until(deadline: float, received: list[int]) -> None:
    while time.monotonic() < deadline and not received:
        time.sleep(_LOOK_SECONDS)


@contextmanager
def _record_signals(received: list[int]) -> Iterator[None]:
    def record_signal(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    previous_handlers = {signum: signal.signal(signum, record_signal) for signum in STOP_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)
