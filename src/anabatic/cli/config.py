"""`anabatic config show|check`: recipes explained and checked, nothing is run."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from cyclopts import Parameter

from anabatic.config import commands, load, template, yaml_file
from anabatic.convert.recognise import OURS, is_complete, kind_of_tree, takes_settings
from anabatic.core.errors import ConfigError


def show(*words: str) -> None:
    """Print a recipe of COMMAND with every setting, its default and its meaning.

    Parameters
    ----------
    words
        The command, for example `pretrain` or `tokenizer train`.
    """
    if not words:
        raise ConfigError("which command?", f"one of: {', '.join(commands.COMMANDS)}")
    sys.stdout.write(template.template(" ".join(words)))


def check(*files: str, command: Annotated[str | None, Parameter(negative=())] = None) -> None:
    """Check recipes without running them.

    Parameters
    ----------
    files
        Recipes (YAML).
    command
        The command they are for; default: told from their keys.
    """
    if not files:
        raise ConfigError("which file?", "give one or more recipes")
    for file in files:
        tree = yaml_file.read(file).tree
        kind = None if command else kind_of_tree(tree)
        if kind is not None and kind.program != OURS:
            from anabatic.cli import habits  # reads the tables of other programs

            raise habits.misplaced(file, "")
        names = [command] if command else _fitting(tree)
        calls = [f"`anabatic {name}{_check(file, name)}`" for name in names]
        sys.stdout.write(f"{file}: a good recipe for {', '.join(calls)}\n")


def _check(file: str, name: str) -> str:
    """Check one recipe; return what its user must still give."""
    job = load.load(name, [file])
    if name != "run":
        return ""
    from anabatic.recipes import pipeline

    empty = [key for key, value in job.vars.items() if not value]
    pipeline.plan(job, {key: f"value-of-{key}" for key in empty})
    return "".join(f" --set {key}=..." for key in empty)


def _fitting(tree: dict[str, Any]) -> list[str]:
    """Return the commands that take `tree`; when none does, the one that takes most of its keys."""
    taken = {name: sum(takes_settings(name, {key: value}) for key, value in tree.items()) for name in commands.COMMANDS}
    good = [name for name in commands.COMMANDS if is_complete(name, tree)]
    return good or [max(taken, key=lambda name: taken[name])]
