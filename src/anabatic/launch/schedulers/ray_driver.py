"""The program that talks to a Ray cluster for `anabatic launch ray`: it places the launchers and follows them.

It is a process of its own because Ray ends a driver, or lets a call of it hang, when a raylet or the head is lost
(`ray_cluster.py` watches it). It reads a `RayJob` and a command as JSON from stdin and writes JSON lines to a pipe:
`connected`, then one of `code`, `lost`, `unreachable` and `error`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

from anabatic.core import extras, json_reader, log, relaunch
from anabatic.core.errors import AnabaticError, ConfigError, Failure
from anabatic.core.stop_signals import STOP_SIGNALS
from anabatic.launch import job_secret
from anabatic.launch.schedulers.ray_cluster import RayJob
from anabatic.launch.schedulers.ray_node import LEASE_SECONDS, RayNode

_POLL_SECONDS = 0.5


class MachineLostError(Exception):
    """A machine, its raylet or the launcher's actor on it has ended."""


class DriverSession:
    """One try to run a job: connection, placement group, an actor for each machine.

    Args:
        write: receives events for the parent.
    """

    def __init__(self, job: RayJob, write: Any) -> None:
        self.job, self._write = job, write
        self.received: list[int] = []
        """Stop signals of this process."""

    def run(self, command: list[str], recipe: str) -> None:
        """Run the job and write how it ended."""
        try:
            ray = self._connect()
        except ConfigError:
            raise
        except (ConnectionError, RuntimeError, ValueError) as error:
            self._write(unreachable=" ".join(str(error).split())[:300])
            return
        for signum in STOP_SIGNALS:  # after ray's own handlers
            signal.signal(signum, self._record_signal)
        self._write(connected=str(ray.get_runtime_context().gcs_address))
        group = _reserve_bundles(ray, self.job)
        launchers = _Launchers(ray, self.job, group, self.received)
        try:
            self._write(code=launchers.run(command, recipe))
        except MachineLostError as error:
            self._write(lost=str(error))
        finally:
            launchers.close()
            ray.util.remove_placement_group(group)
            ray.shutdown()

    def _record_signal(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)

    def _connect(self) -> Any:
        colour = str(int(log.should_use_colour()))
        os.environ.setdefault("RAY_COLOR_PREFIX", colour)  # before ray prints lines of the workers
        ray = extras.import_optional("ray", "anabatic launch ray", "on every machine")
        ray.init(address=self.job.address, logging_level="ERROR", namespace="anabatic")
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


