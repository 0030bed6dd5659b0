"""The text of `--help`: usage, description, options by group."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence

from anabatic.cli.parsing.command_line import OTHER_COMMAND, Argument, Interface, Option

MAX_WIDTH = 100
_MAX_LEFT = 30
"""Widest left column; what is longer gets a line of its own."""


def render_page(
    usage: Sequence[str],
    description: str,
    blocks: Iterable[tuple[str, str, Sequence[tuple[str, str]]]],
    epilogue: Sequence[str],
    *,
    width: int,
    use_bold: bool = False,
) -> str:
    """Return a page.

    Args:
        usage: usage lines.
        description: paragraphs.
        blocks: (heading, sentence under it, rows of two columns).
        epilogue: last lines, as they are: commands are not wrapped.
        width: columns.
        use_bold: headings are bold, for terminals.
    """
    lines = [f"Usage: {usage[0]}", *(f"       {line}" for line in usage[1:]), ""]
    for paragraph in description.split("\n\n") if description else ():
        lines += [*textwrap.wrap(paragraph.replace("`", ""), width), ""]
    for heading, sentence, rows in blocks:
        lines.append(f"\x1b[1m{heading}\x1b[0m:" if use_bold else f"{heading}:")
        lines += textwrap.wrap(sentence, width, initial_indent="  ", subsequent_indent="  ")
        left = min(max(len(left) for left, _ in rows), _MAX_LEFT)
        for name, text in rows:
            lines += _render_row(name, text, left, width)
        lines.append("")
    for line in epilogue:
        lines += [line, ""]
    return "\n".join(lines[:-1]) + "\n"


def _render_row(name: str, text: str, left: int, width: int) -> list[str]:
    text = text.replace("`", "")
    indent = " " * (left + 4)
    wrapped = textwrap.wrap(text, max(width, left + 24), initial_indent=indent, subsequent_indent=indent)
    if not wrapped:
        return [f"  {name}"]
    if len(name) > left:
        return [f"  {name}", *wrapped]
    return [f"  {name:{left}}  {wrapped[0].lstrip()}", *wrapped[1:]]


def get_width() -> int:
    """Return the columns of a page on this terminal."""
    return min(shutil.get_terminal_size((80, 24)).columns, MAX_WIDTH)


def make_option_blocks(interface: Interface) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return the blocks of the arguments and options of a command, in the order of their groups."""
    blocks: dict[str, list[tuple[str, str]]] = {}
    for option in interface.options:  # groups stand in the order of the options
        if not option.is_hidden:
            blocks.setdefault(option.group, [])
    for argument in interface.arguments:
        blocks.setdefault(argument.group, []).append((argument.name, argument.help))
    for option in interface.options:
        if not option.is_hidden:
            blocks[option.group].append((_format_names(option), _format_help(option)))
    order = sorted(blocks, key=lambda group: group != Argument.group)  # stable: arguments come first
    return [(group, interface.group_help.get(group, ""), blocks[group]) for group in order]


def _format_names(option: Option) -> str:
    names = ", ".join((*option.names, *option.off_names))
    many = "..." if option.is_list or option.is_repeatable else ""
    return f"{names} {option.metavar}{many}" if option.metavar else names


def _format_help(option: Option) -> str:
    choices = f" [choices: {', '.join(option.choices)}]" if option.choices else ""
    default = f" [default: {option.default}]" if option.default else ""
    return f"{option.help}{choices}{default}".strip()


def format_usage(name: str, interface: Interface) -> str:
    """Return the usage line of a command."""
    words = [
        f"-- {argument.name} [ARGS...]"
        if argument.name == OTHER_COMMAND
        else argument.name
        if argument.is_required
        else f"[{argument.name}{'...' if argument.is_list else ''}]"
        for argument in interface.arguments
    ]
    return " ".join(["anabatic", name, *(["[OPTIONS]"] if interface.options else []), *words])
