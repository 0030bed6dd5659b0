"""`anabatic bench train|infer|tokenize|collective|scaling|io|compare`."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from cyclopts import App

from anabatic import __version__
from anabatic.cli import job_command as jobs
from anabatic.cli.launch.option_parsing import resolve_training_job
from anabatic.config.bench import BenchCompare, BenchScaling, BenchTrain
from anabatic.config.loading import command_table, settings, validation
from anabatic.core.errors import ConfigError

app = App(
    name="bench", help="Measure this machine: training, answers, tokens, collectives, files.", version=__version__
)


def train(*command: str, **options: Any) -> int:
    """Measure steps of COMMAND, one that trains; default: a small model on made-up text.

    COMMAND stands after `--`, as it would be typed: sft -c recipe.yaml. Its data are read, or with --length rows are
    made up; nothing of the training is kept.
    """
    from anabatic.bench import training_throughput as benchmark

    bench_job, args, row, job = _resolve_training_command(BenchTrain, command, options)
    return benchmark.run(bench_job, row.name, job, args)


def scaling(*command: str, **options: Any) -> int:
    """Measure COMMAND on more and more devices of this machine: speed-up and efficiency.

    COMMAND stands after `--`; default: a small model on made-up text.
    """
    from anabatic.bench import scaling as benchmark

    bench_job, args, row, job = _resolve_training_command(BenchScaling, command, options)
    return benchmark.run(bench_job, row.name, job, args)


def compare(*command: str, **options: Any) -> int:
    """Measure a command of ours and COMMAND, any program, in turn: ratios of time, memory and what both print.

    COMMAND stands after `--`.
    """
    from anabatic.bench import command_comparison as benchmark

    if not command:
        raise ConfigError("which command?", 'for example: anabatic bench compare --ours "sft ..." -- python peer.py')
    return benchmark.run(_make_bench_settings(BenchCompare, options), command)


def _make_bench_settings(cls: Any, options: dict[str, Any]) -> Any:
    return settings.make_settings(
        cls, validation.check_section(jobs.nest_options(options), cls, validation.OptionNamer())
    )


def _resolve_training_command(
    cls: Any, command: tuple[str, ...], options: dict[str, Any]
) -> tuple[Any, list[str], command_table.Command, Any]:
    """Return the benchmark settings, the training command, its row and its resolved job."""
    from anabatic.bench import training_throughput as benchmark

    bench_job = _make_bench_settings(cls, options)
    args = list(command or benchmark.DEFAULT_COMMAND)
    if not command and bench_job.length is None:
        bench_job = dataclasses.replace(bench_job, length=benchmark.DEFAULT_ROW_TOKENS)
    if bench_job.length is not None and not {"--data", "--data.train"}.intersection(args):
        args += ["--data.train", "stdlib:"]  # replaced by the generated rows
    row, job = resolve_training_job(args)
    return bench_job, list(command or benchmark.DEFAULT_COMMAND), row, job


_COMMAND_PARAMETER = inspect.Parameter("command", inspect.Parameter.VAR_POSITIONAL, annotation=str)
for _function, _cls, _short in (
    (train, BenchTrain, {}),
    (scaling, BenchScaling, {"npus": "--nproc"}),
    (compare, BenchCompare, {}),
):
    jobs.set_signature(_function, [_COMMAND_PARAMETER, *jobs.make_option_parameters(_cls, _short)])
    app.command(_function)
for _verb in ("infer", "tokenize", "collective", "io"):
    app.command(
        jobs.make_job_command(f"bench {_verb}"), name=_verb, help=command_table.get_command(f"bench {_verb}").help
    )
