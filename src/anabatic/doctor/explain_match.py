"""Finds known texts and codes in logs, fast enough for gigabytes.

Logs repeat themselves but for their numbers. So a block is first freed of its digits and addresses and split into
lines, and only lines that were not seen before are looked at: a text that stands in a line still stands there when both
have lost their digits. New lines are split into words, which repeat themselves too; each known text contains, within
one word, one of some seventy stems, so most lines are done with when all of their words are known not to contain any.
What may match after that is compared for good, digits included, once for all lines of a block that tell the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from anabatic.doctor import explain_alike
from anabatic.doctor.knowledge import Entry, Knowledge, exception

STEMS = (
    b"exception", b"timeout", b"timed", b"times", b"memory", b"cannot", b"can't", b"invalid", b"mismatch", b"should",
    b"inconsistent", b"unable", b"killed", b"expected", b"signal", b"undefined", b"version", b"denied", b"oom",
    b"closed", b"terminate", b"address", b"process", b"dataloader", b"unsupported", b"occurred", b"must", b"finite",
    b"been", b"status", b"compile", b"received", b"removed", b"execution", b"driver", b"buffer", b"duplicate",
    b"module", b"variable", b"connect", b"nan", b"tensor", b"fail", b"error", b"not", b"file", b"device", b"code",
    b"ret",
)  # fmt: skip
"""In lower case. A text is filed under the first that one of its pieces contains, else under its own longest word."""
MOST_SEEN = 50_000
"""Different lines without digits that are remembered, and four times as many words."""
MOST_BYTES = 1 << 25
"""Bytes of all of those lines, and of all of those words."""
LONGEST_SEEN = 1 << 10
"""Bytes of a line that is remembered: memory stays bounded."""
_DIGITS = b"0123456789"
_HEXADECIMAL = re.compile(rb"\A[0-9a-f]+(?![0-9a-z_])")
"""Start of a text that may be the end of an address."""
_CODE = re.compile(rb"(?<![0-9A-Za-z_])E(?:[A-Z]\d{4}|\d{5}|RR\d{5})(?![0-9A-Za-z_])")
_CODE_BARE = re.compile(rb"(?<![A-Za-z_])E(?:[A-Z]|RR|)(?![A-Za-z_])")
_GAP = rb"\s{0,8}"
"""Bounded, as all repetitions here that can meet: three unbounded ones took minutes over a line padded with blanks."""
_NUMBER = re.compile(
    rb"[a-z]?\]?%(gap)s(?:is|[:=\[(,])?%(gap)s[\[(]?%(gap)s(?:0x([0-9a-f]{5})|(\d{6}|-8\d{3}))(?![0-9a-z]|\.\d)"
    % {b"gap": _GAP}
)
"""What follows one of `_RETURNS`."""
_RESULT = re.compile(rb"(?:result|status|errno)%(gap)s[=:]%(gap)s\[?(?!\d00000)(\d{6})(?![0-9a-z])" % {b"gap": _GAP})
"""Words that much else is called by too: only codes that an entry names count behind them."""
_NUMBER_BARE = re.compile(
    rb"(?:code|\bret|\berror)[a-z]?\]?%(gap)s(?:is|[:=\[(,])?%(gap)s[\[(]?%(gap)s(?:x|-|\W|$)" % {b"gap": _GAP}
)
_LESS_BARE = re.compile(rb"(?:result|status|errno)%(gap)s[=:]|s/it" % {b"gap": _GAP})
_RETURNS = (b"error", b"ret", b"code")
"""One of them stands before the number that a call returned."""
_LESS = (b"result", b"errno", b"status", b"s/it")
"""So may these."""
_SLOW = re.compile(rb"(?<![\d.])(\d{2,6})(?:\.\d+)?s/it")
"""The pace of a progress bar (tqdm)."""
_RARE = re.compile(_RESULT.pattern + rb"|(?<![\d.])(?:[6-9]\d|\d{3,6})(?:\.\d+)?s/it")
SLOW_SECONDS = 60
"""Seconds of a step that are worth a note."""
_WORDY = frozenset(b"0123456789abcdefghijklmnopqrstuvwxyz_")
_HCCL = re.compile(
    rb"(?:hccl function error|function error: hccl|hccl\w{1,80} fail).{0,400}?error(?: code is|:) ?(\d{1,2})(?!\d)"
    rb"|hcclret -> (\d{1,2})(?!\d)"
)
_HCCL_MODULE = re.compile(rb"errno\[0x0*5000([0-9a-f]{3})\]")
"""How HCCL's own log writes its result: module 5, then the result."""
_BEFORE = (
    rb"(?:\x1b\[[\d;]*m|\([A-Za-z_][\w .=,:-]{0,80}\) ?|(?:ERROR|CRITICAL) [\d:. -]{0,24}\[?[\w.]{1,60}:\d{0,6}\] ?"
    rb"|\[[^\]]{0,24}\] ?|\d{0,5}: ?)*"
)
"""What stands before a line: `[rank3]:`, the `3:` of `srun --label`, `(Worker pid=7)` of Ray, the logger of vLLM.

A line fits in one way at most, or thirty `[a]: ` in a row would be tried in 2^30 ways.
"""
_RAISED = re.compile(_BEFORE + rb"([A-Za-z_][\w.]*(?:Error|Exception)|Exception)(?::|\s*$)")
"""The last line of a Python traceback."""
_FRAME = re.compile(_BEFORE + rb"(?:  |Traceback )")
"""What stands before it."""
_QUIET = re.compile(rb"\s*\[(?:info|debug|event|trace)\]")
_SPOKEN = re.compile(rb"error|fail|^\s*e[a-z0-9]+: ")


