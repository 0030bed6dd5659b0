"""The report as text for a terminal and as JSON."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len

from anabatic.core.language import Language, LocalizedText
from anabatic.doctor.findings.catalog import REPORT_GROUPS
from anabatic.doctor.findings.check_result import CheckResult, Status

_STATUS_COLORS: dict[Status, str] = {"OK": "32", "WARN": "33", "FAIL": "31", "n/a": "2"}
_STATUS_WIDTH, _INDENT = 5, 2
_MIN_WIDTH = 30
_SUMMARY_TEXTS: tuple[tuple[Status, LocalizedText, LocalizedText], ...] = (
    ("FAIL", LocalizedText("{n} broken", "{n} 项故障"), LocalizedText("nothing is broken", "没有故障")),
    (
        "WARN",
        LocalizedText("{n} to look at", "{n} 项需要留意"),
        LocalizedText("nothing to look at", "也没有需要留意的地方"),
    ),
)


def strip_control_characters(text: str) -> str:
    """Return text without control characters: what a program printed must not steer the terminal."""
    return "".join(" " if unicodedata.category(one) in ("Cc", "Cf", "Cs") else one for one in text)


def wrap_text(text: str, width: int) -> list[str]:
    """Return lines of at most `width` columns, broken at blanks, between Chinese characters, or within a long word."""
    lines, line = [], ""
    for word in _split_wrap_units(text):
        if line and cell_len(line) + cell_len(word.rstrip()) > width:
            lines.append(line.rstrip())
            line = ""
        for piece in _split_long_word(word, width):
            if line and cell_len(line) + cell_len(piece.rstrip()) > width:
                lines.append(line.rstrip())
                line = ""
            line += piece
    return [*lines, line.rstrip()] if line.strip() or not lines else lines


_WIDE_RANGES = "\u2e80-\u9fff\uff00-\uffef\u3000-\u303f"
_OPENING_MARKS, _CLOSING_MARKS = "（《“", "，。；：！？）、》”"
_WRAP_UNIT = re.compile(
    rf"[{_OPENING_MARKS}]*(?:`[^`]{{1,40}}`[^\s{_WIDE_RANGES}]*|[{_WIDE_RANGES}]|[^\s`{_WIDE_RANGES}]+|`)[{_CLOSING_MARKS}]*\s*|\s+"
)
"""A command in backticks stays on one line; a line begins with no closing mark and ends with no opening one."""


def _split_wrap_units(text: str) -> list[str]:
    return _WRAP_UNIT.findall(text)


def _split_long_word(word: str, width: int) -> list[str]:
    pieces, piece = [], ""
    for one in word:
        if piece and cell_len(piece + one.rstrip()) > width:
            pieces.append(piece)
            piece = ""
        piece += one
    return [*pieces, piece]


def render_report(lines: Sequence[CheckResult], language: Language, width: int, colour: bool) -> str:
    """Return the report for a terminal of `width` columns."""
    shown: list[str] = []
    wide = max(_MIN_WIDTH, width)
    narrow = wide < 60
    places = {check: name for _, names in REPORT_GROUPS for check, name in names.items()}
    label = max((cell_len(getattr(places[line.finding_type.check_name], language)) for line in lines), default=0)
    for title, names in REPORT_GROUPS:
        group = [line for line in lines if line.finding_type.check_name in names]
        if not group:
            continue
        shown.append(_colorize_text(getattr(title, language), "1", colour))
        for line in group:
            name = getattr(names[line.finding_type.check_name], language)
            shown += _render_result(line, name, 0 if narrow else label, language, wide, colour)
    return "\n".join([*shown, "", _format_summary(lines, language)]) + "\n"


def _render_result(line: CheckResult, name: str, label: int, language: Language, width: int, colour: bool) -> list[str]:
    status = _colorize_text(f"{line.status:<{_STATUS_WIDTH}}", _STATUS_COLORS[line.status], colour)
    start = _INDENT + _STATUS_WIDTH + 1
    found, fix = (
        strip_control_characters(line.describe_result(language)),
        strip_control_characters(line.describe_fix(language)),
    )
    head = f"{' ' * _INDENT}{status} "
    if label:
        start += label + 2
        body = wrap_text(found, width - start)
        head += name + " " * (label - cell_len(name) + 2)
    else:
        body = wrap_text(f"{name}: {found}", width - start)
    rows = [head + body[0], *(" " * start + one for one in body[1:])]
    arrow = "-> "
    for index, one in enumerate(wrap_text(fix, width - start - len(arrow)) if fix else []):
        rows.append(" " * start + _colorize_text((arrow if index == 0 else "   ") + one, "36", colour))
    return rows


def _colorize_text(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text


def _format_summary(lines: Sequence[CheckResult], language: Language) -> str:
    counts = Counter(line.status for line in lines)
    parts = [
        getattr(some if counts[status] else none, language).format(n=counts[status])
        for status, some, none in _SUMMARY_TEXTS
    ]
    return ("，" if language == "zh" else ", ").join(parts)


def results_to_rows(lines: Sequence[CheckResult], language: Language) -> list[dict[str, Any]]:
    """Return the lines as JSON-able rows: status, id, group, name, found, fix."""
    places = {check: (title, name) for title, names in REPORT_GROUPS for check, name in names.items()}
    rows = []
    for line in lines:
        title, name = places[line.finding_type.check_name]
        rows.append(
            {
                "status": line.status,
                "id": line.finding_type.id,
                "group": getattr(title, language),
                "name": getattr(name, language),
                "found": line.describe_result(language),
                "fix": line.describe_fix(language),
            }
        )
    return rows


def render_json(lines: Sequence[CheckResult], language: Language, version: str, root: str) -> str:
    """Return the report as one JSON object."""
    counts = Counter(line.status for line in lines)
    report = {
        "version": version,
        "root": root,
        "counts": {status: counts[status] for status in _STATUS_COLORS},
        "lines": results_to_rows(lines, language),
    }
    return json.dumps(report, ensure_ascii=False, indent=2) + "\n"
