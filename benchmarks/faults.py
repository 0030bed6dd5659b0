"""Random faults: they are injected into a job one after the other, at random moments, and it must recover by itself.

    python benchmarks/faults.py [--faults 50] [--seed 0] [--kinds rank,agent,...] [--keep FOLDER]

A tiny model is trained by two launchers on two machines, one rank each (`fault_machines.py`), and by one launcher on
simulated NPUs, once undisturbed and once under the faults of `fault_kinds.py`. For each kind: how many there
were, after how many the training continued by itself, how many steps at most were done again beyond the interval of the
checkpoints, the seconds from the fault to the next finished step, and whether the final weights and all losses
are those of the undisturbed run, bit by bit. A supervisor starts a launcher that was killed again, as systemd would.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fault_kinds import KINDS, STOP, Kind, Site, Stuck
from fault_machines import ANABATIC, can_isolate, free_port, machines, small_disk
from option_types import names_among, positive_int, positive_number

INTERVAL = 10
"""Steps between two checkpoints."""
SPACING = 12
"""Steps between two faults, on average."""
TAIL, SCHEDULER_TAIL = 40, 400
"""Steps after the last one; a scheduler notices some faults only after a second or more."""
DISK_MEGABYTES = 64


@dataclass(frozen=True)
class Outcome:
    """What became of one fault."""

    kind: str
    recovered: bool
    again: int
    """Steps that were done again."""
    seconds: float
    said: str
    """The first line that tells of it; empty when none does."""


@dataclass(frozen=True)
class Plan:
    """What a run of this program does."""

    folder: Path
    hang: float
    patience: float
    text: Path
    tokenizer: Path
    machines: int = 2
    """With one, its launcher has both ranks."""

    def job(self, out: Path, steps: int, *more: str) -> list[str]:
        """The training command."""
        settings = {
            "out": out,
            "tokenizer": self.tokenizer,
            "data.train": self.text,
            "model.depth": 2,
            "model.width": 64,
            "batch.seq-len": 64,
            "batch.micro-batch-tokens": 256,
            "batch.global-batch-tokens": 512,
            "device.threads": 1,
            "device.dtype": "fp32",
            "log.every": 1,
            "save.every": INTERVAL,
            "save.keep-last": 3,
            "eval.every": 25,
            "schedule.max-steps": steps,
        }
        return ["pretrain", *(word for name, value in settings.items() for word in (f"--{name}", str(value))), *more]


def prepare(folder: Path) -> tuple[Path, Path]:
    """Write a text and train its tokenizer."""
    from anabatic_testing.tiny_models import train_tiny_tokenizer, write_tiny_text

    text = write_tiny_text(folder)
    return text, train_tiny_tokenizer(folder, text)


@contextmanager
def site(plan: Plan, where: str, name: str, steps: int, losses: int) -> Iterator[Site]:
    """Start a job; `losses`: devices that it will lose."""
    folder = plan.folder / f"{where}-{name}"
    folder.mkdir()
    count = plan.machines if where == "machines" else 1
    with small_disk(folder / "disk", DISK_MEGABYTES) as disk, machines(count, folder) as found:
        port = free_port()
        for machine in found:
            words = ["launch", "--max-restarts", "1000", "--hang-seconds", f"{plan.hang:g}"]
            if count == 1:
                words += ["--nproc", "2"]
            else:
                words += ["--nnodes", "2", "--node-rank", str(machine.number), "--master-addr", found[0].address]
                words += ["--master-port", str(port), "--nproc", "1", "--join-seconds", "300"]
            more = ["--device.type", "cpu" if where == "machines" else "npu"]
            inside = [] if where == "machines" else [*ANABATIC, "sim", "--npus", str(2 + losses), "--"]
            machine.command = [*inside, *ANABATIC, *words, "--", *plan.job(disk / "run", steps, *more)]
            machine.environment = {**os.environ, "ANABATIC_CACHE": str(plan.folder / "cache"), "OMP_NUM_THREADS": "1"}
            if where == "npus":
                machine.environment.pop("ANABATIC_CACHE")  # the simulator is the user's
            machine.start()
        yield Site(found, disk / "run", disk, plan.hang, plan.patience)


def finish(job: Site) -> tuple[bytes, list[str]]:
    """Wait for the end; return the final weights and all losses, nothing when it does not come."""
    try:
        job.wait(lambda: all(machine.done for machine in job.machines))
    except Stuck:
        return b"", []
    rows = re.findall(r'"step": (\d+), .*?"loss": ([^,]+),', (job.run / "metrics.jsonl").read_text())
    return (job.run / "final_model" / "model.safetensors").read_bytes(), [f"{step} {loss}" for step, loss in rows]


def inject(job: Site, name: str, draw: random.Random) -> Outcome:
    """Inject one fault and wait until the training has continued."""
    kind = KINDS[name]
    time.sleep(draw.uniform(0.0, 0.15))
    job.reached = job.last()[0]
    sizes, start = job.sizes(), time.time()
    try:
        kind.inject(job, draw)
        job.wait(lambda: (begun := job.begun(start)) and job.last()[0] > begun[-1] and job.last()[1] > start)
        recovered = True
    except (Stuck, IndexError):  # IndexError: nothing was left to inject
        recovered = False
    seconds = max(job.last()[1] - start, 0.0) if recovered else job.patience
    again = job.reached - min(job.begun(start), default=job.reached)
    lines = [line for line in job.read_logs(sizes).splitlines() if re.search(kind.says, line)]
    return Outcome(name, recovered, again, seconds, lines[0].strip() if lines else "")


def train_undisturbed(plan: Plan, where: str, steps: int) -> tuple[bytes, list[str]]:
    """Train undisturbed; return the end."""
    with site(plan, where, "undisturbed", steps, 0) as job:
        return finish(job)


def train_with_faults(
    plan: Plan, where: str, kinds: list[str], steps: int, seed: int
) -> tuple[list[Outcome], tuple[bytes, list[str]]]:
    """Train under the faults; return what became of them, and the end."""
    draw = random.Random(f"{seed} {where}")
    at = sorted(draw.sample(range(INTERVAL + 1, steps - TAIL), len(kinds)))
    with site(plan, where, "faults", steps, kinds.count("lost")) as job:
        return inject_all(job, kinds, at, draw), finish(job)


def compare(plan: Plan, jobs: dict[str, list[str]], seed: int, workers: int) -> tuple[list[Outcome], dict[str, bool]]:
    """Run each job in undisturbed and under its faults; return what became of them, and whose ends are equal.

    Args:
        jobs: the kinds of faults, in order, of each job.
        workers: jobs at a time.
    """
    STOP.clear()
    with ThreadPoolExecutor(workers) as pool:
        runs = {}
        for where, kinds in jobs.items():
            steps = INTERVAL + SPACING * len(kinds) + TAIL
            runs[where] = (
                pool.submit(train_undisturbed, plan, where, steps),
                pool.submit(train_with_faults, plan, where, kinds, steps, seed),
            )
        try:
            ends = {where: (quiet.result(), disturbed.result()) for where, (quiet, disturbed) in runs.items()}
        finally:
            STOP.set()
    return [one for _, (found, _) in ends.values() for one in found], {
        where: quiet == end and bool(end[0]) for where, (quiet, (_, end)) in ends.items()
    }


def inject_all(
    job: Site,
    kinds: list[str],
    at: list[int],
    draw: random.Random,
    one: Callable[[Site, str, random.Random], Outcome] | None = None,
) -> list[Outcome]:
    """Inject faults, each at its step; return what became of them.

    Args:
        one: injects one, in place of `inject`.
    """
    found: list[Outcome] = []
    for name, step in zip(kinds, at, strict=True):
        with suppress(Stuck):
            job.wait(lambda step=step: job.last()[0] >= step)
        found.append((one or inject)(job, name, draw))
        show(found[-1], len(found), len(kinds), step)
        if not found[-1].recovered:
            for machine in job.machines:  # so that the other faults are tried, too
                machine.kill()
    return found


def show(outcome: Outcome, number: int, count: int, step: int) -> None:
    """One line on stderr."""
    end = f"{outcome.again} steps again, {outcome.seconds:.1f} s" if outcome.recovered else "NOT RECOVERED"
    sys.stderr.write(
        f"{number}/{count} {outcome.kind} at step {step}: {end} | {outcome.said[:150] or 'NOTHING REPORTED'}\n"
    )


def table(found: list[Outcome], equal: dict[str, bool]) -> str:
    """The result, in Markdown."""
    heads = (
        "fault",
        "count",
        "recovered",
        "reported",
        "steps again (max)",
        "beyond the interval",
        "to the next step (median, max)",
        "identical",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, kind in KINDS.items():
        own = [one for one in found if one.kind == name]
        if not own:
            continue
        again = max(one.again for one in own)
        seconds = [one.seconds for one in own]
        lines.append(
            f"| {kind.what} | {len(own)} | {sum(one.recovered for one in own)} | {sum(bool(one.said) for one in own)} "
            f"| {again} | {max(again - kind.intervals * INTERVAL, 0)} "
            f"| {statistics.median(seconds):.1f} s, {max(seconds):.1f} s | "
            f"{'yes' if equal[kind.where] else 'NO'} |"
        )
    return "\n".join(lines)


def drawn(names: list[str], count: int, draw: random.Random) -> list[str]:
    """Every kind as often as any other, in random order."""
    found = [names[number % len(names)] for number in range(count)]
    draw.shuffle(found)
    return found


def parse_options(parser: argparse.ArgumentParser, count: int, hang: float, patience: float) -> argparse.Namespace:
    """Parse the options that all benchmarks of faults have; `KINDS` are theirs."""
    parser.add_argument("--faults", type=positive_int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=names_among(KINDS), default=list(KINDS), help=f"some of {','.join(KINDS)}")
    parser.add_argument("--hang-seconds", type=positive_number, default=hang, help="of the launchers")
    parser.add_argument(
        "--patience", type=positive_number, default=patience, help="seconds after which a job counts as lost"
    )
    parser.add_argument("--keep", type=Path, help="folder for logs and runs, which stay")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was made is taken down
    return asked


@contextmanager
def prepared(asked: argparse.Namespace) -> Iterator[Plan]:
    """Yield the plan of a run, in a folder that is removed afterwards unless it is to be kept."""
    folder = Path(tempfile.mkdtemp(prefix="anabatic-faults-")) if asked.keep is None else asked.keep
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield Plan(folder.resolve(), asked.hang_seconds, asked.patience, *prepare(folder.resolve()))
    finally:
        if asked.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def report(found: list[Outcome], equal: dict[str, bool], start: float) -> NoReturn:
    """Print the table and exit, with 1 when a fault was not recovered or an end differs."""
    print(f"{table(found, equal)}\n{len(found)} faults, {(time.monotonic() - start) / 60:.1f} minutes")
    sys.exit(not (all(one.recovered for one in found) and all(equal.values())))


def under_scheduler(
    description: str | None,
    kinds: dict[str, Kind],
    run_job: Callable[[Plan, str, int, Callable[[Site], None]], tuple[bytes, list[str]]],
    one: Callable[[Site, str, random.Random], Outcome] | None = None,
) -> NoReturn:
    """The program of a benchmark whose job runs under a scheduler, on a cluster of its own.

    Args:
        run_job: trains while its last argument is at work, and returns the end.
        one: injects one fault, in place of `inject`.
    """
    KINDS.clear()
    KINDS.update(kinds)
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = parse_options(parser, 20, 60.0, 300.0)
    draw = random.Random(asked.seed)
    names = drawn(asked.kinds, asked.faults, draw)
    steps = INTERVAL + SPACING * len(names) + SCHEDULER_TAIL
    at = sorted(draw.sample(range(INTERVAL + 1, steps - SCHEDULER_TAIL), len(names)))
    start, found = time.monotonic(), []
    with prepared(asked) as plan:
        quiet = run_job(plan, "undisturbed", steps, lambda site: None)
        end = run_job(plan, "faults", steps, lambda site: found.extend(inject_all(site, names, at, draw, one)))
    report(found, {"machines": bool(end[0]) and quiet == end}, start)


def main() -> None:
    """Inject the faults and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--at-once", type=positive_int, default=1, help="jobs at a time, of at most four: sooner, but each slower"
    )
    asked = parse_options(parser, 50, 8.0, 180.0)
    names = [name for name in asked.kinds if can_isolate() or not KINDS[name].isolated]
    kinds = drawn(names, asked.faults, random.Random(asked.seed))
    print(f"seed {asked.seed}; machines are {'network namespaces' if can_isolate() else 'process trees'}", flush=True)
    start = time.monotonic()
    jobs = {where: [name for name in kinds if KINDS[name].where == where] for where in ("machines", "npus")}
    with prepared(asked) as plan:
        found, equal = compare(plan, {where: own for where, own in jobs.items() if own}, asked.seed, asked.at_once)
    report(found, equal, start)


if __name__ == "__main__":
    main()
