"""Command-line parsing shared by the launch commands: the training command, and strict numbers."""

from __future__ import annotations

from typing import Any

from anabatic.cli import command_tree, job_command
from anabatic.config.loading import command_table, validation
from anabatic.config.loading.command_package import Command
from anabatic.core.errors import ConfigError


def parse_positive_int(name: str, text: str) -> int:
    """Return the value of an option as an integer of at least 1."""
    value = parse_int(name, text) or 0
    if value < 1:
        raise ConfigError(f"--{name} is {value}", "use 1 or more")
    return value


def resolve_training_job(args: list[str]) -> tuple[Command, Any]:
    """Return the row and the settings of a training command.

    Raises:
        ConfigError: it is not a training command of this program, or its settings are wrong.
    """
    row, options = parse_training_command(args)
    return row, options.load_job(row.name)


def parse_training_command(args: list[str]) -> tuple[Command, job_command.JobOptions]:
    """Return the row of a training command, and what was typed for it.

    Raises:
        ConfigError: it is not a training command of this program.
    """
    training_commands = [name for name, row in command_table.COMMANDS.items() if row.is_training]
    matches = [name for name in training_commands if args[: len(name.split())] == name.split()]
    if not matches:
        raise ConfigError(f"{args[0]} is not a command that trains", _suggest_command(args, training_commands))
    row = command_table.COMMANDS.find_row(matches[0])
    _, line = command_tree.parse_command(row.name, args[len(row.name.split()) :])
    options = job_command.read_job_options(row.name, line)
    if options.is_dry_run:
        hint = "for several machines: `anabatic plan --chip 910B3 --npus 8 --nodes 2 -- COMMAND`"
        raise ConfigError("--dry-run is an option of the command alone, and plans for this machine", hint)
    return row, options


def _suggest_command(args: list[str], training_commands: list[str]) -> str:
    """Return the hint if the first argument is not a command."""
    if args[0] == "anabatic":
        return "leave `anabatic` out behind --"
    if args[0].endswith((".yaml", ".yml")):
        return f"name the command before the recipe: sft -c {args[0]}"
    return f"these are: {', '.join(training_commands)}"


def parse_node_range(text: str) -> tuple[int, int]:
    """Return the minimum and maximum number of machines of `2` or `1:4`."""
    minimum, _, maximum = text.partition(":")
    first = parse_int("nnodes", minimum) or 0
    return first, (parse_int("nnodes", maximum) or 0) if maximum else first


def parse_int(name: str, text: str | None) -> int | None:
    """Return the value of an option as an integer, None if it is not set."""
    return (
        None
        if text is None
        else int(validation.convert_value(validation.UntypedText(text), int, validation.OptionNamer(), (name,)))
    )


def parse_int_or_default(name: str, text: str | None, default: int) -> int:
    """Return the value of an option as an integer, or `default` if it is not set."""
    value = parse_int(name, text)
    return default if value is None else value


def parse_float(name: str, text: str) -> float:
    """Return the value of an option as a float."""
    return float(validation.convert_value(validation.UntypedText(text), float, validation.OptionNamer(), (name,)))
