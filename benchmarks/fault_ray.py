"""Random faults under Ray: they are injected into a job of `anabatic launch ray`, which must recover by itself.

    python benchmarks/fault_ray.py [--faults 20] [--seed 0] [--kinds rank,actor,...] [--keep FOLDER]

The cluster is a real one of two raylets on this machine (`tests/cluster/ray_cluster.py`); a supervisor starts `ray
start --block` again when it ends, as systemd would. The figures are those of `faults.py`: how many faults the training
recovered from by itself, the steps done again beyond the interval of the checkpoints, the seconds to the next finished
step, and whether the weights and all losses are those of an undisturbed run, bit by bit.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

import faults
from anabatic.core import heartbeat
from fault_kinds import Kind, Site
from fault_machines import ANABATIC, Machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from cluster.ray_cluster import HEAD, RAYLET, RayCluster, RayMachine, ray_cluster

BACK_SECONDS = 2.0
"""After which a machine of Ray that has ended is started again."""
ACTOR = "ray::RayNode"


class RayJob(Machine):
    """The command `anabatic launch ray` with its supervisor, who looks after the machines of the cluster, too."""

    def __init__(self, cluster: RayCluster, log: Path) -> None:
        super().__init__(0, "", "127.0.0.1", log)
        self.cluster = cluster
        self._gone: dict[int, float] = {}

    def tend(self) -> None:
        """Start what has ended; without its head a machine is ended at once, not after Ray's minute."""
        super().tend()
        for machine in self.cluster.machines:
            if not machine.has_ended():
                continue
            since = self._gone.setdefault(machine.number, time.monotonic())
            if machine.number == 0:
                self.cluster.machines[1].end()
            if time.monotonic() - since > BACK_SECONDS:
                del self._gone[machine.number]
                machine.end()
                machine.start()

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes that train, by rank; they run below Ray's workers."""
        found = {}
        for beat in Path(tempfile.gettempdir()).glob("anabatic-*/try-*/rank-*.beat"):
            with contextlib.suppress(psutil.Error, OSError):
                if (told := heartbeat.read_heartbeat(beat)) is not None:
                    process = psutil.Process(told[0])
                    if any(one.pid in self._actors() for one in process.parents()):
                        found[int(beat.stem.partition("-")[2])] = process
        return found

    def _actors(self) -> set[int]:
        return {one.pid for machine in self.cluster.machines for one in machine.processes(ACTOR)}


def _cluster(site: Site) -> RayCluster:
    job = site.machines[0]
    assert isinstance(job, RayJob)
    return job.cluster


def _kill_rank(site: Site, draw: random.Random) -> None:
    draw.choice([one for _, one in site.workers().values()]).kill()


def _kill_actor(site: Site, draw: random.Random) -> None:
    draw.choice([one for machine in _cluster(site).machines for one in machine.processes(ACTOR)]).kill()


def _kill_launcher(site: Site, draw: random.Random) -> None:
    actors = [one for machine in _cluster(site).machines for one in machine.processes(ACTOR)]
    draw.choice([child for actor in actors for child in actor.children()]).kill()


def _kill_raylet(site: Site, draw: random.Random) -> None:
    _killed_part(_cluster(site).machines[1], RAYLET)


def _kill_head(site: Site, draw: random.Random) -> None:
    _killed_part(_cluster(site).machines[0], HEAD)


def _kill_command(site: Site, draw: random.Random) -> None:
    process = site.machines[0].process
    assert process is not None
    process.kill()


def _killed_part(machine: RayMachine, name: str) -> None:
    if not machine.processes(name):
        raise IndexError(name)
    machine.kill(name)


KINDS = {
    "rank": Kind("kill -9 of a rank", _kill_rank, r"rank \d+ ended without a message \(killed by SIGKILL\)"),
    "actor": Kind("kill -9 of an actor of Ray", _kill_actor, r"of the Ray cluster is lost"),
    "launcher": Kind("kill -9 of a launcher", _kill_launcher, r"the launcher on machine \d .* was killed"),
    "raylet": Kind("kill -9 of a raylet; its machine is back after 2 s", _kill_raylet, r"of the Ray cluster is lost"),
    "head": Kind("kill -9 of the head; the cluster is new after 2 s", _kill_head, r"the head of the Ray cluster"),
    "command": Kind("kill -9 of `anabatic launch ray`", _kill_command, r"asking Ray for"),
}


def run_job(plan: faults.Plan, name: str, steps: int, work: Callable[[Site], None]) -> tuple[bytes, list[str]]:
    """Train on a cluster of its own while `work` is done; return the end."""
    folder = plan.folder / name
    folder.mkdir()
    with ray_cluster() as cluster:
        job = RayJob(cluster, folder / "job.log")
        words = [
            "launch",
            "ray",
            "--address",
            cluster.address,
            "--nnodes",
            "2",
            "--nproc",
            "1",
            "--join-seconds",
            "120",
        ]
        words += ["--max-restarts", "1000", "--hang-seconds", f"{plan.hang:g}", "--"]
        job.command = [*ANABATIC, *words, *plan.job(folder / "run", steps, "--device.type", "cpu")]
        job.environment = {**os.environ, **cluster.variables, "ANABATIC_CACHE": str(plan.folder / "cache")}
        job.start()
        site = Site([job], folder / "run", None, plan.hang, plan.patience)
        try:
            work(site)
            return faults.finish(site)
        finally:
            job.down = True
            job.kill()


def main() -> None:
    """Inject the faults and print the table."""
    faults.under_scheduler(__doc__, KINDS, run_job)


if __name__ == "__main__":
    main()
