"""What a reply says, and whether that is right: pure functions of texts, for evaluation and for rewards alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
_MARK = "####"
_DIGITS = 1000
"""Of the longest number that is read: `1e999999999` would be written out as a text of a gigabyte."""
_LETTER = re.compile(r"(?<![A-Za-z])\(?([A-Z])(?:[).:]|(?![A-Za-z']))")
_BOXED = "\\boxed{"


def final_number(reply: str) -> str | None:
    """Return the last number said, as `canonical`; None: there is none."""
    found = [number for match in _NUMBER.finditer(reply) if (number := canonical(match[0])) is not None]
    return found[-1] if found else None


def marked_number(reply: str) -> str | None:
    r"""Return the number behind the last `####` (GSM8K, arXiv 2110.14168), else in the last `\boxed{}`; None: there is
    none."""
    _, mark, after = reply.rpartition(_MARK)
    marked = after.strip().splitlines()[:1] if mark else boxed(reply)
    match = _NUMBER.search(marked[0]) if marked else None
    return canonical(match[0]) if match else None


def number(reply: str) -> str | None:
    """Return the marked number, else the last one said."""
    marked = marked_number(reply)
    return marked if marked is not None else final_number(reply)


def boxed(reply: str) -> list[str]:
    r"""Return what stands in the last `\boxed{...}`, braces inside it included; empty: there is none, or it is open."""
    start = reply.rfind(_BOXED)
    if start < 0:
        return []
    depth = 1
    for at in range(start + len(_BOXED), len(reply)):
        depth += (reply[at] == "{") - (reply[at] == "}")
        if not depth:
            return [reply[start + len(_BOXED) : at]]
    return []


def canonical(text: str) -> str | None:
    """Return a number without commas, currency and zeros that say nothing: `$1,000.50` -> `1000.5`; None: no number."""
    try:
        value = Decimal(text.replace(",", "").replace("$", "").strip())
    except InvalidOperation:
        return None
    if not value.is_finite() or abs(value.adjusted()) > _DIGITS:
        return None
    shown = format(value, "f")
    shown = shown.rstrip("0").rstrip(".") if "." in shown else shown
    return "0" if shown in ("-0", "") else shown


def letter(reply: str) -> str | None:
    """Return the first capital letter that stands alone (`B`, `(B)`, `B.`), as choices are named; None: there is none.
    The word `I` and the article `A` before a small letter are none."""
    for match in _LETTER.finditer(reply):
        after = reply[match.end() :]
        if match[0] in ("A", "I") and re.match(r"\s+[a-z']", after):
            continue
        return match[1]
    return None


def first_line(reply: str) -> str | None:
    """Return the first line that is not blank; None: there is none."""
    return next((line.strip() for line in reply.splitlines() if line.strip()), None)


def first_word(reply: str) -> str | None:
    """Return the first word; None: there is none."""
    words = reply.split(maxsplit=1)
    return words[0] if words else None


def whole(reply: str) -> str | None:
    """Return the reply without blanks around it; None: it is empty."""
    return reply.strip() or None


def code(reply: str) -> str | None:
    """Return the first fenced block of code, an open one to the end; without one the whole reply. None: it is empty."""
    fenced = re.search(r"```[A-Za-z0-9_+-]*[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", reply, re.DOTALL)
    found = fenced[1] if fenced else reply
    return found if found.strip() else None


EXTRACT: dict[str, Callable[[str], str | None]] = {
    "text": whole,
    "first_line": first_line,
    "first_word": first_word,
    "number": number,
    "final_number": final_number,
    "letter": letter,
    "code": code,
}
"""Name -> what it takes out of a reply; None: the reply says nothing of the kind."""


def by_pattern(reply: str, pattern: str) -> str | None:
    """Return the first group (or all) of the last match of a regular expression; None: it matches nowhere."""
    found = None
    for match in re.finditer(pattern, reply, re.DOTALL | re.MULTILINE):
        found = match[1] if match.re.groups else match[0]
    return None if found is None else found.strip()


def extract(reply: str, method: str, pattern: str = "") -> str | None:
    """Return what a reply says: by a name of `EXTRACT`, or `regex` with a pattern. None: nothing of the kind."""
    return by_pattern(reply, pattern) if method == "regex" else EXTRACT[method](reply)


def normalised(text: str) -> str:
    """Small letters, one blank between words, no marks at the ends."""
    return " ".join(text.lower().split()).strip(".,;:!?\"' ")


def equal(said: str, answer: str) -> bool:
    """The same text, as `normalised`."""
    return normalised(said) == normalised(answer)


def same_number(said: str, answer: str) -> bool:
    """The same number, however it is written."""
    value = canonical(said)
    return value is not None and value == canonical(answer)


def contains(said: str, answer: str) -> bool:
    """The answer is part of what is said, as whole words."""
    return re.search(rf"(?<!\w){re.escape(normalised(answer))}(?!\w)", normalised(said)) is not None


CHECK: dict[str, Callable[[str, str], bool]] = {"equal": equal, "number": same_number, "contains": contains}
"""Name -> `(said, answer)` -> right."""


def is_right(reply: str, answer: str, method: str, check: str, pattern: str = "") -> bool:
    """Tell whether a reply is right. What is taken out of the reply is taken out of the answer, too, where it holds it
    (GSM8K's answers are whole solutions); a reply that says nothing of the kind is wrong."""
    said = extract(reply, method, pattern)
    if said is None:
        return False
    wanted = extract(answer, method, pattern)
    return CHECK[check](said, answer if wanted is None else wanted)