class Text(NamedTuple):
    """A text of an entry, in lower case, split at its `*`."""

    entry: Entry
    pieces: tuple[bytes, ...]
    bare: tuple[bytes, ...]
    """The pieces without digits."""
    weight: int
    """Characters of all pieces."""


class Suspect(NamedTuple):
    """What may stand in a line, judged without its digits."""

    texts: tuple[Text, ...]
    code: bool
    """A code with letters."""
    number: bool
    raised: bool
    """The end of a traceback."""
    rare: bool
    """Nothing but a number behind one of `_LESS`, which seldom is a code: all lines are searched for one at once."""
    exact: bool
    """Some digits of it mean something that `explain_alike` does not know."""


class Hit(NamedTuple):
    """One finding in a line."""

    entry: Entry
    code: str
    weight: int
    """Characters that matched: the most special text of a line is meant."""
    at: int
    """Byte of the line at which it begins."""


@dataclass(frozen=True)
class Found:
    """What is known in a line of a block, and in others that say the same."""

    index: int
    """Of the first of these lines."""
    hits: list[Hit]
    count: int
    """How many they are."""


class Matcher:
    """Compiled knowledge, and what it remembers of the lines that it saw."""

    def __init__(self, knowledge: Knowledge) -> None:
        self.knowledge = knowledge
        texts = [(entry, _pieces(text)) for entry in knowledge.entries for text in entry.texts]
        self.addresses = not all(any(map(_words_of_end, pieces)) for _, pieces in texts)
        """A text may stand within an address: their letters count."""
        self.filed: dict[bytes, list[Text]] = {stem: [] for stem in _RETURNS + _LESS}
        for entry, pieces in texts:
            bare = tuple(self._bare(piece if self.addresses else _HEXADECIMAL.sub(b"", piece)) for piece in pieces)
            words = [word for piece in bare for word in piece.split()]
            stem = next((stem for stem in STEMS for word in words if stem in word), max(words, key=len))
            self.filed.setdefault(stem, []).append(Text(entry, pieces, bare, sum(map(len, pieces))))
        self.seen: set[bytes] = set()
        self.harmless: set[bytes] = set()
        """Words without a stem."""
        self.stems: dict[bytes, tuple[bytes, ...]] = {}
        """Word -> the stems that it contains."""
        self.suspects: dict[bytes, Suspect] = {}
        """By the line without its digits and addresses."""
        self.alike = explain_alike.Alike()
        self.line_bytes = self.word_bytes = 0

    def hits(self, block: bytes) -> tuple[list[bytes], list[Found]]:
        """Return the lines of a block and what is known in them, in their order."""
        bare = self._bare(block).split(b"\n")
        new = set(bare).difference(self.seen, self.suspects)
        if new:
            self._look(new)
        if self.suspects.keys().isdisjoint(bare):
            return [], []
        lines = block.split(b"\n")
        places: dict[bytes, list[int]] = {}
        for index, line in enumerate(bare):
            if line in self.suspects:
                places.setdefault(line, []).append(index)
        found = [one for line, where in places.items() for one in self._known(line, lines, where)]
        return lines, sorted(found, key=lambda one: one.index)

    def _bare(self, text: bytes) -> bytes:
        """Return a text without its digits and its addresses, the numbers of which are as little worth."""
        if not self.addresses and b"0x" in text:
            text = explain_alike.ADDRESS.sub(b"0x", text)
        return text.translate(None, _DIGITS)

    def _known(self, bare: bytes, lines: list[bytes], where: list[int]) -> Iterator[Found]:
        """Yield what is known in lines that are equal but for their digits."""
        suspect = self.suspects[bare]
        if suspect.rare and not _RARE.search(b"\n".join([lines[index] for index in where]).lower()):
            return
        told: list[tuple[int, int]] = []
        nothing = False
        if len(where) >= explain_alike.FEWEST and not suspect.exact:
            told = self.alike.groups(bare, [lines[index] for index in where])
            heard = [bool(self.in_line(lines[where[place]], suspect)) for place, _ in told] if suspect.raised else []
            nothing = bool(heard) and not any(heard)
            if not all(heard):
                told = []  # the line before each decides
        for place, count in told or [(place, 1) for place in range(len(where))]:
            index = where[place]
            hits = [] if nothing else self.in_line(lines[index], suspect)
            if not hits and suspect.raised and (not index or _FRAME.match(lines[index - 1])):
                hits = _raised(lines[index])
            if hits:
                yield Found(index, hits, count)

    def in_line(self, line: bytes, suspect: Suspect) -> list[Hit]:
        """Return the codes of a line and the most special text in it: the longest, of equals the first in the line."""
        low = line.lower()
        found: list[Hit] = []
        if suspect.number:
            self._numbers(low, found)
        if suspect.code:
            self._codes(line, low, found)
        found.sort(key=lambda hit: hit.at)
        best: Hit | None = None
        for text in suspect.texts:
            at = _in_order(low, text.pieces)
            if at >= 0 and (best is None or (text.weight, -at) > (best.weight, -best.at)):
                best = Hit(text.entry, "", text.weight, at)
        if best is not None and not _among(found, best.entry):
            found.append(best)
        return found

    def _look(self, new: set[bytes]) -> None:
        """File new lines under `seen` or `suspects`."""
        if len(self.seen) + len(self.suspects) > MOST_SEEN or self.line_bytes > MOST_BYTES:
            self.seen.clear()
            self.suspects.clear()
            self.alike.patterns.clear()
            self.line_bytes = 0
        if len(self.harmless) + len(self.stems) > 4 * MOST_SEEN or self.word_bytes > MOST_BYTES:
            self.harmless.clear()
            self.stems.clear()
            self.word_bytes = 0
        self._learn(set(b"\n".join(new).lower().split()).difference(self.harmless, self.stems))
        for line in new:
            low = line.lower()
            words = low.split()
            suspect = None
            if (b"E" in line and _CODE_BARE.search(line)) or not self.stems.keys().isdisjoint(words):
                suspect = self._suspect(line, low, words)
            if suspect is not None:
                self.suspects[line] = suspect
                self.line_bytes += len(line)
            elif len(line) <= LONGEST_SEEN:
                self.seen.add(line)
                self.line_bytes += len(line)

    def _learn(self, words: set[bytes]) -> None:
        """File new words under `harmless` or `stems`."""
        joined = b" ".join(words)
        found: dict[bytes, list[bytes]] = {}
        for stem in self.filed:
            at = joined.find(stem)
            while at >= 0:
                start, end = joined.rfind(b" ", 0, at) + 1, joined.find(b" ", at)
                end = end if end >= 0 else len(joined)
                found.setdefault(joined[start:end], []).append(stem)
                at = joined.find(stem, end)
        self.stems.update((word, tuple(stems)) for word, stems in found.items())
        self.harmless.update(word for word in words if word not in found and len(word) <= LONGEST_SEEN)
        self.word_bytes += sum(map(len, words))

    def _suspect(self, line: bytes, low: bytes, words: list[bytes]) -> Suspect | None:
        """Return what may stand in a line without digits, or None."""
        if _QUIET.match(low):
            return None
        stems = {stem for word in words for stem in self.stems.get(word, ())}
        filed = (text for stem in sorted(stems) for text in self.filed[stem])  # a set's order differs by process
        texts = tuple(text for text in filed if _in_order(low, text.bare) >= 0)
        number = not stems.isdisjoint(_RETURNS) and (_NUMBER_BARE.search(low) is not None or _hccl_failed(low))
        less = not stems.isdisjoint(_LESS) and _LESS_BARE.search(low) is not None
        code = _CODE_BARE.search(line) is not None
        raised = (b"error" in stems or b"exception" in stems) and _RAISED.match(line) is not None
        exact = any(text.pieces != text.bare for text in texts) or b"errno[" in low or b"s/it" in low
        rare = less and not (texts or number or code or raised)
        number = number or less
        return Suspect(texts, code, number, raised, rare, exact) if texts or number or code or raised else None

    def _numbers(self, low: bytes, found: list[Hit]) -> None:
        for word in _RETURNS:
            at = low.find(word)
            while at >= 0:
                end = at + len(word)
                match = _NUMBER.match(low, end)
                if match and (word == b"code" or not at or low[at - 1] not in _WORDY):
                    self._add(str(int(match[1], 16)) if match[1] else match[2].decode(), at, found)
                at = low.find(word, end)
        for told in _RESULT.finditer(low):
            if told[1].decode() in self.knowledge.by_code:
                self._add(told[1].decode(), told.start(), found)
        if b"hccl" in low:
            if result := _HCCL.search(low):
                self._add(f"hccl:{(result[1] or result[2]).decode()}", result.start(), found)
            elif module := _HCCL_MODULE.search(low):
                self._add(f"hccl:{int(module[1], 16)}", module.start(), found)
        slow = next((pace for pace in _SLOW.finditer(low) if int(pace[1]) >= SLOW_SECONDS), None)
        if slow is not None:
            self._add("slow-start", slow.start(), found)

    def _codes(self, line: bytes, low: bytes, found: list[Hit]) -> None:
        """Codes with letters. One that no entry names counts only where a line speaks of an error."""
        for match in _CODE.finditer(line):
            code = match[0].decode()
            if code in self.knowledge.by_code or _SPOKEN.search(low):
                self._add(code, match.start(), found)

    def _add(self, code: str, at: int, found: list[Hit]) -> None:
        entry = self.knowledge.of_code(code)
        if entry is not None and not (found and _among(found, entry)):
            found.append(Hit(entry, code, len(code), at))


