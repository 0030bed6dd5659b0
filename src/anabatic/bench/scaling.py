"""`anabatic bench scaling`: the same training on more and more devices, speed-up and efficiency."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from anabatic.bench import machine, written
from anabatic.bench import train as one_training
from anabatic.bench import windows as children
from anabatic.bench.figures import Figure, Result
from anabatic.bench.windows import Trained
from anabatic.config.bench import BenchScaling
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.launch import free


def run(asked: BenchScaling, name: str, job: Any, words: Sequence[str]) -> int:
    """Measure a resolved job on each number of devices; arguments and errors as of `bench.train.run`.

    Raises:
        DeviceError: there are fewer devices than are asked for, or fewer free ones. Nothing was measured then.
    """
    counts = asked.counts
    tensor = job.parallel.tensor
    if uneven := [count for count in counts if count % tensor]:
        raise ConfigError(f"parallel.tensor {tensor} does not divide {uneven[0]} devices", "leave that number out")
    given, most = job.batch.global_batch_tokens, counts[-1]
    if given is not None and not asked.weak and (given % most or given // most < job.batch.length):
        raise ConfigError(
            f"batch.global_batch_tokens {given} cannot be divided among {most} devices by rows of {job.batch.length}",
            "raise it, or give --weak: as many tokens for each device",
        )
    free.choose(job.device.type, most, os.environ)
    load = written.begin(asked)
    folder = Path(asked.out).expanduser()
    job = one_training.prepared(asked, name, job, folder)
    found: dict[int, Trained] = {}
    for count in counts:
        log.info(f"{count} x {asked.repeats + asked.warm_up} x {asked.steps} steps: {shlex.join(words)}")
        part = _job(job, count, asked.weak, found)
        found[count] = children.train(
            name, part, folder / f"devices-{count}", asked.steps, asked.repeats + asked.warm_up
        )
    figures = [figure for count in counts for figure in _figures(count, counts[0], found, asked.warm_up, name, job)]
    device = found[counts[-1]].device
    where = machine.facts(load, device.get("name", ""), counts[-1])
    sizes = {count: dict(one.plan) for count, one in found.items()}
    result = Result(
        "scaling", f"{shlex.join(words)}; {'weak' if asked.weak else 'strong'} scaling", figures,
        {"command": shlex.join(words), **asdict(asked), "sizes": sizes}, where, "devices",
        [*machine.notes(where), *_notes(device.get("type", ""), counts[-1], where["cores"])],
    )  # fmt: skip
    written.finish(asked, result)
    return 0


def _job(job: Any, count: int, weak: bool, found: dict[int, Trained]) -> Any:
    """Return the job on `count` devices; all but the first take the sizes that the first has settled on."""
    batch = job.batch
    if found:
        first, sizes = next((count, one.plan) for count, one in found.items())
        total = int(sizes["global_batch_tokens"])
        micro = int(sizes["micro_batch_tokens"])
        if weak:
            batch = replace(batch, global_batch_tokens=total // first * count, micro_batch_tokens=micro)
        elif job.batch.micro_batch_tokens is None:  # a smaller share of each: the micro-batch follows
            batch = replace(batch, global_batch_tokens=total)
        else:
            batch = replace(batch, global_batch_tokens=total, micro_batch_tokens=micro)
    return replace(job, batch=batch, device=replace(job.device, nproc=count))


def _figures(count: int, first: int, found: dict[int, Trained], warm_up: int, name: str, job: Any) -> list[Figure]:
    """Speed, speed-up against the least number, and efficiency: the speed-up over what the numbers promise."""
    own = replace(job, device=replace(job.device, nproc=count))
    speeds = {}
    for number in (first, count):
        paper, _ = one_training.planned(name, own, found[number])
        speeds[number] = one_training.figures(found[number], warm_up, paper)[0]
    base, here = speeds[first], speeds[count]
    up = here.median / base.median
    on_paper = here.planned / base.planned if here.planned and base.planned else None
    made = [
        replace(here, name="tokens/s", at=float(count)),
        Figure("tokens a step", "tokens", (found[count].windows[-1].tokens,), at=float(count)),
        Figure("speed-up", "x", (up,), on_paper, float(count)),
        Figure("efficiency", "share", (up * first / count,), None, float(count)),
    ]
    return made


def _notes(kind: str, most: int, cores: int) -> list[str]:
    if kind == "cpu" and most > cores:
        return [f"{most} processes share {cores} cores"]
    return ["the processes share one processor's cores: these are no figures of devices"] if kind == "cpu" else []
