"""`anabatic bench train|scaling|compare`; the other kinds are jobs of the command table."""

from __future__ import annotations

import dataclasses
from typing import Any

from anabatic.cli import job_command
from anabatic.cli.launch.option_parsing import resolve_training_job
from anabatic.config.bench import BenchCompare, BenchScaling, BenchTrain
from anabatic.config.loading import settings
from anabatic.config.loading.command_package import Command
from anabatic.core.errors import ConfigError


def _train(command: tuple[str, ...], values: dict[str, Any]) -> int:
    from anabatic.bench import training_throughput as benchmark

    bench_job, args, row, job = _resolve_training_command(BenchTrain, command, values)
    return benchmark.run(bench_job, row.name, job, args)


def _scale(command: tuple[str, ...], values: dict[str, Any]) -> int:
    from anabatic.bench import scaling as benchmark

    bench_job, args, row, job = _resolve_training_command(BenchScaling, command, values)
    return benchmark.run(bench_job, row.name, job, args)


def _compare(command: tuple[str, ...], values: dict[str, Any]) -> int:
    from anabatic.bench import command_comparison as benchmark

    if not command:
        raise ConfigError("which command?", 'for example: anabatic bench compare --ours "sft ..." -- python peer.py')
    return benchmark.run(settings.make_settings(BenchCompare, values), command)


def _resolve_training_command(
    cls: Any, command: tuple[str, ...], values: dict[str, Any]
) -> tuple[Any, list[str], Command, Any]:
    """Return the benchmark settings, the training command, its row and its resolved job."""
    from anabatic.bench import training_throughput as benchmark

    bench_job = settings.make_settings(cls, values)
    args = list(command or benchmark.DEFAULT_COMMAND)
    if not command and bench_job.length is None:
        bench_job = dataclasses.replace(bench_job, length=benchmark.DEFAULT_ROW_TOKENS)
    if bench_job.length is not None and not {"--data", "--data.train"}.intersection(args):
        args += ["--data.train", "stdlib:"]  # replaced by the generated rows
    row, job = resolve_training_job(args)
    return bench_job, list(command or benchmark.DEFAULT_COMMAND), row, job


TRAIN = job_command.make_settings_command(
    BenchTrain,
    {},
    "Measure steps of COMMAND, one that trains; default: a small model on made-up text.\n\n"
    "COMMAND stands after `--`, as it would be typed: sft -c recipe.yaml. Its data are read, or with --length rows are "
    "made up; nothing of the training is kept.",
    _train,
)
SCALING = job_command.make_settings_command(
    BenchScaling,
    {"npus": "--nproc"},
    "Measure COMMAND on more and more devices of this machine: speed-up and efficiency.\n\n"
    "COMMAND stands after `--`; default: a small model on made-up text.",
    _scale,
)
COMPARE = job_command.make_settings_command(
    BenchCompare,
    {},
    "Measure a command of ours and COMMAND, any program, in turn: ratios of time, memory and what both print.\n\n"
    "COMMAND stands after `--`.",
    _compare,
)
