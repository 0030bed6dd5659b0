"""The batch script as it is printed, under a real Slurm: told to leave in each of its ways, saved, queued again."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabatic.core import json_reader
from cluster import slurm_cluster
from cluster.slurm_cluster import SlurmCluster
from e2e import command
from e2e.home import Home

STEPS = 300
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Three machines; skips, with the reason, where there can be none."""
    if reason := slurm_cluster.find_obstacle():
        pytest.skip(reason)
    with slurm_cluster.slurm_cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(cluster: SlurmCluster, home: Home) -> Path:
    """The run folder of a training of two machines that nobody disturbed."""
    out = home.root / "undisturbed"
    job = submit(cluster, home, out)
    assert cluster.wait(job, ended, log(out))["JobState"] == "COMPLETED", log(out).read_text()
    return out


def submit(
    cluster: SlurmCluster,
    home: Home,
    out: Path,
    *options: object,
    machines: tuple[int, int] = (2, 1),
    steps: int = STEPS,
    **more: object,
) -> int:
    """Submit, unchanged, what `anabatic launch slurm` prints for a training on machines with ranks each."""
    nnodes, nproc = machines
    words: list[object] = ["launch", "slurm", "--nnodes", nnodes, "--nproc", nproc, "--option=--cpus-per-task=1"]
    words += [f"--option=--output={log(out)}", "--setup", f"export PATH={Path(sys.executable).parent}:$PATH"]
    words += ["--setup", f"export ANABATIC_CACHE={home.cache}", *options]
    train = home.pretrain(out, more={"schedule.max-steps": steps, "save.every": 50, "eval.every": 100, **more})
    log(out).parent.mkdir(exist_ok=True)
    return cluster.submit(home.anabatic(*words, "--", *train).out, log(out).parent)


def log(out: Path) -> Path:
    """What the job says."""
    return out.parent / "logs" / f"{out.name}.log"


def ended(job: dict[str, str]) -> bool:
    return job["JobState"] in ENDED


def reached(out: Path, step: int) -> bool:
    """True when a run has logged a step."""
    rows = out / "metrics.jsonl"
    return rows.exists() and any(
        row["kind"] == "train" and row["step"] >= step for row in json_reader.read_json_lines(rows)
    )


def launched(out: Path, times: int, job: dict[str, str]) -> bool:
    """True when so many launchers have begun."""
    return log(out).exists() and log(out).read_text().count("starting 1 process") >= times


def restarted(times: int, job: dict[str, str]) -> bool:
    return int(job["Restarts"]) >= times


def stops(out: Path) -> list[int]:
    events = [
        row for row in json_reader.read_json_lines(out / "events.jsonl") if row["event"] in ("stop", "checkpoint")
    ]
    found = [row["step"] for row in events if row["event"] == "stop"]
    saved = [row["step"] for row in events if row["event"] == "checkpoint"]
    assert len(saved) == len(set(saved)) and set(found) <= set(saved), "saved once, by every stop"
    return found


def has_stopped(out: Path) -> bool:
    return (out / "events.jsonl").exists() and bool(stops(out))


def same(out: Path, base: Path) -> None:
    assert command.losses(out) == command.losses(base)
    weights = [(folder / "final_model" / "model.safetensors").read_bytes() for folder in (out, base)]
    assert weights[0] == weights[1]


@pytest.mark.timeout(1500)
def test_signals_and_a_requeue_by_hand(cluster: SlurmCluster, home: Home, undisturbed: Path, tmp_path: Path) -> None:
    """scancel signals every process of the steps; here it does so twice."""
    out = tmp_path / "run"
    job = submit(cluster, home, out)
    ways = (("scancel", "--signal=TERM"), ("scancel", "--signal=USR1"), ("scontrol", "requeue"))
    for count, way in enumerate(ways):
        cluster.wait(job, lambda _, step=70 * (count + 1): reached(out, step), log(out))
        for _ in range(2 if "scancel" in way else 1):
            cluster.run(*way, job)
        cluster.wait(job, functools.partial(restarted, count + 1), log(out))
    told = cluster.wait(job, ended, log(out))
    assert told["JobState"] == "COMPLETED" and len(stops(out)) in (2, 3), log(out).read_text()
    same(out, undisturbed)


