"""From the command to the first step: one process beside two, turn by turn, and from a killed rank to the next step.

    python benchmarks/launch.py [--rounds 5] [--nproc 2]

The model is so tiny that what is measured is the start. CPU time is that of all processes of the command, which ends
after two steps; the wall clock runs to the first row of the metrics. The goals: two ranks in at most 1.3 times the time
of one, a restart under 15 s.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from fault_kinds import Site
from fault_machines import ANABATIC, machines
from faults import Plan, prepare
from option_types import positive_int


def cpu_seconds() -> float:
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def start(plan: Plan, out: Path, nproc: int) -> tuple[float, float]:
    """Return wall seconds to the first step, and CPU seconds of the whole command."""
    words = [*ANABATIC, *plan.job(out, 2, "--device.type", "cpu", "--device.nproc", str(nproc))]
    environment = {**os.environ, "ANABATIC_CACHE": str(plan.folder / "cache")}
    cpu, wall = cpu_seconds(), time.time()
    subprocess.run(words, env=environment, check=True, stderr=subprocess.DEVNULL)
    first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])["time"]
    return first - wall, cpu_seconds() - cpu


def restart(plan: Plan, folder: Path, rounds: int) -> list[float]:
    """Kill a rank of two again and again; return the seconds to the next step."""
    found = []
    with machines(1, folder) as (machine,):
        words = ["launch", "--nproc", "2", "--max-restarts", str(rounds), "--"]
        machine.command = [*ANABATIC, *words, *plan.job(folder / "run", 100_000, "--device.type", "cpu")]
        machine.environment = {**os.environ, "ANABATIC_CACHE": str(plan.folder / "cache")}
        machine.start()
        job = Site([machine], folder / "run", None, plan.hang, plan.patience)
        since = 0.0
        for _ in range(rounds):
            _wait_for_step(job, since)
            since = time.time()
            machine.ranks()[1].kill()
            _wait_for_step(job, since)
            found.append(job.last()[1] - since)
    return found


def _wait_for_step(job: Site, since: float) -> None:
    """Wait until the training has begun or gone on since then, and has made a step."""
    job.wait(lambda: (begun := job.begun(since)) and job.last()[0] > begun[-1])


def main() -> None:
    """Print each round, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive_int, default=5)
    parser.add_argument("--nproc", type=positive_int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="anabatic-launch-") as name:
        folder = Path(name)
        plan = Plan(folder, 60.0, 300.0, *prepare(folder))
        start(plan, folder / "warm", asked.nproc)  # tokenises, and writes the byte code
        rows = []
        for turn in range(asked.rounds):
            one, more = (start(plan, folder / f"run-{turn}-{nproc}", nproc) for nproc in (1, asked.nproc))
            rows.append((more[0] / one[0], more[1] / one[1]))
            told = [
                f"{nproc}: {wall:.1f} s, {cpu:.1f} s of CPU" for nproc, (wall, cpu) in ((1, one), (asked.nproc, more))
            ]
            print(f"{'; '.join(told)}; ratios {rows[-1][0]:.2f}, {rows[-1][1]:.2f}", flush=True)
        wall, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"median ratio: first step {wall:.2f} (goal 1.3), CPU time {cpu:.2f}")
        again = restart(plan, folder, asked.rounds)
        print(
            f"from a killed rank to the next step: median {statistics.median(again):.1f} s, longest {max(again):.1f} s"
        )


if __name__ == "__main__":
    main()