def _pieces(text: str) -> tuple[bytes, ...]:
    return tuple(piece.encode() for piece in text.lower().split("*") if piece.strip())


def _words_of_end(piece: bytes) -> list[bytes]:
    """Return the words of a piece of a text of which the first may be the end of an address."""
    return _HEXADECIMAL.sub(b"", piece).translate(None, _DIGITS).split()


def _raised(line: bytes) -> list[Hit]:
    """Return the exception that ends a traceback and that no entry knows."""
    match = _RAISED.match(line)
    if match is None:
        return []
    path = match[1].decode("utf-8", "replace")
    name = path.rpartition(".")[2]
    return [Hit(exception(path), name, len(name), match.start(1))]


def _hccl_failed(low: bytes) -> bool:
    """Tell whether a line speaks of HCCL and of an error, or of what was returned, behind it."""
    at = low.find(b"hccl")
    return at >= 0 and any(low.find(word, at + 4) >= 0 for word in (b"err", b"ret"))


def _among(found: list[Hit], entry: Entry) -> bool:
    return any(hit.entry.id == entry.id for hit in found)


def _in_order(line: bytes, pieces: tuple[bytes, ...]) -> int:
    """Return where the first piece stands, or -1 unless all follow one another."""
    first = at = line.find(pieces[0])
    for piece in pieces[1:]:
        if at < 0:
            return -1
        at = line.find(piece, at)
    return first if at >= 0 else -1
