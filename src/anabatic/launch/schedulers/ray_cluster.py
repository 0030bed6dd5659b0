"""Run a job on a Ray cluster: a placement group with one bundle per machine, and the launcher in each bundle.

Ray finds the machines and hides other jobs' devices (it sets ASCEND_RT_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES in a
bundle: docs.ray.io, "Accelerator Support"); the launcher supervises the processes.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from anabatic.core import extras, log, relaunch
from anabatic.core.errors import ConfigError, Failure
from anabatic.core.stop_signals import STOP_SIGNALS

_POLL_SECONDS = 1.0
_LAUNCHER_SCRIPT = """
import os, sys
from anabatic.core import relaunch
relaunch.tie_to_parent()
os.execv(sys.executable, [sys.executable, "-m", "anabatic", *sys.argv[1:]])
"""
"""Runs the launcher so that it ends with the actor: Ray ends actors whose driver was killed."""


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """Resources and options of a job on Ray.

    Attributes:
        address: address of the cluster; `auto`: RAY_ADDRESS, else the cluster on this machine.
        resource: Ray's resource name of the devices, `NPU` or `GPU`; empty: only cores are requested.
        cpus: cores of each bundle.
        spread_nodes: place every bundle on a separate machine.
        timeout_seconds: timeout for the cluster to reserve the resources.
        options: options of `anabatic launch` on every machine.
        env: variables of the launchers; Ray forwards none of the driver's.
    """

    address: str = "auto"
    nodes: int = 1
    nproc: int = 1
    resource: str = "NPU"
    cpus: int = 1
    spread_nodes: bool = True
    timeout_seconds: float = 600.0
    options: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    @property
    def bundle_resources(self) -> dict[str, float]:
        """Return the resources of one bundle."""
        return {"CPU": float(self.cpus), **({self.resource: float(self.nproc)} if self.resource else {})}


class RayNode:
    """Actor that runs the launcher in one bundle."""

    def __init__(self) -> None:
        self._launcher: subprocess.Popen[bytes] | None = None
        self._temp_folder = tempfile.TemporaryDirectory(prefix="anabatic-")

    def find_endpoint(self) -> tuple[str, int]:
        """Return the machine's address in Ray, and a free port on it."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return str(ray.util.get_node_ip_address()), int(probe.getsockname()[1])

    def start(self, launch: list[str], command: list[str], recipe: str, env: dict[str, str]) -> None:
        """Start `anabatic launch` with the recipe in a temporary file."""
        path = Path(self._temp_folder.name) / "job.yaml"
        path.write_text(recipe, encoding="utf-8")
        variables = {**relaunch.build_child_environment(), **env}
        if "OMP_NUM_THREADS" not in env:
            variables.pop("OMP_NUM_THREADS", None)  # Ray's value is for one task; the launcher divides the cores
        argv = [sys.executable, "-c", _LAUNCHER_SCRIPT, "launch", *launch, "--", *command, "-c", str(path)]
        self._launcher = subprocess.Popen(argv, env=variables)

    def poll(self) -> int | None:
        """Return the launcher's exit code; None while it runs."""
        return None if self._launcher is None else self._launcher.poll()

    def stop(self) -> None:
        """Ask the launcher's processes to save and exit."""
        if self._launcher is not None and self._launcher.poll() is None:
            self._launcher.terminate()


def run(job: RayJob, command: list[str], recipe: str) -> int:
    """Run a training command on the cluster and return its exit code.

    Raises:
        ConfigError: ray is not installed, or there is no cluster at the address.
        Failure: the cluster lacks the requested resources, or a machine was lost.
    """
    ray = _connect_cluster(job)
    received: list[int] = []
    previous_handlers = {signum: signal.signal(signum, _make_signal_recorder(received)) for signum in STOP_SIGNALS}
    try:
        group = _reserve_bundles(ray, job)
        driver = _RayDriver(ray, job, group, received)
        try:
            return driver.run(command, recipe)
        finally:
            driver.close()
            ray.util.remove_placement_group(group)
    finally:
        ray.shutdown()
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)


def _make_signal_recorder(received: list[int]) -> Any:
    def record_signal(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    return record_signal


def _connect_cluster(job: RayJob) -> Any:
    os.environ.setdefault(
        "RAY_COLOR_PREFIX", str(int(log.should_use_colour()))
    )  # before ray prints lines of the workers
    ray = extras.import_optional("ray", "anabatic launch ray", "on every machine")
    try:
        ray.init(address=job.address, logging_level="ERROR", namespace="anabatic")
    except (ConnectionError, RuntimeError, ValueError) as error:
        message = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"there is no Ray cluster at {job.address}: {message}",
            "start one by `ray start --head` and `ray start --address HEAD:6379`, or give --address",
        ) from error
    return ray


