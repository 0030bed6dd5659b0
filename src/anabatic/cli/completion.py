"""`anabatic completion`: scripts for shells, and the words that they offer when the user presses Tab.

The scripts hold no list of commands: they ask the program, so that they fit every version of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from anabatic.cli import command_tree
from anabatic.cli.parsing.command_line import SEPARATOR, Interface, Option, split_at_separator
from anabatic.config.loading import command_table, shipped_recipes
from anabatic.core.errors import ConfigError

# $1 is the program as typed: that of a virtual environment need not be on the PATH.
_BASH = r"""# anabatic: completion for bash
_anabatic() {
    local IFS=$'\n' word
    COMPREPLY=()
    while read -r word; do
        COMPREPLY+=("${word%%$'\t'*}")
    done < <("$1" completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o default -F _anabatic anabatic
"""
_ZSH = r"""#compdef anabatic
# anabatic: completion for zsh
_anabatic() {
    local line
    local -a offered
    while IFS= read -r line; do
        offered+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
    done < <("$words[1]" completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)
    if (( ${#offered} )); then
        _describe anabatic offered
    else
        _files
    fi
}
compdef _anabatic anabatic
"""
_FISH = r"""# anabatic: completion for fish
function __anabatic_words
    set -l typed (commandline -opc)
    set -l offered ($typed[1] completion words -- $typed[2..] (commandline -ct) 2>/dev/null)
    if test (count $offered) -gt 0
        printf '%s\n' $offered
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c anabatic -f -a "(__anabatic_words)"
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_INSTALL_HINTS = {
    "bash": "echo 'source <(anabatic completion bash)' >> ~/.bashrc",
    "zsh": "echo 'source <(anabatic completion zsh)' >> ~/.zshrc",
    "fish": "anabatic completion fish > ~/.config/fish/completions/anabatic.fish",
}
_RECIPE_ARGUMENTS = ("run", "recipes show", "recipes copy")
"""Commands whose first argument is a recipe of the package."""


def completion(shell: str = "", /) -> None:
    """Print the completion script of a shell: commands, options, their choices and recipes.

    For bash: echo 'source <(anabatic completion bash)' >> ~/.bashrc

    Parameters
    ----------
    shell
        Shell: bash, zsh or fish.
    """
    if shell not in SCRIPTS:
        message = f'shell is "{shell}", expected one of {", ".join(SCRIPTS)}' if shell else "which shell?"
        raise ConfigError(message, "; ".join(_INSTALL_HINTS.values()))
    sys.stdout.write(SCRIPTS[shell])


def print_words(*words: str) -> None:
    """Print the completions of the last word; called by the completion scripts.

    Parameters
    ----------
    words
        Command line up to the cursor, without the program name, after `--`.
    """
    rows = complete_words(list(words))
    sys.stdout.write("".join(f"{word}\t{text.split('. ')[0].strip()}\n" for word, text in rows))


def complete_words(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return (word, explanation) of what may stand in place of the last of `words`; empty: a file."""
    *before, prefix = words or [""]
    own, behind = split_at_separator(before)
    if behind and own[:1] != ["completion"]:
        return complete_words([*behind[1:], prefix])
    return [row for row in _list_words(own, prefix) if row[0].startswith(prefix)]


def _list_words(before: list[str], prefix: str) -> Iterator[tuple[str, str]]:
    name, rest = command_tree.split_name(before)
    if not rest and not prefix.startswith("-"):
        yield from ((entry.last_word, entry.help) for entry in command_tree.list_subcommands(name))
    if not command_tree.is_callable(name):
        if rest:
            return  # no such command
        yield from (("--help", "Print the help."), ("--version", "Print the version."))
        return
    interface = command_tree.load_command(name).interface
    option_name, equals, _ = prefix.partition("=")
    if (option := _find_option(interface, option_name)) is not None and equals:
        yield from ((f"{option_name}={value}", text) for value, text in _list_values(option))
        return
    if rest and rest[-1] == "=":  # bash takes --option=value apart
        rest = rest[:-1]
    if rest and (option := _find_option(interface, rest[-1])) is not None and option.metavar and prefix[:1] != "-":
        yield from _list_values(option)
    elif prefix.startswith("-"):
        yield from _list_options(interface, prefix)
        yield "--help", "Print the help."
    elif not rest:
        yield from _list_arguments(name, interface)


def _find_option(interface: Interface, name: str) -> Option | None:
    return next((option for option in interface.options if name in option.names), None)


def _list_options(interface: Interface, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the common options, and the rarely used ones once the prefix says what they are about."""
    for option in interface.options:
        for name in (*option.names, *option.off_names):
            if not option.is_hidden or len(prefix.strip("-")) > 1:
                yield name, option.help


def _list_values(option: Option) -> Iterator[tuple[str, str]]:
    if option.key == "config":
        yield from _list_recipes()
    yield from ((choice, "") for choice in option.choices)


def _list_recipes() -> Iterator[tuple[str, str]]:
    yield from ((recipe.name, recipe.summary) for recipe in shipped_recipes.RECIPES.values())


def _list_arguments(name: str, interface: Interface) -> Iterator[tuple[str, str]]:
    if name in _RECIPE_ARGUMENTS:
        yield from _list_recipes()
    elif name in ("config show", "config schema"):
        yield from ((row.name, row.help) for row in command_table.COMMANDS.values())
    elif name == "help":
        from anabatic.cli import help_topics

        yield from ((topic, "") for topic in help_topics.find_pages("en"))
    elif name == "completion":
        yield from ((shell, "") for shell in SCRIPTS)
    elif interface.takes_command:
        yield SEPARATOR, interface.arguments[0].help
