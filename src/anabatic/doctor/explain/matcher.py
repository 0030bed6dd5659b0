"""Find known texts and codes in logs, fast enough for gigabytes: lines that differ in meaningless numbers are looked at
once.

Logs repeat themselves but for their numbers. So a block is first freed of its digits and addresses and split into
lines, and only lines that were not seen before are looked at: a text that stands in a line still stands there when both
have lost their digits. New lines are split into words, which repeat themselves too; each known text contains, within
one word, one of some seventy stems, so most lines are done with when all of their words are known not to contain any.
What may match after that is compared for good, digits included, once for all lines of a block that tell the same.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from anabatic.doctor.explain.missing_packages import find_missing_package, spell_out_import
from anabatic.doctor.knowledge_base import KnowledgeBase, KnowledgeEntry, make_exception_entry

STEMS = (
    b"exception", b"timeout", b"timed", b"times", b"memory", b"cannot", b"can't", b"invalid", b"mismatch", b"should",
    b"inconsistent", b"unable", b"killed", b"expected", b"signal", b"undefined", b"version", b"denied", b"oom",
    b"closed", b"terminate", b"address", b"process", b"dataloader", b"unsupported", b"occurred", b"must", b"finite",
    b"been", b"status", b"compile", b"received", b"removed", b"execution", b"driver", b"buffer", b"duplicate",
    b"module", b"variable", b"connect", b"nan", b"tensor", b"fail", b"error", b"not", b"file", b"device", b"code",
    b"ret",
)  # fmt: skip
"""In lower case. A text is filed under the first that one of its pieces contains, else under its own longest word."""
MAX_REMEMBERED_LINES = 50_000
"""Different lines without digits that are remembered, and four times as many words."""
MAX_REMEMBERED_BYTES = 1 << 25
"""Bytes of all of those lines, and of all of those words."""
MAX_REMEMBERED_LINE_BYTES = 1 << 10
"""Bytes of a line that is remembered: memory stays bounded."""
_DIGITS = b"0123456789"
_HEX_TAIL = re.compile(rb"\A[0-9a-f]+(?![0-9a-z_])")
"""Start of a text that may be the end of an address."""
_LETTER_CODE = re.compile(rb"(?<![0-9A-Za-z_])E(?:[A-Z]\d{4}|\d{5}|RR\d{5})(?![0-9A-Za-z_])")
_LETTER_CODE_STRIPPED = re.compile(rb"(?<![A-Za-z_])E(?:[A-Z]|RR|)(?![A-Za-z_])")
_GAP = rb"\s{0,8}"
"""Bounded, as all repetitions here that can meet: three unbounded ones took minutes over a line padded with blanks."""
_RETURNED_NUMBER = re.compile(
    rb"[a-z]?\]?%(gap)s(?:is(?: :)?|[:=\[(,])?%(gap)s[\[(]?%(gap)s(?:0x([0-9a-f]{5})|(\d{6}|-8\d{3}))(?![0-9a-z]|\.\d)"
    % {b"gap": _GAP}
)
"""Text after one of `_RETURN_WORDS`."""
_RESULT_NUMBER = re.compile(
    rb"(?:result|status|errno|failed)%(gap)s[=:]%(gap)s\[?(?!\d00000)(\d{6})(?![0-9a-z])" % {b"gap": _GAP}
)
"""Words that much else is called by too: only codes that an entry names count behind them."""
_RETURNED_NUMBER_STRIPPED = re.compile(
    rb"(?:code|\bret|\berror)[a-z]?\]?%(gap)s(?:is(?: :)?|[:=\[(,])?%(gap)s[\[(]?%(gap)s(?:x|-|\W|$)" % {b"gap": _GAP}
)
_RESULT_NUMBER_STRIPPED = re.compile(rb"(?:result|status|errno|failed)%(gap)s[=:]|s/it" % {b"gap": _GAP})
_RETURN_WORDS = (b"error", b"ret", b"code")
"""One of them stands before the number that a call returned."""
_RESULT_WORDS = (b"result", b"errno", b"status", b"failed", b"s/it")
"""So may these."""
_SLOW_PACE = re.compile(rb"(?<![\d.])(\d{2,6})(?:\.\d+)?s/it")
"""The pace of a progress bar (tqdm)."""
_RARE_NUMBER = re.compile(_RESULT_NUMBER.pattern + rb"|(?<![\d.])(?:[6-9]\d|\d{3,6})(?:\.\d+)?s/it")
SLOW_SECONDS = 60
"""Seconds of a step that are worth a note."""
_WORD_BYTES = frozenset(b"0123456789abcdefghijklmnopqrstuvwxyz_")
_HCCL_RESULT = re.compile(
    rb"(?:hccl function error|function error: hccl|hccl\w{1,80} fail).{0,400}?error(?: code is|:) ?(\d{1,2})(?!\d)"
    rb"|hcclret -> (\d{1,2})(?!\d)"
)
_HCCL_GROUP = re.compile(rb"hccl_?(?:comm_?init|get_?root_?info|create_?sub_?comm|comm_?create)|create_config:")
"""Calls that make a group: their number says which step of it failed, not what is wrong with a collective."""
_HCCL_MEMORY = ("hccl:3", "hccl:24")
"""Results that mean the same in both."""
_HCCL_MODULE_ERRNO = re.compile(rb"errno\[0x0*5000([0-9a-f]{3})\]")
"""Result in HCCL's own log: module 5, then the result."""
_LINE_PREFIX = (
    rb"(?:\x1b\[[\d;]*m|\([A-Za-z_][\w .=,:-]{0,80}\) ?|(?:ERROR|CRITICAL) [\d:. -]{0,24}\[?[\w.]{1,60}:\d{0,6}\] ?"
    rb"|\[[^\]]{0,24}\] ?|\d{0,5}: ?)*"
)
"""Prefix of a line: `[rank3]:`, the `3:` of `srun --label`, `(Worker pid=7)` of Ray, the logger of vLLM.

A line fits in one way at most, or thirty `[a]: ` in a row would be tried in 2^30 ways.
"""
_EXCEPTION_LINE = re.compile(_LINE_PREFIX + rb"([A-Za-z_][\w.]*(?:Error|Exception)|Exception)(?::|\s*$)")
"""The last line of a Python traceback."""
_TRACEBACK_LINE = re.compile(_LINE_PREFIX + rb"(?:  |Traceback )")
"""Text before it."""
_INFO_LINE = re.compile(rb"\s*\[(?:info|debug|event|trace)\]")
_ERROR_WORDS = re.compile(rb"error|fail|^\s*e[a-z0-9]+: ")


