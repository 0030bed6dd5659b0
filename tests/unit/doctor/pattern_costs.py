"""Whether a regular expression can read one text in several ways: its time then grows with a power of the text."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

_CHARS = {chr(code) for code in range(9, 127)}
_CATEGORIES = {"SPACE": r"\s", "NOT_SPACE": r"\S", "DIGIT": r"\d", "NOT_DIGIT": r"\D", "WORD": r"\w", "NOT_WORD": r"\W"}
_REPEATS, _EMPTY = ("MAX_REPEAT", "MIN_REPEAT"), ("ASSERT", "ASSERT_NOT", "AT", "GROUPREF")
_FEW = 3
"""Repetitions that cost nothing, whatever they repeat."""


def _of_class(items: Iterable[Any]) -> set[str]:
    found, negated = set(), False
    for operator, argument in items:
        kind = str(operator)
        if kind == "NEGATE":
            negated = True
        elif kind == "LITERAL":
            found.add(chr(argument))
        elif kind == "RANGE":
            found |= {char for char in _CHARS if argument[0] <= ord(char) <= argument[1]}
        else:
            pattern = re.compile(_CATEGORIES[str(argument).removeprefix("CATEGORY_")])
            found |= {char for char in _CHARS if pattern.match(char)}
    return _CHARS - found if negated else found


def _of_one(operator: Any, argument: Any) -> tuple[set[str], bool]:
    """Return the characters that a node can begin with, and whether it can be empty."""
    kind = str(operator)
    if kind in _EMPTY:
        return set(), True
    if kind in _REPEATS:
        begin, empty = _begin(argument[2])
        return begin, empty or not argument[0]
    if kind == "SUBPATTERN":
        return _begin(argument[-1])
    if kind == "BRANCH":
        both = [_begin(branch) for branch in argument[1]]
        return set().union(*(begin for begin, _ in both)), any(empty for _, empty in both)
    return {"LITERAL": lambda: {chr(argument)}, "NOT_LITERAL": lambda: _CHARS - {chr(argument)},
            "ANY": lambda: _CHARS - {"\n"}, "IN": lambda: _of_class(argument)}[kind](), False  # fmt: skip


def _begin(tree: Iterable[Any]) -> tuple[set[str], bool]:
    found: set[str] = set()
    for operator, argument in tree:
        begin, empty = _of_one(operator, argument)
        found |= begin
        if not empty:
            return found, False
    return found, True


def _bodies(repeated: Iterable[Any]) -> list[list[Any]]:
    """Return the alternatives of what is repeated."""
    body = list(repeated)
    while len(body) == 1 and str(body[0][0]) == "SUBPATTERN":
        body = list(body[0][1][-1])
    return [list(one) for one in body[0][1][1]] if len(body) == 1 and str(body[0][0]) == "BRANCH" else [body]


def _judge(most: int, repeated: Iterable[Any]) -> Iterator[str]:
    alternatives = _bodies(repeated)
    begins = [_begin(one)[0] for one in alternatives]
    for place, begin in enumerate(begins):
        if shared := begin & set().union(*begins[:place]):
            yield f"alternatives of a repetition up to {most} share {''.join(sorted(shared)[:9])!r}"
    for alternative in alternatives:
        solid = [node for node in alternative if str(node[0]) not in _EMPTY]
        if not solid or str(solid[-1][0]) not in _REPEATS:
            continue
        fewest, longest, inner = solid[-1][1]
        if fewest != longest and (shared := _begin(inner)[0] & set().union(*begins)):
            yield f"a repetition up to {most} ends in another one that takes {''.join(sorted(shared)[:9])!r} too"


def _walk(tree: Iterable[Any]) -> Iterator[str]:
    for operator, argument in tree:
        kind = str(operator)
        if kind in _REPEATS:
            if argument[1] > _FEW:
                yield from _judge(argument[1], argument[2])
            yield from _walk(argument[2])
        elif kind == "SUBPATTERN":
            yield from _walk(argument[-1])
        elif kind == "BRANCH":
            for branch in argument[1]:
                yield from _walk(branch)
        elif kind in ("ASSERT", "ASSERT_NOT"):
            yield from _walk(argument[1])


def find_ambiguous(pattern: str) -> list[str]:
    """Return the repetitions of a pattern that can take one text in several ways."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # re.sre_parse is deprecated, and re._parser new in 3.11
        parser: Any = sys.modules["re._parser" if sys.version_info >= (3, 11) else "sre_parse"]
        return list(_walk(parser.parse(pattern)))
