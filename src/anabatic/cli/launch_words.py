"""What the ways to launch a training have in common on the command line: the command, and numbers that are strict."""

from __future__ import annotations

from typing import Any

from anabatic.config import check, commands, load
from anabatic.core.errors import ConfigError


def positive(name: str, text: str) -> int:
    """Return the whole number of an option that is 1 or more."""
    number = whole(name, text) or 0
    if number < 1:
        raise ConfigError(f"--{name} is {number}", "use 1 or more")
    return number


def training_job(words: list[str]) -> tuple[commands.Command, Any]:
    """Return the command's row and its resolved settings.

    Raises:
        ConfigError: it is not a command of ours that trains, or its settings are wrong.
    """
    from anabatic.cli import app as program
    from anabatic.cli import job as jobs

    training = [name for name, row in commands.COMMANDS.items() if row.trains]
    fitting = [name for name in training if words[: len(name.split())] == name.split()]
    if not fitting:
        raise ConfigError(f"{words[0]} is not a command that trains", _instead(words, training))
    row = commands.get(fitting[0])
    _, bound, _ = program.build().parse_args(words, exit_on_error=False, print_error=False)
    files = bound.arguments.pop("config", None) or []
    if bound.arguments.pop(jobs.DRY_RUN, None):
        hint = "for several machines: `anabatic plan --chip 910B3 --npus 8 --nodes 2 -- COMMAND`"
        raise ConfigError("--dry-run is an option of the command alone, and plans for this machine", hint)
    return row, load.load(row.name, files, jobs.tree(dict(bound.arguments)))


def _instead(words: list[str], training: list[str]) -> str:
    """What to type, where the first word is no command."""
    if words[0] == "anabatic":
        return "leave `anabatic` out behind --"
    if words[0].endswith((".yaml", ".yml")):
        return f"name the command before the recipe: sft -c {words[0]}"
    return f"these are: {', '.join(training)}"


def machines(text: str) -> tuple[int, int]:
    """Return the least and the most machines of `2` or `1:4`."""
    least, _, most = text.partition(":")
    first = whole("nnodes", least) or 0
    return first, (whole("nnodes", most) or 0) if most else first


def whole(name: str, text: str | None) -> int | None:
    """Return the whole number of an option, None where it is not given."""
    return None if text is None else int(check.convert(check.Text(text), int, check.Flags(), (name,)))


def given(name: str, text: str | None, otherwise: int) -> int:
    """Return the whole number of an option, or what holds where it is not given."""
    found = whole(name, text)
    return otherwise if found is None else found


def number(name: str, text: str) -> float:
    """Return the number of an option."""
    return float(check.convert(check.Text(text), float, check.Flags(), (name,)))