class TextPattern(NamedTuple):
    """A text of an entry, in lower case, split at its `*`."""

    entry: KnowledgeEntry
    fragments: tuple[bytes, ...]
    stripped_fragments: tuple[bytes, ...]
    """The pieces without digits."""
    num_chars: int
    """Characters of all pieces."""


class LineCandidate(NamedTuple):
    """Possible matches in a line, judged without its digits."""

    patterns: tuple[TextPattern, ...]
    has_code: bool
    """A code with letters."""
    has_number: bool
    ends_traceback: bool
    """The end of a traceback."""
    has_package: bool
    """A package that an entry names is missing."""
    is_rare: bool
    """Nothing but a number behind one of `_RESULT_WORDS`, which seldom is a code: all lines are searched for one at
    once."""
    needs_exact_match: bool
    """Some digits of it mean something that `LineGrouper` does not know."""


class EntryMatch(NamedTuple):
    """One finding in a line."""

    entry: KnowledgeEntry
    code: str
    num_chars: int
    """Characters that matched: the most special text of a line is meant."""
    offset: int
    """Byte of the line at which it begins."""
    reason: str = ""
    """Its meaning, where the neighboring lines tell less."""


@dataclass(frozen=True)
class MatchedLine:
    """Matches in a line of a block, and in equal lines."""

    index: int
    """Of the first of these lines."""
    matches: list[EntryMatch]
    count: int
    """Number of equal lines."""


