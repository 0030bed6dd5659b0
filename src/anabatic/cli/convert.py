"""`anabatic config from-...`: convert commands, scripts and files of other programs to recipes."""

from __future__ import annotations

import sys
from typing import Annotated

from anabatic.cli.parsing.function_command import OptionNames

WordsArgument = Annotated[str, OptionNames(takes_hyphens=True)]


def from_swift(*words: WordsArgument, command: str | None = None) -> int:
    """Print the recipe for a command of ms-swift; what changes meaning or has no counterpart goes to stderr.

    Parameters
    ----------
    words
        The command in quotes; a script that holds it, `-` for standard input; a YAML file, or args.json of a run.
    command
        The command here, where the original command leaves it open.
    """
    return _print_converted_recipe("swift", words, command)


def from_llamafactory(*words: WordsArgument, command: str | None = None) -> int:
    """Print the recipe for a YAML file or command of LLaMA-Factory; what changes or is lost goes to stderr.

    Parameters
    ----------
    words
        The file of settings, the command in quotes, or a script that holds it.
    command
        The command here, where `stage` leaves it open.
    """
    return _print_converted_recipe("llamafactory", words, command)


def from_deepspeed(*words: WordsArgument, command: str | None = None) -> int:
    """Print the recipe for a DeepSpeed file, or for a script of one's own under deepspeed, torchrun or accelerate.

    Parameters
    ----------
    words
        DeepSpeed's JSON file; zero2, zero3-offload and the like; the command in quotes; or a script that holds it.
    command
        The command here; default: sft.
    """
    return _print_converted_recipe("deepspeed", words, command)


def from_nanochat(*words: WordsArgument, command: str | None = None) -> int:
    """Print the recipe for a command of nanochat, or the pipeline for its speedrun.sh; the rest goes to stderr.

    Parameters
    ----------
    words
        The command in quotes, or a script that holds one or several.
    command
        The command here, where the original command leaves it open.
    """
    return _print_converted_recipe("nanochat", words, command)


def _print_converted_recipe(program: str, args: tuple[str, ...], command: str | None) -> int:
    from anabatic.convert import converter

    converted = converter.convert_command(program, args, command)
    sys.stdout.write(converted.text)
    sys.stdout.flush()
    for line in converted.messages:
        sys.stderr.write(f"{line}\n")
    return 0
