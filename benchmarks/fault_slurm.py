"""Random faults under Slurm: they are injected into a job of `anabatic launch slurm`, which must recover by itself.

    python benchmarks/fault_slurm.py [--faults 20] [--seed 0] [--kinds rank,launcher,...] [--keep FOLDER]

The cluster is a real one on this machine (`tests/cluster/slurm_cluster.py`; needs root and the packages slurm-wlm and
munge), and the job is the batch script as it is printed, submitted once. A daemon that was killed is started again
after 2 s, as systemd would, and a machine that was lost is set down and resumed, as the health check of a site does.
The figures are those of `faults.py`.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

import faults
from fault_kinds import Kind, Site, Stuck
from fault_machines import ANABATIC, Machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from cluster.slurm_cluster import SlurmCluster, find_obstacle, slurm_cluster

BACK_SECONDS = 2.0
"""After which a daemon is started again, and a lost machine is resumed."""
LOOK_SECONDS = 0.5
"""Between two questions to Slurm."""
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
UNNOTICED = ("slurmd", "controller")
"""Kinds during which the training goes on."""


class SlurmRun(Machine):
    """A batch job on a cluster."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        super().__init__(0, "", "127.0.0.1", folder / "job.log")
        self.cluster, self.folder, self.number, self.state = cluster, folder, 0, ""
        self.log.touch()
        self._looked = 0.0

    def start(self) -> None:
        """Submit the script."""
        script = subprocess.run(self.command, env=self.environment, check=True, capture_output=True, text=True).stdout
        self.number = self.cluster.submit(script, self.folder)

    def tend(self) -> None:
        """Look whether the job has ended; one that Slurm does not queue again is lost."""
        if self.down or time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        self.state = self.cluster.show_job(self.number)["JobState"]
        self.done = self.state in _ENDED

    def processes(self) -> list[psutil.Process]:
        """All processes of the job's steps."""
        return [one for one, _ in self._placed()]

    def on_machine(self, name: str) -> list[psutil.Process]:
        """The processes of the job on one machine, and those of Slurm that look after them."""
        found = {one.pid: one for one, node in self._placed() if node == name}
        for one in list(found.values()):
            with contextlib.suppress(psutil.Error):
                found.update((up.pid, up) for up in one.parents() if up.name().startswith("slurmstepd"))
        return list(found.values())

    def launchers(self) -> list[psutil.Process]:
        """The processes `anabatic launch`."""
        agents = [one for one in self.processes() if "anabatic.launch.local.elastic_agent" in _words(one)]
        return [up for one in agents if (up := one.parent()) is not None]

    def machines(self) -> list[str]:
        """The machines that the job has now."""
        return sorted({node for _, node in self._placed()})

    def kill(self) -> None:
        """Cancel the job."""
        with contextlib.suppress(RuntimeError):
            self.cluster.run("scancel", "--full", "--signal=KILL", self.number)

    def _placed(self) -> Iterator[tuple[psutil.Process, str]]:
        """Yield each process of the job with the name of its machine."""
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = one.environ()
                if variables.get("ANABATIC_CACHE") == self.environment["ANABATIC_CACHE"] and (
                    node := variables.get("SLURMD_NODENAME")
                ):
                    yield one, node


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def _run(site: Site) -> SlurmRun:
    run = site.machines[0]
    assert isinstance(run, SlurmRun)
    return run


def _wait_seconds(site: Site, seconds: float) -> None:
    end = time.monotonic() + seconds
    site.wait(lambda: time.monotonic() > end)


def _kill_rank(site: Site, draw: random.Random) -> None:
    draw.choice([one for _, one in site.workers().values()]).kill()


def _kill_launcher(site: Site, draw: random.Random) -> None:
    draw.choice(_run(site).launchers()).kill()


def _signal_job(site: Site, draw: random.Random) -> None:
    run = _run(site)
    number = draw.choice(["TERM", "USR1"])
    for _ in range(draw.choice([1, 2])):
        run.cluster.run("scancel", f"--signal={number}", run.number)


def _requeue(site: Site, draw: random.Random) -> None:
    run = _run(site)
    run.cluster.run("scontrol", "requeue", run.number)


def _set_node_down(site: Site, draw: random.Random) -> None:
    run = _run(site)
    name = draw.choice(run.machines())
    run.cluster.set_node_down(name)
    _wait_seconds(site, BACK_SECONDS)
    run.cluster.resume_node(name)


def _kill_machine(site: Site, draw: random.Random) -> None:
    """All that runs on a machine is gone at once; the site's health check sets it down."""
    run = _run(site)
    name = draw.choice(run.machines())
    run.cluster.kill_daemon(name)
    for one in run.on_machine(name):
        with contextlib.suppress(psutil.Error):
            one.kill()
    run.cluster.set_node_down(name)
    _wait_seconds(site, BACK_SECONDS)
    run.cluster.start_daemon(name, "-D", "-c", "-N", name)
    run.cluster.resume_node(name)


