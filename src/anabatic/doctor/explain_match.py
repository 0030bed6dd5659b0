"""Finds known texts and codes in blocks of bytes, fast enough for gigabytes.

A block is searched for some twenty short words (`bytes.find`, which is a `memchr` at heart); only lines that hold one
are compared with the texts that contain that word. Codes such as `EI0006` are found by one regular expression that
starts with a capital E.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from anabatic.doctor.knowledge import Entry, Knowledge

WORDS = (
    b"error", b"fail", b"timeout", b"timed out", b"out of memory", b"not support", b"not found", b"no such", b"cannot",
    b"can't", b"exception", b"invalid", b"not available", b"mismatch", b"should be", b"unable to", b"killed", b"not set",
)  # fmt: skip
"""In lower case. A text is filed under the first of them that it contains, else under its own longest piece."""
RETURNS = (b"retcode", b"ret is", b"ret=", b"ret:", b"ret[", b"ret =", b"drvret")
"""Before the number that a call returned, besides `error`."""
LONGEST = 1 << 14
"""Bytes of a line that are looked at around a word: progress bars write megabytes without a line break."""
_CODE = re.compile(rb"E(?:[A-Z]\d{4}|\d{5}|RR\d{5})(?![0-9A-Za-z_])")
_NUMBER = re.compile(
    rb"(?:code|\bret|result|\berror)[a-z]?\]?\s*(?:is|[:=\[(,])?\s*[\[(]?\s*"
    rb"(?:0x([0-9a-f]{5})|(\d{6}|-8\d{3}))(?![0-9a-z.])"
)
_HCCL = re.compile(rb"hccl function error.*?error code is (\d{1,2})(?!\d)")
_QUIET = re.compile(rb"\s*\[(?:info|debug|event|trace)\]")
_WORDY = frozenset(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")


class Hit(NamedTuple):
    """One finding in a block."""

    start: int
    """Byte in the block at which the line begins."""
    end: int
    code: str
    entry: Entry
    weight: int
    """Characters that matched: the most special text of a line is meant."""


class Matcher:
    """Compiled knowledge."""

    def __init__(self, knowledge: Knowledge) -> None:
        self.knowledge = knowledge
        self.filed: dict[bytes, list[tuple[tuple[bytes, ...], Entry]]] = {b"error": []}
        for entry in knowledge.entries:
            for text in entry.texts:
                pieces = tuple(piece.encode() for piece in text.lower().split("*") if piece.strip())
                longest = max(pieces, key=len)
                word = next((word for word in WORDS if word in longest), longest)
                self.filed.setdefault(word, []).append((pieces, entry))
        for word in RETURNS:
            self.filed.setdefault(word, [])

    def hits(self, block: bytes) -> list[Hit]:
        """Return what is known in `block`, by line: the codes, and of the texts the most special one."""
        low = block.lower()
        codes: dict[tuple[int, str], Hit] = {}
        texts: dict[int, Hit] = {}
        for word, filed in self.filed.items():
            position = low.find(word)
            while position >= 0:
                start, end = line_around(low, position)
                for hit in self._in_line(low, start, end, word, filed):
                    if hit.code:
                        codes.setdefault((start, hit.entry.id), hit)
                    elif start not in texts or texts[start].weight < hit.weight:
                        texts[start] = hit
                position = low.find(word, end)
        for hit in self._codes(block):
            codes.setdefault((hit.start, hit.entry.id), hit)
        alone = [hit for hit in texts.values() if (hit.start, hit.entry.id) not in codes]
        return sorted([*codes.values(), *alone], key=lambda hit: (hit.start, not hit.code))

    def _in_line(
        self, low: bytes, start: int, end: int, word: bytes, filed: list[tuple[tuple[bytes, ...], Entry]]
    ) -> Iterator[Hit]:
        line = low[start:end]
        matching = [(entry, sum(map(len, pieces))) for pieces, entry in filed if _in_order(line, pieces)]
        numbers = list(self._numbers(line)) if word == b"error" or word in RETURNS else []
        if (matching or numbers) and not _QUIET.match(line):
            yield from (Hit(start, end, "", entry, weight) for entry, weight in matching)
            yield from (Hit(start, end, code, entry, len(code)) for code, entry in numbers)

    def _numbers(self, line: bytes) -> Iterator[tuple[str, Entry]]:
        for found in _NUMBER.finditer(line):
            code = str(int(found[1], 16)) if found[1] else found[2].decode()
            if entry := self.knowledge.of_code(code):
                yield code, entry
        if found := _HCCL.search(line):
            code = f"hccl:{found[1].decode()}"
            if entry := self.knowledge.of_code(code):
                yield code, entry

    def _codes(self, block: bytes) -> Iterator[Hit]:
        for found in _CODE.finditer(block):
            at = found.start()
            if at and block[at - 1] in _WORDY:
                continue
            code = found[0].decode()
            entry = self.knowledge.of_code(code)
            start, end = line_around(block, at)
            if entry is None or _QUIET.match(block[start:end].lower()):
                continue
            if code in self.knowledge.by_code or _spoken(block[start:end]):
                yield Hit(start, end, code, entry, len(code))


def line_around(block: bytes, position: int) -> tuple[int, int]:
    """Return the borders of the line around `position`, at most `LONGEST` bytes to each side."""
    start = block.rfind(b"\n", max(0, position - LONGEST), position) + 1
    end = block.find(b"\n", position, position + LONGEST)
    return start or max(0, position - LONGEST), end if end >= 0 else min(len(block), position + LONGEST)


def _in_order(line: bytes, pieces: tuple[bytes, ...]) -> bool:
    at = 0
    for piece in pieces:
        at = line.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True


def _spoken(line: bytes) -> bool:
    """A code that no entry names counts only where a line speaks of an error: `E12345` may be any name."""
    low = line.lower()
    return b"error" in low or b"fail" in low or re.match(rb"\s*E[A-Z0-9]+: ", line) is not None
