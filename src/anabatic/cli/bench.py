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


def train(*command: str, **given: Any) -> int:
    """Measure steps of COMMAND, one that trains; default: a small model on made-up text.

    COMMAND stands after `--`, as it would be typed: sft -c recipe.yaml. Its data are read, or with --length rows are
    made up; nothing of the training is kept.
    """
    from anabatic.bench import training_throughput as story

    asked, words, row, job = _resolve_training_command(BenchTrain, command, given)
    return story.run(asked, row.name, job, words)


def scaling(*command: str, **given: Any) -> int:
    """Measure COMMAND on more and more devices of this machine: speed-up and efficiency.

    COMMAND stands after `--`; default: a small model on made-up text.
    """
    from anabatic.bench import scaling as story

    asked, words, row, job = _resolve_training_command(BenchScaling, command, given)
    return story.run(asked, row.name, job, words)


def compare(*command: str, **given: Any) -> int:
    """Measure a command of ours and COMMAND, any program, in turn: ratios of time, memory and what both print.

    COMMAND stands after `--`.
    """
    from anabatic.bench import command_comparison as story

    if not command:
        raise ConfigError("which command?", 'for example: anabatic bench compare --ours "sft ..." -- python peer.py')
    return story.run(_make_bench_settings(BenchCompare, given), command)


def _make_bench_settings(cls: Any, given: dict[str, Any]) -> Any:
    return settings.make_settings(
        cls, validation.check_section(jobs.nest_options(given), cls, validation.OptionNamer())
    )


def _resolve_training_command(
    cls: Any, command: tuple[str, ...], given: dict[str, Any]
) -> tuple[Any, list[str], command_table.Command, Any]:
    """Return the settings, the training's command, its row and its resolved job."""
    from anabatic.bench import training_throughput as story

    asked = _make_bench_settings(cls, given)
    words = list(command or story.DEFAULT_COMMAND)
    if not command and asked.length is None:
        asked = dataclasses.replace(asked, length=story.DEFAULT_ROW_TOKENS)
    if asked.length is not None and not {"--data", "--data.train"}.intersection(words):
        words += ["--data.train", "stdlib:"]  # its place is taken by the rows that are made up
    row, job = resolve_training_job(words)
    return asked, list(command or story.DEFAULT_COMMAND), row, job


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
