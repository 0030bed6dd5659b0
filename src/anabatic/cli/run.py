"""`anabatic run`: run a pipeline of stages."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from anabatic.config.loading import settings, validation
from anabatic.core.errors import ConfigError

_RepeatedOption = Annotated[list[str] | None, Parameter(negative=(), consume_multiple=False)]
_TextOption = Annotated[str | None, Parameter(negative=())]


def run(
    *recipes: str,
    config: Annotated[list[str] | None, Parameter(name=("--config", "-c"), negative=())] = None,
    out: _TextOption = None,
    start: Annotated[str | None, Parameter(name="--from", negative=())] = None,
    only: _RepeatedOption = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative=(), consume_multiple=False)] = None,
    dry_run: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Run the stages of a pipeline in order; a stage that is done and unchanged is skipped.

    Parameters
    ----------
    recipes
        Recipe of the pipeline (YAML), with overlays to its right.
    config
        Another way to give a recipe.
    out
        Folder of the pipeline; overrides the recipe's `out`.
    start
        Run this stage again, from scratch, and all after it.
    only
        Run this stage again, from scratch, and no other; may be repeated.
    set_
        NAME=VALUE for an entry of the recipe's `vars`; may be repeated.
    dry_run
        Say what would run and why, and check every stage; nothing is written.
    """
    files = [*recipes, *(config or [])]
    if not files:
        raise ConfigError("which pipeline?", "give a recipe: `anabatic run demo`; others: `anabatic recipes list`")
    pairs = _parse_pairs(set_ or [])
    job = settings.load_job("run", files, {"out": validation.UntypedText(out)} if out is not None else None)

    from anabatic.recipes.pipeline import runner

    return runner.run(job, start=start, only=only or [], dry_run=dry_run, vars=pairs)


def _parse_pairs(options: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in options:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f'--set is "{text}", expected NAME=VALUE', "for example --set corpus=data/books")
        if name in pairs:
            raise ConfigError(f"--set {name} is given twice: {pairs[name]} and {value}", "give one")
        pairs[name] = value
    return pairs
