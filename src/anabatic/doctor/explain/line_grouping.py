"""Lines that differ in numbers which mean nothing: gigabytes of one error are looked at once a block.

Of a line that is known to be suspect a pattern is made: its letters, and digits where it has digits. Only numbers that
may be a code, what a call returned, or a rank are distinguished; lines that have those in common have all else in
common that is ever searched for. What stands in front of such numbers is written down here as it is in `explain_match`
and `explain_scan`; a test compares both ways on made-up lines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

MIN_GROUPED_LINES = 100
"""Lines of a block for which a pattern is worth its making."""
MAX_PATTERN_BYTES = 1 << 10
"""Bytes of such a line."""
MAX_PATTERNS = 1000
"""Patterns that are kept: each takes some ten kilobytes."""
HEX_ADDRESS = re.compile(rb"0x[0-9A-Fa-f]+(?![0-9A-Za-z_])")
"""A number in hexadecimal."""
_NUMBER_RUNS = re.compile(rb"(%s|\d+)" % HEX_ADDRESS.pattern)
_BEFORE_NUMBER = re.compile(
    rb"(?:error|ret|code)[a-z]?\]?\s{0,8}(?:is|[:=\[(,])?\s{0,8}[\[(]?\s{0,8}-?$"  # what a call returned
    rb"|(?:result|status|errno)\s{0,8}[=:]\s{0,8}\[?$|hcclret -> $"
    rb"|\[rank:? ?$|\[default$|rankid:$",
    re.IGNORECASE,
)
_CODE_LETTERS = re.compile(rb"E(?:[A-Z]|RR|)$")
_WITHIN_NUMBER = re.compile(rb"[A-Za-z.]*")
"""Between digits of one number in hexadecimal, or before its fraction."""
_WARNING_LINE = re.compile(rb"WARN|(?:^|[\]:\s])\[?W[ \]]")
"""Whether a line is a warning depends on the number of its digits: such lines are read one by one."""


class LineGrouper:
    """Patterns of lines, by the line without its digits; None: it is too odd for one."""

    def __init__(self) -> None:
        self.patterns: dict[bytes, re.Pattern[bytes] | None] = {}

    def group_lines(self, bare: bytes, lines: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return (place of the first, how many) of lines that tell the same; empty: each must be read by itself.

        Args:
            bare: what all of them are without their digits.
            lines: at least one.
        """
        if bare not in self.patterns:
            if len(self.patterns) >= MAX_PATTERNS:
                self.patterns.clear()
            self.patterns[bare] = compile_line_pattern(lines[0])
        like = self.patterns[bare]
        found = like.findall(b"\n".join(lines)) if like is not None else []
        if len(found) != len(lines):
            return []
        counts = Counter(found)
        firsts = dict(zip(reversed(found), range(len(found) - 1, -1, -1), strict=True))
        return [(firsts[group_key], count) for group_key, count in counts.items()]


def compile_line_pattern(line: bytes) -> re.Pattern[bytes] | None:
    """Return what matches lines like this one, with a group for each number that tells something; None: too odd."""
    if len(line) > MAX_PATTERN_BYTES or _WARNING_LINE.search(_NUMBER_RUNS.sub(b"", line)):
        return None
    parts = _NUMBER_RUNS.split(line)
    words, tells = [re.escape(parts[0])], False
    for before, number, after in zip(parts[0::2], parts[1::2], parts[2::2], strict=False):
        tells = bool(
            (tells and _WITHIN_NUMBER.fullmatch(before))
            or _BEFORE_NUMBER.search(before)
            or _CODE_LETTERS.search(before)
        )
        kind = rb"0x[0-9A-Fa-f]+" if number.startswith(b"0x") else rb"\d+"
        words += [rb"(%s)" % kind if tells else kind, re.escape(after)]
    return re.compile(rb"^%s()$" % b"".join(words), re.MULTILINE)
