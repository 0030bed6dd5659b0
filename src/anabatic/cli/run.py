"""`anabatic run`: run a pipeline of stages."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated

from anabatic.cli.launch.option_parsing import parse_float
from anabatic.cli.parsing.function_command import OptionNames
from anabatic.config.loading import command_table, settings, shipped_recipes, validation
from anabatic.config.pipeline import PipelineStage, scale_minutes
from anabatic.config.sections.common import MAX_MINUTES
from anabatic.core.errors import ConfigError


def run(
    *recipes: str,
    config: Annotated[tuple[str, ...], OptionNames(("--config", "-c"))] = (),
    out: str | None = None,
    start: Annotated[str | None, OptionNames(("--from",))] = None,
    only: tuple[str, ...] = (),
    set_: tuple[str, ...] = (),
    minutes: str | None = None,
    dry_run: bool = False,
) -> int:
    """Run the stages of a pipeline in order; finished, unchanged stages are skipped.

    Parameters
    ----------
    recipes
        Pipeline recipe (YAML), followed by overlays.
    config
        Recipe, as an option instead of an argument.
    out
        Pipeline folder; overrides the recipe's `out`.
    start
        Rerun this stage and all later ones from scratch.
    only
        Rerun only this stage from scratch; can be repeated.
    set_
        NAME=VALUE for an entry of the recipe's `vars`; can be repeated.
    minutes
        Total training minutes of all stages with `schedule.minutes`, divided in the recipe's proportions.
    dry_run
        Check every stage and print what would run and why; nothing is written.
    """
    files = [*recipes, *config]
    if not files:
        raise ConfigError("which pipeline?", "give a recipe: `anabatic run demo`; others: `anabatic recipes list`")
    pairs = _parse_pairs(set_)
    budget = None if minutes is None else parse_float("minutes", minutes)
    job = settings.load_job("run", files, {"out": validation.UntypedText(out)} if out is not None else None)
    if budget is not None:
        if not 0 < budget <= MAX_MINUTES:
            raise ConfigError(f"--minutes is {minutes}", f"use more than 0 and at most {MAX_MINUTES:,}")
        others = [*(["--out", out] if out is not None else []), *(word for pair in set_ for word in ("--set", pair))]
        scale_minutes(job.stages, budget, _explain_missing_minutes(files, job.stages, f"{budget:g}", others))

    from anabatic.recipes.pipeline import runner

    return runner.run(job, start=start, only=list(only), dry_run=dry_run, vars=pairs)


def _explain_missing_minutes(
    files: Sequence[str], stages: dict[str, PipelineStage], minutes: str, options: Sequence[str]
) -> str:
    """Return how a recipe without `schedule.minutes` is given some; a recipe of the package is copied first.

    Args:
        options: what else was typed.
    """
    commands = command_table.COMMANDS
    trained = [
        name for name, stage in stages.items() if stage.command in commands and commands[stage.command].is_training
    ]
    if not trained:
        return "no stage trains: leave --minutes out"
    line = f"write `schedule: {{minutes: {minutes}}}` in the job of {' or '.join(trained)}"
    shipped = next((file for file in files if file in shipped_recipes.RECIPES), None)
    if shipped is None:
        return f"{line}, in place of its max_steps or epochs"
    file = f"my-{shipped_recipes.RECIPES[shipped].path.name}"
    overlays = [word for each in files if each != shipped for word in ("-c", each)]
    command = shlex.join(["anabatic", "run", file, *overlays, *options, "--minutes", minutes])
    return f"`anabatic recipes copy {shipped} {file}`; {line} there, in place of its max_steps or epochs; `{command}`"


def _parse_pairs(options: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in options:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f'--set is "{text}", expected NAME=VALUE', "for example --set corpus=data/books")
        if name in pairs:
            raise ConfigError(f"--set {name} is given twice: {pairs[name]} and {value}", "give one")
        pairs[name] = value
    return pairs