@functools.lru_cache(maxsize=2)
def _compile_patterns(knowledge: KnowledgeBase) -> tuple[bool, dict[bytes, list[TextPattern]]]:
    """Return whether a text may stand within an address, whose letters count then; and the texts by their stems."""
    texts = [(entry, _split_fragments(text)) for entry in knowledge.entries for text in entry.texts]
    keeps_addresses = not all(any(map(_split_words_after_hex, pieces)) for _, pieces in texts)
    found: dict[bytes, list[TextPattern]] = {stem: [] for stem in _RETURN_WORDS + _RESULT_WORDS}
    for entry, pieces in texts:
        bare = tuple(
            _strip_digits(piece if keeps_addresses else _HEX_TAIL.sub(b"", piece), keeps_addresses) for piece in pieces
        )
        words = b" ".join(bare)
        stem = next((stem for stem in STEMS if stem in words), None) or max(words.split(), key=len)
        found.setdefault(stem, []).append(TextPattern(entry, pieces, bare, sum(map(len, pieces))))
    return keeps_addresses, found


def _strip_digits(text: bytes, keeps_addresses: bool) -> bytes:
    """Return a text without its digits and its addresses, the numbers of which are as little worth."""
    if not keeps_addresses and b"0x" in text:
        text = HEX_ADDRESS.sub(b"0x", text)
    return text.translate(None, _DIGITS)


