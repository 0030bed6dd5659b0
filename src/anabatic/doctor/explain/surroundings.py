"""Read the context of a line: the reason near a headline that names none, and the stack frames."""

from __future__ import annotations

import re
from collections.abc import Sequence

from anabatic.doctor.knowledge_base import KnowledgeEntry

FRAME_LINES = 60
"""Lines before an error that are searched for the frames that led to it."""
_LINES_BEFORE, _LINES_AFTER = 4, 8
"""Lines around a headline in which its reason stands: CANN prints it above or below, Python where the frame was."""
_ECHO = re.compile(
    rb"traceback|inner error|call aclnn|ascend log|error code is|retcode|errno|failed|\bfail\b|exitcode|core dumped",
    re.IGNORECASE,
)
"""Says that something failed, not why."""
_STATED = re.compile(
    rb"(?:reason ?[:=] ?\[?|errorstr: |expected value: |because of the following error)"
    rb"|(?:unsupported|not support|expect|should |must |illegal|mismatch|exceed|out of range|overflow|is invalid"
    rb"|is empty|larger than|less than|greater than|not equal|inconsistent|duplicate|does not exist|cannot|null)"
    rb".*\[func:",
    re.IGNORECASE,
)
"""States a condition that was not met."""
_ASSERTED = re.compile(rb"(?:^|\s)assert (?!\w{0,40}\()[^\n]{6,}|(?:^|\s)assert \w+\([^\n]{3,}")
_BARE_EXCEPTION = re.compile(rb"\w(?:Error|Exception):?\s*$")
_PLACE = re.compile(rb"\[FUNC:[^\n]*")
_ANNOUNCED = re.compile(
    rb"(?:following error[^:\n]{0,60}|error is):\s*$|look up to see its traceback\):\s*$", re.IGNORECASE
)


def refine_entry(
    entry: KnowledgeEntry, refinements: Sequence[KnowledgeEntry], before: Sequence[bytes]
) -> KnowledgeEntry:
    """Return the entry whose frames stand in the lines before, else `entry` itself."""
    text = b"\n".join(before[-FRAME_LINES:]).lower()
    for refined in refinements:
        if any(frame.encode() in text for frame in refined.above):
            return refined
    return entry


def find_reason(lines: Sequence[bytes], index: int) -> bytes:
    """Return the line near `index` that says why, where the line itself does not; empty: none does."""
    headline = lines[index]
    if _ANNOUNCED.search(headline):
        return next((line for line in lines[index + 1 : index + 3] if line.strip()), b"")
    if _BARE_EXCEPTION.search(headline):
        above = (line for line in reversed(lines[max(0, index - _LINES_BEFORE) : index]) if _ASSERTED.search(line))
        return next(above, b"")
    if _STATED.search(headline) or not _ECHO.search(headline):
        return b""
    near = [*range(index - 1, max(-1, index - 1 - _LINES_BEFORE), -1), *range(index + 1, index + 1 + _LINES_AFTER)]
    near.sort(key=lambda place: abs(place - index))
    for place in near:
        if place < len(lines) and _STATED.search(lines[place]):
            return _PLACE.sub(b"", lines[place])
    return b""