class _Launchers:
    """The launchers of a job, one in each bundle."""

    def __init__(self, ray: Any, job: RayJob, group: Any, received: list[int]) -> None:
        self.ray, self.job, self.received = ray, job, received
        strategy_class = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        devices = {job.resource: job.nproc} if job.resource not in ("", "GPU") else {}
        options = {"num_cpus": job.cpus, "num_gpus": job.nproc if job.resource == "GPU" else 0, "resources": devices}
        if job.runtime_env:
            options["runtime_env"] = job.runtime_env
        actor = ray.remote(RayNode)
        self.nodes = [
            actor.options(
                **options, scheduling_strategy=strategy_class(group, placement_group_bundle_index=index)
            ).remote()
            for index in range(job.nodes)
        ]
        self.hosts = [f"machine {index}" for index in range(job.nodes)]
        self.exit_codes: dict[int, int] = {}
        self.first_failure_code = 0
        """Exit code of the launcher that failed first."""

    def run(self, command: list[str], recipe: str) -> int:
        """Start all launchers and wait for their end; return the exit code of the first that failed.

        Raises:
            MachineLostError: an actor or a launcher was killed; the others have been asked to save, and have ended.
            Failure: the runtime environment cannot be made.
        """
        is_stopping = False
        try:
            self._start(command, recipe)
            while len(self.exit_codes) < len(self.nodes):
                time.sleep(_POLL_SECONDS)
                self._poll_nodes()
                if (self.received or self.first_failure_code) and not is_stopping:
                    is_stopping = True
                    self._stop_nodes()
        except MachineLostError:
            self._end_others()
            raise
        return self.first_failure_code

    def close(self) -> None:
        """Kill the actors, and with them their processes."""
        for node in self.nodes:
            self.ray.kill(node)

    def _start(self, command: list[str], recipe: str) -> None:
        endpoints = [self._ask(index, "find_endpoint") for index in range(len(self.nodes))]
        self.hosts = [f"machine {index} ({host})" for index, (host, _) in enumerate(endpoints)]
        address, port = endpoints[0]
        log.info(f"machines: {', '.join(host for host, _ in endpoints)}; they meet at {address}:{port}")
        variables = {job_secret.VARIABLE: job_secret.make_secret(), **dict(self.job.env)}
        for index in range(len(self.nodes)):
            launch = [f"--nproc={self.job.nproc}", *self.job.options]
            if self.job.nodes > 1:
                launch += [f"--nnodes={self.job.nodes}", f"--node-rank={index}"]
                launch += [f"--master-addr={address}", f"--master-port={port}"]
            told = self._ask(index, "start", launch, command, recipe, variables)
            devices = f"; {told['devices']}" if told["devices"] else ""
            log.info(f"{self.hosts[index]}: log in {told['log']}, errors in .err beside it{devices}")

    def _ask(self, index: int, method: str, *arguments: Any) -> Any:
        """Call an actor's method and return its result."""
        exceptions = self.ray.exceptions
        try:
            return self.ray.get(getattr(self.nodes[index], method).remote(*arguments))
        except exceptions.RuntimeEnvSetupError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise Failure(
                f"Ray cannot make the runtime environment: {' '.join(lines)[-500:]}",
                "correct the file of --runtime-env; the log runtime_env_*.log of that machine has more",
            ) from error
        except exceptions.RayActorError as error:
            raise MachineLostError(f"{self.hosts[index]} of the Ray cluster is lost: {_first_line(error)}") from error

    def _poll_nodes(self) -> None:
        for index in range(len(self.nodes)):
            if index in self.exit_codes:
                continue
            code = self._ask(index, "poll")
            if code is None:
                continue
            if code == -signal.SIGKILL:
                self.exit_codes[index] = code
                raise MachineLostError(f"the launcher on {self.hosts[index]} was killed (SIGKILL)")
            self.exit_codes[index] = code if code >= 0 else 128 - code
            self.first_failure_code = self.first_failure_code or self.exit_codes[index]

    def _stop_nodes(self) -> None:
        for index in range(len(self.nodes)):
            if index not in self.exit_codes:
                self._ask(index, "stop")

    def _end_others(self) -> None:
        """Ask what still runs to save and exit, and wait for it as long as a launcher without a driver would live."""
        deadline = time.monotonic() + LEASE_SECONDS
        running = {index for index in range(len(self.nodes)) if index not in self.exit_codes}
        is_told: set[int] = set()
        while running and time.monotonic() < deadline:
            for index in sorted(running):
                try:
                    if index not in is_told:
                        self._ask(index, "stop")
                        is_told.add(index)
                    elif self._ask(index, "poll") is not None:
                        running.discard(index)
                except MachineLostError:
                    running.discard(index)
            time.sleep(_POLL_SECONDS)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("The actor")), lines[0] if lines else "")


def main() -> None:
    """Run one try; the argument is the descriptor of the pipe."""
    relaunch.tie_to_parent()
    log.setup_logging()
    given = json_reader.loads(sys.stdin.read())
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as pipe:

        def write(**event: Any) -> None:
            pipe.write(json.dumps(event) + "\n")
            pipe.flush()

        try:
            DriverSession(RayJob.from_dict(given["job"]), write).run(given["command"], given["recipe"])
        except AnabaticError as error:
            write(error=[isinstance(error, ConfigError), str(error), error.hint])


if __name__ == "__main__":
    main()