class LogMatcher:
    """Compiled knowledge, and what it remembers of the lines that it saw."""

    def __init__(self, knowledge: KnowledgeBase) -> None:
        self.knowledge = knowledge
        self.keeps_addresses, self.patterns_by_stem = _compile_patterns(knowledge)
        self.harmless_lines: set[bytes] = set()
        self.harmless_words: set[bytes] = set()
        """Words without a stem."""
        self.word_stems: dict[bytes, tuple[bytes, ...]] = {}
        """Word -> the stems that it contains."""
        self.candidates: dict[bytes, LineCandidate] = {}
        """By the line without its digits and addresses."""
        self.line_grouper = LineGrouper()
        self.line_bytes = self.word_bytes = 0

    def find_matches(self, block: bytes) -> tuple[list[bytes], list[MatchedLine]]:
        """Return the lines of a block and what is known in them, in their order."""
        bare = self._strip_digits(block).split(b"\n")
        new = set(bare).difference(self.harmless_lines, self.candidates)
        if new:
            self._classify_lines(new)
        if self.candidates.keys().isdisjoint(bare):
            return [], []
        lines = block.split(b"\n")
        places: dict[bytes, list[int]] = {}
        for index, line in enumerate(bare):
            if line in self.candidates:
                places.setdefault(line, []).append(index)
        found = [one for line, where in places.items() for one in self._match_equal_lines(line, lines, where)]
        return lines, sorted(found, key=lambda one: one.index)

    def _strip_digits(self, text: bytes) -> bytes:
        return _strip_digits(text, self.keeps_addresses)

    def _match_equal_lines(self, bare: bytes, lines: list[bytes], where: list[int]) -> Iterator[MatchedLine]:
        """Yield what is known in lines that are equal but for their digits."""
        suspect = self.candidates[bare]
        if suspect.is_rare and not _RARE_NUMBER.search(b"\n".join([lines[index] for index in where]).lower()):
            return
        spans: list[tuple[int, int]] = []
        nothing = False
        if len(where) >= MIN_GROUPED_LINES and not suspect.needs_exact_match:
            spans = self.line_grouper.group_lines(bare, [lines[index] for index in where])
            heard = (
                [bool(self.match_line(lines[where[place]], suspect)) for place, _ in spans]
                if suspect.ends_traceback
                else []
            )
            nothing = bool(heard) and not any(heard)
            if not all(heard):
                spans = []  # the line before each decides
        for place, count in spans or [(place, 1) for place in range(len(where))]:
            index = where[place]
            hits = [] if nothing else self.match_line(lines[index], suspect)
            if not hits and suspect.ends_traceback and (not index or _TRACEBACK_LINE.match(lines[index - 1])):
                hits = _match_exception(lines[index])
            if hits:
                yield MatchedLine(index, hits, count)

    def match_line(self, line: bytes, suspect: LineCandidate) -> list[EntryMatch]:
        """Return the codes of a line and the most special text in it: the longest, of equals the first in the line."""
        low = line.lower()
        found: list[EntryMatch] = []
        if suspect.has_number:
            self._match_numbers(low, found)
        if suspect.has_code:
            self._match_letter_codes(line, low, found)
        found.sort(key=lambda hit: hit.offset)
        best: EntryMatch | None = None
        low = spell_out_import(low)
        for text in suspect.patterns:
            at = _find_in_order(low, text.fragments)
            if at >= 0 and (best is None or (text.num_chars, -at) > (best.num_chars, -best.offset)):
                best = EntryMatch(text.entry, "", text.num_chars, at)
        if suspect.has_package and (package := find_missing_package(low, self.knowledge)):
            best = EntryMatch(package[0], "", len(low), package[1])
        if best is not None and not _contains_entry(found, best.entry):
            found.append(best)
        return found

    def _classify_lines(self, new: set[bytes]) -> None:
        """File new lines under `harmless_lines` or `candidates`."""
        if (
            len(self.harmless_lines) + len(self.candidates) > MAX_REMEMBERED_LINES
            or self.line_bytes > MAX_REMEMBERED_BYTES
        ):
            self.harmless_lines.clear()
            self.candidates.clear()
            self.line_grouper.patterns.clear()
            self.line_bytes = 0
        if (
            len(self.harmless_words) + len(self.word_stems) > 4 * MAX_REMEMBERED_LINES
            or self.word_bytes > MAX_REMEMBERED_BYTES
        ):
            self.harmless_words.clear()
            self.word_stems.clear()
            self.word_bytes = 0
        self._classify_words(set(b"\n".join(new).lower().split()).difference(self.harmless_words, self.word_stems))
        for line in new:
            low = line.lower()
            words = low.split()
            suspect = None
            if (b"E" in line and _LETTER_CODE_STRIPPED.search(line)) or not self.word_stems.keys().isdisjoint(words):
                suspect = self._make_candidate(line, low, words)
            if suspect is not None:
                self.candidates[line] = suspect
                self.line_bytes += len(line)
            elif len(line) <= MAX_REMEMBERED_LINE_BYTES:
                self.harmless_lines.add(line)
                self.line_bytes += len(line)

    def _classify_words(self, words: set[bytes]) -> None:
        """File new words under `harmless_words` or `word_stems`."""
        joined = b" ".join(words)
        found: dict[bytes, list[bytes]] = {}
        for stem in self.patterns_by_stem:
            at = joined.find(stem)
            while at >= 0:
                start, end = joined.rfind(b" ", 0, at) + 1, joined.find(b" ", at)
                end = end if end >= 0 else len(joined)
                found.setdefault(joined[start:end], []).append(stem)
                at = joined.find(stem, end)
        self.word_stems.update((word, tuple(stems)) for word, stems in found.items())
        self.harmless_words.update(
            word for word in words if word not in found and len(word) <= MAX_REMEMBERED_LINE_BYTES
        )
        self.word_bytes += sum(map(len, words))

    def _make_candidate(self, line: bytes, low: bytes, words: list[bytes]) -> LineCandidate | None:
        """Return what may stand in a line without digits, or None."""
        if _INFO_LINE.match(low):
            return None
        stems = {stem for word in words for stem in self.word_stems.get(word, ())}
        low = spell_out_import(low)
        package = find_missing_package(low, self.knowledge) is not None
        filed = (
            text for stem in sorted(stems) for text in self.patterns_by_stem[stem]
        )  # a set's order differs by process
        texts = tuple(text for text in filed if _find_in_order(low, text.stripped_fragments) >= 0)
        number = not stems.isdisjoint(_RETURN_WORDS) and (
            _RETURNED_NUMBER_STRIPPED.search(low) is not None or _hccl_failed(low)
        )
        less = not stems.isdisjoint(_RESULT_WORDS) and _RESULT_NUMBER_STRIPPED.search(low) is not None
        code = _LETTER_CODE_STRIPPED.search(line) is not None
        raised = (b"error" in stems or b"exception" in stems) and _EXCEPTION_LINE.match(line) is not None
        exact = any(text.fragments != text.stripped_fragments for text in texts) or b"errno[" in low or b"s/it" in low
        found = bool(texts) or number or code or raised or package
        return LineCandidate(texts, code, number or less, raised, package, not found, exact) if found or less else None

    def _match_numbers(self, low: bytes, found: list[EntryMatch]) -> None:
        for word in _RETURN_WORDS:
            at = low.find(word)
            while at >= 0:
                end = at + len(word)
                match = _RETURNED_NUMBER.match(low, end)
                if match and (word == b"code" or not at or low[at - 1] not in _WORD_BYTES):
                    self._add_code(str(int(match[1], 16)) if match[1] else match[2].decode(), at, found)
                at = low.find(word, end)
        for told in _RESULT_NUMBER.finditer(low):
            if told[1].decode() in self.knowledge.by_code:
                self._add_code(told[1].decode(), told.start(), found)
        if b"hccl" in low:
            if result := _HCCL_RESULT.search(low):
                self._add_code(f"hccl:{(result[1] or result[2]).decode()}", result.start(), found)
            elif module := _HCCL_MODULE_ERRNO.search(low):
                self._add_code(f"hccl:{int(module[1], 16)}", module.start(), found)
            if _HCCL_GROUP.search(low):
                found[:] = [_as_detail(hit) if hit.code.startswith("hccl:") else hit for hit in found]
        slow = next((pace for pace in _SLOW_PACE.finditer(low) if int(pace[1]) >= SLOW_SECONDS), None)
        if slow is not None:
            self._add_code("slow-start", slow.start(), found)

    def _match_letter_codes(self, line: bytes, low: bytes, found: list[EntryMatch]) -> None:
        """Codes with letters. One that no entry names counts only where a line speaks of an error."""
        for match in _LETTER_CODE.finditer(line):
            code = match[0].decode()
            if code in self.knowledge.by_code or _ERROR_WORDS.search(low):
                self._add_code(code, match.start(), found)

    def _add_code(self, code: str, at: int, found: list[EntryMatch]) -> None:
        entry = self.knowledge.find_by_code(code)
        if entry is not None and not (found and _contains_entry(found, entry)):
            found.append(EntryMatch(entry, code, len(code), at))