def _reserve_bundles(ray: Any, job: RayJob) -> Any:
    strategy = "STRICT_SPREAD" if job.spread_nodes else "PACK"
    group = ray.util.placement_group([job.bundle_resources] * job.nodes, strategy=strategy)
    log.info(
        f"asking Ray for {job.nodes} x "
        f"({_format_bundle(job.bundle_resources)}){', each on its own machine' if job.spread_nodes else ''}"
    )
    try:
        ray.get(group.ready(), timeout=job.timeout_seconds)
    except ray.exceptions.GetTimeoutError as error:
        ray.util.remove_placement_group(group)
        machines = sum(bool(node["Alive"]) for node in ray.nodes())
        total, free = ray.cluster_resources(), ray.available_resources()
        resources = "; ".join(
            f"{name} {total.get(name, 0):g}, {free.get(name, 0):g} free" for name in job.bundle_resources
        )
        raise Failure(
            f"Ray did not give {job.nodes} x ({_format_bundle(job.bundle_resources)}) within {job.timeout_seconds:g} "
            f"s: the cluster has"
            f" {machines} machines with {resources}",
            "lower --nnodes or --nproc, choose --resource, or allow several bundles on one machine by --pack",
        ) from error
    return group


def _format_bundle(bundle: dict[str, float]) -> str:
    return ", ".join(f"{name} {count:g}" for name, count in bundle.items())


class _RayDriver:
    def __init__(self, ray: Any, job: RayJob, group: Any, received: list[int]) -> None:
        self.ray, self.job, self.received = ray, job, received
        strategy_class = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        devices = {job.resource: job.nproc} if job.resource not in ("", "GPU") else {}
        options = {"num_cpus": job.cpus, "num_gpus": job.nproc if job.resource == "GPU" else 0, "resources": devices}
        actor = ray.remote(RayNode)
        self.nodes = [
            actor.options(
                **options, scheduling_strategy=strategy_class(group, placement_group_bundle_index=index)
            ).remote()
            for index in range(job.nodes)
        ]
        self.exit_codes: dict[int, int] = {}
        self.first_failure_code = 0
        """Exit code of the launcher that failed first."""
        self.is_stopping = False

    def run(self, command: list[str], recipe: str) -> int:
        """Start all launchers and wait for their end."""
        endpoints = self.ray.get([node.find_endpoint.remote() for node in self.nodes])
        address, port = endpoints[0]
        log.info(f"machines: {', '.join(host for host, _ in endpoints)}; they meet at {address}:{port}")
        for index, node in enumerate(self.nodes):
            launch = [f"--nproc={self.job.nproc}", *self.job.options]
            if self.job.nodes > 1:
                launch += [f"--nnodes={self.job.nodes}", f"--node-rank={index}"]
                launch += [f"--master-addr={address}", f"--master-port={port}"]
            self.ray.get(node.start.remote(launch, command, recipe, dict(self.job.env)))
        while len(self.exit_codes) < len(self.nodes):
            time.sleep(_POLL_SECONDS)
            self._poll_nodes(endpoints)
            if (self.received or self.first_failure_code) and not self.is_stopping:
                self._stop_nodes()
        return self.first_failure_code

    def close(self) -> None:
        """Kill the actors, and with them their processes."""
        for node in self.nodes:
            self.ray.kill(node)

    def _poll_nodes(self, endpoints: list[tuple[str, int]]) -> None:
        for index, node in enumerate(self.nodes):
            if index in self.exit_codes:
                continue
            try:
                code = self.ray.get(node.poll.remote())
            except self.ray.exceptions.RayActorError as error:
                self._stop_nodes(lost_index=index)
                raise Failure(
                    f"machine {index} ({endpoints[index][0]}) of the Ray cluster is lost: {str(error).splitlines()[0]}",
                    "start the same command again: it continues from the newest checkpoint",
                ) from error
            if code is not None:
                self.exit_codes[index] = code if code >= 0 else 128 - code
                self.first_failure_code = self.first_failure_code or self.exit_codes[index]

    def _stop_nodes(self, lost_index: int = -1) -> None:
        self.is_stopping = True
        for index, node in enumerate(self.nodes):
            if index not in self.exit_codes and index != lost_index:
                self.ray.get(node.stop.remote())
