"""Tables of which a column is named after a secret."""

from __future__ import annotations

import re
from collections.abc import Iterator

from anabatic.doctor import redaction_rules
from anabatic.doctor.redaction_rules import REDACTED
from anabatic.doctor.redaction_text import Span

_SEPARATORS = tuple(map(re.compile, (r"[ \t]*\|[ \t]*", r"\t", r"[ ]*,[ ]*", r"[ ]*;[ ]*", r"[ ]{2,}")))
_HEADER = re.compile(
    rf"(?i)[\w. -]{{0,30}}?(?:{redaction_rules.OTHER_WORDS}|{redaction_rules.SHORT_WORDS}|"
    rf"(?:{redaction_rules.HOLDER_WORDS})[ _-]?tokens?|(?<![a-z])token)(?:[ _-]?(?:value|hash))?"
)
_RULE = re.compile(r"[\s|+:=─━┼╪┿├┤╞╡-]*")
_MAX_HEADER_CHARS, _MAX_CELLS = 2000, 60
_SECRET_CELL = re.compile(r"(?=\S{0,80}\d)(?=\S{0,80}[A-Za-z])[^\s|]{4,}")
"""Letters and digits without a blank, as in no word of a sentence."""
_MAX_NAME_CHARS = 40


def _split(line: str, separator: re.Pattern[str]) -> list[tuple[int, int]]:
    cells, start = [], len(line) - len(line.lstrip())
    for match in separator.finditer(line, start, min(len(line), _MAX_HEADER_CHARS)):
        cells.append((start, match.start()))
        start = match.end()
    return [*cells, (start, len(line.rstrip()))]


def _read_header(line: str) -> tuple[re.Pattern[str], int, list[int]] | None:
    """Return what parts the cells, how many there are, and which hold secrets."""
    if len(line) > _MAX_HEADER_CHARS or not redaction_rules.ANY_WORD.search(line):
        return None
    for separator in _SEPARATORS:
        cells = _split(line, separator)
        if 2 <= len(cells) <= _MAX_CELLS:
            names = [line[start:end].strip("\"' *`") for start, end in cells]
            secret = [column for column, name in enumerate(names) if _HEADER.fullmatch(name)]
            is_header = secret and all(len(name) <= _MAX_NAME_CHARS for name in names)
            return (separator, len(cells), secret) if is_header else None
    return None


def find_secret_cells(text: str) -> Iterator[Span]:
    """Yield the cells below the name of a secret, to the end of each table."""
    header: tuple[re.Pattern[str], int, list[int]] | None = None
    place = 0
    for line in text.splitlines(keepends=True):
        cells = _split(line, header[0]) if header else []
        if header and len(cells) == header[1]:
            for start, end in (cells[column] for column in header[2]):
                if _SECRET_CELL.fullmatch(line, start, end) and REDACTED not in line[start:end]:
                    yield place + start, place + end, REDACTED
        elif not (header and _RULE.fullmatch(line) and line.strip()):
            header = _read_header(line)
        place += len(line)