def _split_fragments(text: str) -> tuple[bytes, ...]:
    return tuple(piece.encode() for piece in text.lower().split("*") if piece.strip())


def _split_words_after_hex(piece: bytes) -> list[bytes]:
    """Return the words of a piece of a text of which the first may be the end of an address."""
    return _HEX_TAIL.sub(b"", piece).translate(None, _DIGITS).split()


def _match_exception(line: bytes) -> list[EntryMatch]:
    """Return the exception that ends a traceback and that no entry knows."""
    match = _EXCEPTION_LINE.match(line)
    if match is None:
        return []
    path = match[1].decode("utf-8", "replace")
    name = path.rpartition(".")[2]
    return [EntryMatch(make_exception_entry(path), name, len(name), match.start(1))]


def _as_detail(hit: EntryMatch) -> EntryMatch:
    """Return the number of a call that makes a group as what stands behind the headline, unless it means memory."""
    return hit if hit.code in _HCCL_MEMORY else hit._replace(entry=replace(hit.entry, role="wrapper"))


def _hccl_failed(low: bytes) -> bool:
    """Tell whether a line speaks of HCCL and of an error, or of what was returned, behind it."""
    at = low.find(b"hccl")
    return at >= 0 and any(low.find(word, at + 4) >= 0 for word in (b"err", b"ret"))


def _contains_entry(found: list[EntryMatch], entry: KnowledgeEntry) -> bool:
    return any(hit.entry.id == entry.id for hit in found)


def _find_in_order(line: bytes, pieces: tuple[bytes, ...]) -> int:
    """Return where the first piece stands, or -1 unless all follow one another."""
    first = at = line.find(pieces[0])
    for piece in pieces[1:]:
        if at < 0:
            return -1
        at = line.find(piece, at)
    return first if at >= 0 else -1


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
    rb"(?:error|ret|code)[a-z]?\]?\s{0,8}(?:is(?: :)?|[:=\[(,])?\s{0,8}[\[(]?\s{0,8}-?$"  # what a call returned
    rb"|(?:result|status|errno|failed)\s{0,8}[=:]\s{0,8}\[?$|hcclret -> $"
    rb"|\[rank:? ?$|\[default$|rankid:$",
    re.IGNORECASE,
)
_CODE_LETTERS = re.compile(rb"E(?:[A-Z]|RR|)$")
_WITHIN_NUMBER = re.compile(rb"[A-Za-z.]*")
"""Between digits of one number in hexadecimal, or before its fraction."""
_WARNING_LINE = re.compile(rb"WARN|(?:^|[\]:\s])\[?W[ \]]")
"""A warning is recognized by the number of its digits: such lines are read one by one."""


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
