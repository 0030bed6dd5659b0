"""Numbers of texts, and numbers and suggestions for messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Container, Iterable, Sequence


def to_valid_utf8(text: str) -> str:
    """Return text that UTF-8 can encode: lone surrogates (undecodable bytes of an argument) become `?`."""
    return text.encode("utf-8", "replace").decode("utf-8")


_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What moves the cursor, colours a terminal, ends a line or turns the direction of text; lone surrogates."""


def escape_control_characters(text: str, kept: str = "") -> str:
    """Return text with control characters as Python writes them (`\\x1b`), undecodable bytes of names as `\\xff`.

    Args:
        kept: characters that stay.
    """
    return _CONTROL_CHARACTER.sub(lambda found: found[0] if found[0] in kept else _escape_character(found[0]), text)


def _escape_character(char: str) -> str:
    if "\udc80" <= char <= "\udcff":  # os.fsdecode: the byte 0x80 to 0xff
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char.encode("unicode_escape").decode("ascii")


def to_printable(text: str, max_chars: int = 200) -> str:
    """Return text as one terminal line: blanks joined, `?` for unprintable characters; only the end of a long text."""
    line = "".join(char if char.isprintable() and char != "\ufffd" else "?" for char in " ".join(text.split()))
    return line if len(line) <= max_chars else f"...{line[-max_chars:]}"


def format_count(number: float) -> str:
    """Return a short decimal count: `950`, `12.3K`, `4.0M`, `1.2B`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def format_size(num_bytes: float) -> str:
    """Return a short binary size: `512 B`, `1.5 KiB`, `3.2 GiB`."""
    for unit, step in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= step:
            return f"{num_bytes / step:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_duration(seconds: float) -> str:
    """Return `4.2s`, `3m05s` or `2h07m`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def format_spans(numbers: Iterable[int]) -> str:
    """Return `0-3,6` of [0, 1, 2, 3, 6]."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def align_columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return a table as lines; the columns of these numbers are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(cell.rjust(width) if at in right else cell.ljust(width) for at, (cell, width) in cells))
    return [line.rstrip() for line in lines]


def format_markdown_row(cells: Iterable[str]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ` Did you mean "x"?` for the nearest known word, or an empty string; a `cutoff` of 1 needs equality."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f' Did you mean "{matches[0]}"?' if matches else ""


_MAX_DIGITS = 18
"""Digits of numbers that fit into 64 bits; of more than 4,300 Python refuses to make a number."""


def parse_whole(text: str | bytes | None, max_digits: int = _MAX_DIGITS) -> int | None:
    """Return the number that `text` writes in the digits 0 to 9 alone; None for anything else.

    `str.isdigit` and `str.isdecimal` say nothing of this: the first takes `²`, which `int` refuses, and both take a
    text of any length and the digits of other scripts.
    """
    if text is None or not text.isascii() or not text.isdigit() or len(text) > max_digits:
        return None
    return int(text)
