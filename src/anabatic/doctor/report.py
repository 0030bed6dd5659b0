"""The report as text for a terminal and as JSON."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

from anabatic.doctor.language import Language
from anabatic.doctor.line import Line, Status, Text
from anabatic.doctor.verdicts import GROUPS

_COLOURS: dict[Status, str] = {"OK": "32", "WARN": "33", "FAIL": "31", "n/a": "2"}
_STATUS_WIDTH, _INDENT = 5, 2
_LEAST_WIDTH = 30
_SUMMARY: tuple[tuple[Status, Text, Text], ...] = (
    ("FAIL", Text("{n} broken", "{n} 项故障"), Text("nothing is broken", "没有故障")),
    ("WARN", Text("{n} to look at", "{n} 项需要留意"), Text("nothing to look at", "也没有需要留意的地方")),
)


def printable(text: str) -> str:
    """Return text without control characters: what a program printed must not steer the terminal."""
    return "".join(" " if unicodedata.category(one) in ("Cc", "Cf", "Cs") else one for one in text)


def cells(text: str) -> int:
    """Return the columns that a text takes: two for a wide character, none for a combining one."""
    return sum(0 if unicodedata.combining(one) else 1 + (unicodedata.east_asian_width(one) in "WF") for one in text)


def wrap(text: str, width: int) -> list[str]:
    """Return lines of at most `width` columns, broken at blanks, between Chinese characters, or within a long word."""
    lines, line = [], ""
    for word in _words(text):
        if line and cells(line) + cells(word.rstrip()) > width:
            lines.append(line.rstrip())
            line = ""
        for piece in _cut(word, width):
            if line and cells(line) + cells(piece.rstrip()) > width:
                lines.append(line.rstrip())
                line = ""
            line += piece
    return [*lines, line.rstrip()] if line.strip() or not lines else lines


_WIDE = "\u2e80-\u9fff\uff00-\uffef\u3000-\u303f"
_OPENING, _CLOSING = "（《“", "，。；：！？）、》”"
_WORD = re.compile(rf"[{_OPENING}]*(?:`[^`]{{1,40}}`[^\s{_WIDE}]*|[{_WIDE}]|[^\s`{_WIDE}]+|`)[{_CLOSING}]*\s*|\s+")
"""A command in backticks stays on one line; a line begins with no closing mark and ends with no opening one."""


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


def _cut(word: str, width: int) -> list[str]:
    pieces, piece = [], ""
    for one in word:
        if piece and cells(piece + one.rstrip()) > width:
            pieces.append(piece)
            piece = ""
        piece += one
    return [*pieces, piece]


def text(lines: Sequence[Line], language: Language, width: int, colour: bool) -> str:
    """Return the report for a terminal of `width` columns."""
    shown: list[str] = []
    wide = max(_LEAST_WIDTH, width)
    narrow = wide < 60
    places = {check: name for _, names in GROUPS for check, name in names.items()}
    label = max((cells(getattr(places[line.verdict.check], language)) for line in lines), default=0)
    for title, names in GROUPS:
        group = [line for line in lines if line.verdict.check in names]
        if not group:
            continue
        shown.append(_paint(getattr(title, language), "1", colour))
        for line in group:
            name = getattr(names[line.verdict.check], language)
            shown += _line(line, name, 0 if narrow else label, language, wide, colour)
    return "\n".join([*shown, "", _summary(lines, language)]) + "\n"


def _line(line: Line, name: str, label: int, language: Language, width: int, colour: bool) -> list[str]:
    status = _paint(f"{line.status:<{_STATUS_WIDTH}}", _COLOURS[line.status], colour)
    start = _INDENT + _STATUS_WIDTH + 1
    found, fix = printable(line.found(language)), printable(line.fix(language))
    head = f"{' ' * _INDENT}{status} "
    if label:
        start += label + 2
        body = wrap(found, width - start)
        head += name + " " * (label - cells(name) + 2)
    else:
        body = wrap(f"{name}: {found}", width - start)
    rows = [head + body[0], *(" " * start + one for one in body[1:])]
    arrow = "-> "
    for index, one in enumerate(wrap(fix, width - start - len(arrow)) if fix else []):
        rows.append(" " * start + _paint((arrow if index == 0 else "   ") + one, "36", colour))
    return rows


def _paint(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text


def _summary(lines: Sequence[Line], language: Language) -> str:
    counts = Counter(line.status for line in lines)
    parts = [
        getattr(some if counts[status] else none, language).format(n=counts[status]) for status, some, none in _SUMMARY
    ]
    return ("，" if language == "zh" else ", ").join(parts)


def rows(lines: Sequence[Line], language: Language) -> list[dict[str, Any]]:
    """Return the lines as JSON-able rows: status, id, group, name, found, fix."""
    places = {check: (title, name) for title, names in GROUPS for check, name in names.items()}
    told = []
    for line in lines:
        title, name = places[line.verdict.check]
        told.append(
            {
                "status": line.status,
                "id": line.verdict.id,
                "group": getattr(title, language),
                "name": getattr(name, language),
                "found": line.found(language),
                "fix": line.fix(language),
            }
        )
    return told


def as_json(lines: Sequence[Line], language: Language, version: str, root: str) -> str:
    """Return the report as one JSON object."""
    counts = Counter(line.status for line in lines)
    told = {
        "version": version,
        "root": root,
        "counts": {status: counts[status] for status in _COLOURS},
        "lines": rows(lines, language),
    }
    return json.dumps(told, ensure_ascii=False, indent=2) + "\n"