def _kill_slurmd(site: Site, draw: random.Random) -> None:
    run = _run(site)
    name = draw.choice(run.machines())
    run.cluster.kill_daemon(name)
    _wait_seconds(site, BACK_SECONDS)
    run.cluster.start_daemon(name, "-D", "-N", name)


def _kill_controller(site: Site, draw: random.Random) -> None:
    run = _run(site)
    run.down = True  # nobody can be asked
    run.cluster.kill_daemon("slurmctld")
    _wait_seconds(site, BACK_SECONDS)
    run.cluster.start_daemon("slurmctld", "-D")
    run.down = False


def _preempt(site: Site, draw: random.Random) -> None:
    run = _run(site)
    script = "#!/bin/bash\n#SBATCH --nodes=3 --exclusive --partition=high --output=/dev/null\nsleep 1\n"
    run.cluster.submit(script, run.folder)


_SAVED = r"SIG(TERM|USR1): saving|stopped after step \d+: saved"
KINDS = {
    "rank": Kind("kill -9 of a rank", _kill_rank, r"rank \d+ ended without a message \(killed by SIGKILL\)"),
    "launcher": Kind("kill -9 of a launcher", _kill_launcher, r"Killed|exit code 137"),
    "signal": Kind("`scancel --signal=TERM` or `=USR1`, once or twice", _signal_job, _SAVED),
    "preempt": Kind("preemption by a job of higher priority", _preempt, _SAVED),
    "requeue": Kind("`scontrol requeue`", _requeue, r"CANCELLED|SIGTERM: saving|DUE TO JOB REQUEUE"),
    "down": Kind("a machine set down, resumed after 2 s", _set_node_down, r"NODE FAILURE|DUE TO NODE"),
    "machine": Kind(
        "kill -9 of all of a machine, and the machine set down", _kill_machine, r"NODE FAILURE|DUE TO NODE"
    ),
    "slurmd": Kind("kill -9 of a slurmd, back after 2 s", _kill_slurmd, r"step \d+"),
    "controller": Kind("kill -9 of slurmctld, back after 2 s", _kill_controller, r"step \d+"),
}


def inject(site: Site, name: str, draw: random.Random) -> faults.Outcome:
    """Inject one fault and wait until the training has continued."""
    if name not in UNNOTICED:
        return faults.inject(site, name, draw)
    sizes, start = site.sizes(), time.time()
    try:
        KINDS[name].inject(site, draw)
        begun, step = site.begun(start), site.last()[0]
        site.wait(lambda: site.last()[0] > step + faults.INTERVAL)
        recovered = begun == site.begun(start) == []
    except (Stuck, IndexError):
        recovered = False
    lines = [line for line in site.read_logs(sizes).splitlines() if line.startswith("step ")]
    return faults.Outcome(name, recovered, 0, 0.0, lines[0] if lines else "")


def run_job(plan: faults.Plan, name: str, steps: int, work: Callable[[Site], None]) -> tuple[bytes, list[str]]:
    """Train on a cluster of its own while `work` is done; return the end."""
    folder = plan.folder / name
    (folder / "cluster").mkdir(parents=True)
    with slurm_cluster(folder / "cluster") as cluster:
        run = SlurmRun(cluster, folder)
        run.environment = {**os.environ, "ANABATIC_CACHE": str(folder / "cache"), "TMPDIR": str(run.temporary)}
        exports = [f"{name}={run.environment[name]}" for name in ("ANABATIC_CACHE", "TMPDIR")]
        exports += [f"PATH={Path(sys.executable).parent}:$PATH", "OMP_NUM_THREADS=1"]
        words = ["launch", "slurm", "--nnodes", "2", "--nproc", "1", "--max-restarts", "1000", "--gres", "npu:910b"]
        words += [
            "--option=--cpus-per-task=1",
            f"--option=--output={run.log}",
            "--setup",
            f"export {' '.join(exports)}",
        ]
        run.command = [*ANABATIC, *words, "--", *plan.job(folder / "run", steps, "--device.type", "cpu")]
        run.start()
        site = Site([run], folder / "run", None, plan.hang, plan.patience)
        try:
            work(site)
            return faults.finish(site)
        finally:
            run.kill()


def main() -> None:
    """Inject the faults and print the table."""
    if obstacle := find_obstacle():
        sys.exit(f"error: no Slurm cluster here: {obstacle}")
    faults.under_scheduler(__doc__, KINDS, run_job, inject)


if __name__ == "__main__":
    main()
