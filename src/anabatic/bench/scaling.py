"""`anabatic bench scaling`: the same training on more and more devices, speed-up and efficiency."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from anabatic.bench import environment_info, result_files
from anabatic.bench import training_probe as children
from anabatic.bench import training_throughput as one_training
from anabatic.bench.measurements import BenchMetric, BenchResult
from anabatic.bench.training_probe import TrainingMeasurement
from anabatic.config.bench import BenchScaling
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.launch.local import device_selection
from anabatic.plan.mesh_shape import resolve_mesh_shape


def run(settings: BenchScaling, name: str, job: Any, words: Sequence[str]) -> int:
    """Measure a resolved job on each number of devices; arguments and errors as of `bench.training_throughput.run`.

    Raises:
        DeviceError: there are fewer devices than are asked for, or fewer free ones. Nothing was measured then.
    """
    counts = settings.device_counts
    for count in counts:
        try:
            resolve_mesh_shape(job.parallel, count, is_planned=True)
        except ConfigError as error:
            raise ConfigError(str(error), "leave that number out") from error
    given, max_processes = job.batch.global_batch_tokens, counts[-1]
    if (
        given is not None
        and not settings.weak
        and (given % max_processes or given // max_processes < job.batch.resolved_seq_len)
    ):
        raise ConfigError(
            f"batch.global_batch_tokens {given} cannot be divided among {max_processes} devices by rows of "
            f"{job.batch.resolved_seq_len}",
            "raise it, or give --weak: as many tokens for each device",
        )
    device_selection.select_devices(job.device.type, max_processes, os.environ)
    load = result_files.prepare_output(settings)
    folder = Path(settings.out).expanduser()
    job = one_training.prepare_job(settings, name, job, folder)
    found: dict[int, TrainingMeasurement] = {}
    for count in counts:
        log.info(f"{count} x {settings.repeats + settings.warm_up} x {settings.steps} steps: {shlex.join(words)}")
        part = _job_for_devices(job, count, settings.weak, found)
        found[count] = children.measure_training(
            name, part, folder / f"devices-{count}", settings.steps, settings.repeats + settings.warm_up
        )
    figures = [
        figure
        for count in counts
        for figure in _build_scaling_metrics(count, counts[0], found, settings.warm_up, name, job)
    ]
    device = found[counts[-1]].device_event
    where = environment_info.collect_environment(load, device.get("name", ""), counts[-1])
    sizes = {count: dict(one.resolved_sizes) for count, one in found.items()}
    result = BenchResult(
        "scaling",
        f"{shlex.join(words)}; {'weak' if settings.weak else 'strong'} scaling",
        figures,
        {"command": shlex.join(words), **asdict(settings), "sizes": sizes},
        where,
        "devices",
        [
            *environment_info.caveat_notes(where),
            *_shared_core_notes(device.get("type", ""), counts[-1], where["cores"]),
        ],
    )
    result_files.write_results(settings, result)
    return 0


def _job_for_devices(job: Any, count: int, weak: bool, found: dict[int, TrainingMeasurement]) -> Any:
    """Return the job on `count` devices; all but the first take the sizes that the first has settled on."""
    batch = job.batch
    if found:
        first, sizes = next((count, one.resolved_sizes) for count, one in found.items())
        total = int(sizes["global_batch_tokens"])
        micro = int(sizes["micro_batch_tokens"])
        if weak:
            batch = replace(batch, global_batch_tokens=total // first * count, micro_batch_tokens=micro)
        elif job.batch.micro_batch_tokens is None:  # a smaller share of each: the micro-batch follows
            batch = replace(batch, global_batch_tokens=total)
        else:
            batch = replace(batch, global_batch_tokens=total, micro_batch_tokens=micro)
    return replace(job, batch=batch, device=replace(job.device, nproc=count))


def _build_scaling_metrics(
    count: int, first: int, found: dict[int, TrainingMeasurement], warm_up: int, name: str, job: Any
) -> list[BenchMetric]:
    """Speed, speed-up against the least number, and efficiency: the speed-up over what the numbers promise."""
    scaled_job = replace(job, device=replace(job.device, nproc=count))
    speeds = {}
    for number in (first, count):
        paper, _ = one_training.plan_measured_job(name, scaled_job, found[number])
        speeds[number] = one_training.build_training_metrics(found[number], warm_up, paper)[0]
    base, speed = speeds[first], speeds[count]
    up = speed.median / base.median
    on_paper = speed.planned_value / base.planned_value if speed.planned_value and base.planned_value else None
    metrics = [
        replace(speed, name="tokens/s", axis_value=float(count)),
        BenchMetric("tokens a step", "tokens", (found[count].windows[-1].tokens_per_step,), axis_value=float(count)),
        BenchMetric("speed-up", "x", (up,), on_paper, float(count)),
        BenchMetric("efficiency", "share", (up * first / count,), None, float(count)),
    ]
    return metrics


def _shared_core_notes(kind: str, max_processes: int, cores: int) -> list[str]:
    if kind == "cpu" and max_processes > cores:
        return [f"{max_processes} processes share {cores} cores"]
    return ["the processes share one processor's cores: these are no figures of devices"] if kind == "cpu" else []
