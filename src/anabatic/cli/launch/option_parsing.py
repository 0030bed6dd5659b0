"""What the ways to launch a training have in common on the command line: the command, and numbers that are strict."""

from __future__ import annotations

from typing import Any

from anabatic.config.loading import command_table, settings, validation
from anabatic.core.errors import ConfigError


def parse_positive_int(name: str, text: str) -> int:
    """Return the whole number of an option that is 1 or more."""
    number = parse_int(name, text) or 0
    if number < 1:
        raise ConfigError(f"--{name} is {number}", "use 1 or more")
    return number


def resolve_training_job(words: list[str]) -> tuple[command_table.Command, Any]:
    """Return the command's row and its resolved settings.

    Raises:
        ConfigError: it is not a command of ours that trains, or its settings are wrong.
    """
    from anabatic.cli import app as program
    from anabatic.cli import job_command as jobs

    training = [name for name, row in command_table.COMMANDS.items() if row.is_training]
    fitting = [name for name in training if words[: len(name.split())] == name.split()]
    if not fitting:
        raise ConfigError(f"{words[0]} is not a command that trains", _suggest_command(words, training))
    row = command_table.get_command(fitting[0])
    _, bound, _ = program.build_app().parse_args(words, exit_on_error=False, print_error=False)
    files = bound.arguments.pop("config", None) or []
    if bound.arguments.pop(jobs.DRY_RUN, None):
        hint = "for several machines: `anabatic plan --chip 910B3 --npus 8 --nodes 2 -- COMMAND`"
        raise ConfigError("--dry-run is an option of the command alone, and plans for this machine", hint)
    return row, settings.load_job(row.name, files, jobs.nest_options(dict(bound.arguments)))


def _suggest_command(words: list[str], training: list[str]) -> str:
    """What to type, where the first word is no command."""
    if words[0] == "anabatic":
        return "leave `anabatic` out behind --"
    if words[0].endswith((".yaml", ".yml")):
        return f"name the command before the recipe: sft -c {words[0]}"
    return f"these are: {', '.join(training)}"


def parse_node_range(text: str) -> tuple[int, int]:
    """Return the least and the most machines of `2` or `1:4`."""
    least, _, most = text.partition(":")
    first = parse_int("nnodes", least) or 0
    return first, (parse_int("nnodes", most) or 0) if most else first


def parse_int(name: str, text: str | None) -> int | None:
    """Return the whole number of an option, None where it is not given."""
    return (
        None
        if text is None
        else int(validation.convert_value(validation.UntypedText(text), int, validation.OptionNamer(), (name,)))
    )


def parse_int_or_default(name: str, text: str | None, otherwise: int) -> int:
    """Return the whole number of an option, or what holds where it is not given."""
    found = parse_int(name, text)
    return otherwise if found is None else found


def parse_float(name: str, text: str) -> float:
    """Return the number of an option."""
    return float(validation.convert_value(validation.UntypedText(text), float, validation.OptionNamer(), (name,)))
