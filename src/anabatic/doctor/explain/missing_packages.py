"""Lines that say that a package or a part of one cannot be imported, in all the ways in which programs say it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from anabatic.doctor.knowledge_base import KnowledgeBase, KnowledgeEntry, normalize_package

_IMPORT_WORDS = (b"no module named ", b"cannot import name ")
_SPELLED_OUT = {b"no": b"modulenotfounderror: ", b"cannot": b"importerror: "}
_BARE_IMPORT = re.compile(
    rb"(?:\[[^\]]{0,24}\]:? ?|\([^)]{0,80}\) ?|(?:error|critical) [\d:. -]{0,24}\[[\w.]{1,60}:\d{0,6}\] ?){0,4}\s{0,80}"
    rb"(?:[\w.]{1,80}(?:error|exception): ?(?:[^'\"]{1,200}: ?)?)?"
    rb"(?=(no) module named ['\"][\w.]{1,200}['\"]|(cannot) import name ['\"]\w{1,200}['\"] from )"
)
"""The message of an ImportError without its name, which libraries that import lazily print on a line of its own."""
_NAMED = re.compile(
    rb"(?:^|[:\s>])no module named ['\"]([a-z_][\w.]{0,80})"
    rb"|metadata was found for (?:the ['\"])?([a-z][\w-]{0,80})"
    rb"|['\"]([a-z][\w-]{0,80})[^'\"]{0,40}['\"] distribution was not found"
    rb"|(?:distribution found for|satisfies the requirement) ([a-z][\w-]{0,80})"
)
_WORD = re.compile(rb"[a-z][\w-]{2,80}")
_MAX_WORDS = 60


def spell_out_import(low: bytes) -> bytes:
    """Return a line (in lower case) with the exception's name in front of a bare message of an import."""
    if not any(words in low for words in _IMPORT_WORDS):
        return low
    bare = _BARE_IMPORT.match(low)
    return _SPELLED_OUT[bare[1] or bare[2]] + low[bare.end() :] if bare else low


def find_missing_package(low: bytes, knowledge: KnowledgeBase) -> tuple[KnowledgeEntry, int] | None:
    """Return the entry of the package that a line (in lower case) misses, and where it stands; None: of no entry."""
    for name, at in _list_names(low):
        parts = normalize_package(name.decode("ascii", "replace")).split(".")
        for length in range(len(parts), 0, -1):
            entry = knowledge.find_by_package(".".join(parts[:length]))
            if entry is not None:
                return entry, at
    return None


def _list_names(low: bytes) -> Iterator[tuple[bytes, int]]:
    for found in _NAMED.finditer(low):
        yield next(group for group in found.groups() if group), found.start()
    if b"error:" in low and (b"install" in low or b" required" in low):
        for place, word in enumerate(_WORD.finditer(low)):
            if place > _MAX_WORDS:
                return
            yield word[0], word.start()
