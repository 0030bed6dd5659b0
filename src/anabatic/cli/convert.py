"""`anabatic config from-...`: convert commands, scripts and files of other programs to recipes."""

from __future__ import annotations

import sys
from typing import Annotated

from anabatic.cli.parsing.function_command import OptionNames

WordsArgument = Annotated[str, OptionNames(takes_hyphens=True)]


def from_swift(*words: WordsArgument, command: str | None = None) -> int:
    """Convert an ms-swift command to a recipe; options that change meaning or have no counterpart are listed on stderr.

    Parameters
    ----------
    words
        Command in quotes; a script containing it, `-` for standard input; a YAML file, or args.json of a run.
    command
        anabatic command to use if the original command does not determine it.
    """
    return _print_converted_recipe("swift", words, command)


def from_llamafactory(*words: WordsArgument, command: str | None = None) -> int:
    """Convert a LLaMA-Factory YAML file or command to a recipe; changed and lost settings are listed on stderr.

    Parameters
    ----------
    words
        Settings file, command in quotes, or a script containing it.
    command
        anabatic command to use if `stage` does not determine it.
    """
    return _print_converted_recipe("llamafactory", words, command)


def from_deepspeed(*words: WordsArgument, command: str | None = None) -> int:
    """Convert a DeepSpeed file, or a custom script run by deepspeed, torchrun or accelerate, to a recipe.

    Parameters
    ----------
    words
        DeepSpeed JSON file; a name such as zero2 or zero3-offload; command in quotes; or a script containing it.
    command
        anabatic command to use; default: sft.
    """
    return _print_converted_recipe("deepspeed", words, command)


def from_nanochat(*words: WordsArgument, command: str | None = None) -> int:
    """Convert a nanochat command to a recipe, or its speedrun.sh to a pipeline; the rest is listed on stderr.

    Parameters
    ----------
    words
        Command in quotes, or a script containing one or more.
    command
        anabatic command to use if the original command does not determine it.
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