@pytest.mark.timeout(1500)
def test_what_is_cancelled_saves_and_stays_away(cluster: SlurmCluster, home: Home, tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = submit(cluster, home, out, steps=100_000)
    cluster.wait(job, lambda _: reached(out, 70), log(out))
    cluster.run("scancel", job)
    told = cluster.wait(job, lambda _: has_stopped(out), log(out))
    assert told["Restarts"] == "0" and cluster.wait(job, ended, log(out))["JobState"] == "CANCELLED"


@pytest.mark.timeout(1500)
def test_a_job_of_higher_rank_takes_the_machines(
    cluster: SlurmCluster, home: Home, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    job = submit(cluster, home, out)
    cluster.wait(job, lambda _: reached(out, 70), log(out))
    script = "#!/bin/bash\n#SBATCH --nodes=3 --exclusive --partition=high --output=/dev/null\nsleep 1\n"
    other = cluster.submit(script, tmp_path)
    assert cluster.wait(other, ended, log(out))["JobState"] == "COMPLETED"
    told = cluster.wait(job, ended, log(out))
    assert told["JobState"] == "COMPLETED" and told["Restarts"] == "1", log(out).read_text()
    assert len(stops(out)) == 1, log(out).read_text()
    same(out, undisturbed)


@pytest.mark.timeout(1500)
def test_the_time_limit(cluster: SlurmCluster, home: Home, tmp_path: Path) -> None:
    """However slow the machine is: starts that are too short for a step are followed by others."""
    out = tmp_path / "run"
    more = ("--option=--time=2", "--grace", "60", "--max-requeues", "0")
    job = submit(cluster, home, out, *more, steps=100_000)
    told = cluster.wait(job, lambda told: ended(told) or has_stopped(out), log(out))
    assert not ended(told), log(out).read_text()
    cluster.wait(job, functools.partial(restarted, int(told["Restarts"]) + 1), log(out))
    cluster.run("scancel", job)
    cluster.wait(job, ended, log(out))


@pytest.mark.timeout(1500)
def test_a_limit_that_is_shorter_than_the_start(cluster: SlurmCluster, home: Home, tmp_path: Path) -> None:
    """It is asked to leave before it could save anything, time after time, and comes to an end."""
    out = tmp_path / "run"
    job = submit(cluster, home, out, "--max-requeues", "2")
    for count in range(2):
        cluster.wait(job, functools.partial(launched, out, 2 * count + 2), log(out))
        cluster.run("scancel", "--signal=TERM", job)
        cluster.wait(job, functools.partial(restarted, count + 1), log(out))
    told = cluster.wait(job, ended, log(out))
    assert told["JobState"] == "FAILED", log(out).read_text()
    assert f"error: Slurm has started job {job} 2 times in a row" in log(out).read_text()


@pytest.mark.timeout(1500)
def test_a_machine_that_is_lost(cluster: SlurmCluster, home: Home, undisturbed: Path, tmp_path: Path) -> None:
    """Slurm ends a job whose machine is down, and queues it again; what was saved before is not lost."""
    out = tmp_path / "run"
    job = submit(cluster, home, out)
    cluster.wait(job, lambda _: reached(out, 70), log(out))
    node = cluster.run("squeue", "-h", "-j", job, "-o", "%N").strip()
    name = cluster.run("scontrol", "show", "hostnames", node).split()[-1]
    cluster.set_node_down(name)
    try:
        cluster.wait(job, functools.partial(restarted, 1), log(out))
    finally:
        cluster.resume_node(name)
    told = cluster.wait(job, ended, log(out))
    assert told["JobState"] == "COMPLETED" and told["Restarts"] == "1", log(out).read_text()
    same(out, undisturbed)


@pytest.mark.timeout(1500)
def test_machines_of_two_types(cluster: SlurmCluster, home: Home, tmp_path: Path) -> None:
    """A job gets machines that have its devices: two of one type, or the one that has four."""
    for gres, nnodes, nproc, names in (
        ("npu:910b", 2, 2, slurm_cluster.NODES[:2]),
        ("npu", 1, 3, slurm_cluster.NODES[2:]),
    ):
        out = tmp_path / f"run-{nproc}"
        more = {"device.nproc": nproc, "batch.global-batch-tokens": 3072}
        job = submit(cluster, home, out, "--gres", gres, machines=(nnodes, nproc), steps=6, **more)
        told = cluster.wait(job, ended, log(out))
        assert told["JobState"] == "COMPLETED", log(out).read_text()
        assert tuple(cluster.run("scontrol", "show", "hostnames", told["NodeList"]).split()) == names
        assert len(list(out.glob("rank-*.log"))) == nnodes * nproc


@pytest.mark.timeout(1500)
def test_an_array_of_runs(cluster: SlurmCluster, home: Home, tmp_path: Path) -> None:
    """Each task has a run folder and a seed of its own; one that is told to leave continues alone."""
    out = tmp_path / "run-%a"
    submit(cluster, home, out, "--option=--array=1-2", machines=(1, 1), steps=100, seed="%a")
    runs = [tmp_path / f"run-{number}" for number in (1, 2)]
    deadline = time.monotonic() + 300
    while not all((run / "summary.json").exists() for run in runs):
        assert time.monotonic() < deadline, [path.read_text() for path in log(out).parent.iterdir()]
        time.sleep(0.5)
    first, second = map(command.losses, runs)
    assert len(first) == len(second) == 100 and first != second
