"""Extract the answer of a reply and compare it: pure functions of texts, for evaluation and for rewards alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

_NUMBER_PATTERN = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
_GSM8K_MARK = "####"
_MAX_DIGITS = 1000
"""Of the longest number that is read: `1e999999999` would be written out as a text of a gigabyte."""
_CHOICE_PATTERN = re.compile(r"(?<![A-Za-z])\(?([A-Z])(?:[).:]|(?![A-Za-z']))")
_BOXED = "\\boxed{"


def extract_last_number(reply: str) -> str | None:
    """Return the last number said, as `normalize_number`; None: there is none."""
    found = [number for match in _NUMBER_PATTERN.finditer(reply) if (number := normalize_number(match[0])) is not None]
    return found[-1] if found else None


def extract_marked_number(reply: str) -> str | None:
    r"""Return the number behind the last `####` (GSM8K, arXiv 2110.14168), else in the last `\boxed{}`; None: there is
    none."""
    _, mark, after = reply.rpartition(_GSM8K_MARK)
    marked = after.strip().splitlines()[:1] if mark else extract_boxed(reply)
    match = _NUMBER_PATTERN.search(marked[0]) if marked else None
    return normalize_number(match[0]) if match else None


def extract_number(reply: str) -> str | None:
    """Return the marked number, else the last one said."""
    marked = extract_marked_number(reply)
    return marked if marked is not None else extract_last_number(reply)


def extract_boxed(reply: str) -> list[str]:
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


def normalize_number(text: str) -> str | None:
    """Return a number without commas, currency and zeros that say nothing: `$1,000.50` -> `1000.5`; None: no number."""
    try:
        value = Decimal(text.replace(",", "").replace("$", "").strip())
    except InvalidOperation:
        return None
    if not value.is_finite() or abs(value.adjusted()) > _MAX_DIGITS:
        return None
    digits = format(value, "f")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return "0" if digits in ("-0", "") else digits


def extract_choice_letter(reply: str) -> str | None:
    """Return the first capital letter that stands alone (`B`, `(B)`, `B.`), as choices are named; None: there is none.
    The word `I` and the article `A` before a small letter are none."""
    for match in _CHOICE_PATTERN.finditer(reply):
        after = reply[match.end() :]
        if match[0] in ("A", "I") and re.match(r"\s+[a-z']", after):
            continue
        return match[1]
    return None


def extract_first_line(reply: str) -> str | None:
    """Return the first line that is not blank; None: there is none."""
    return next((line.strip() for line in reply.splitlines() if line.strip()), None)


def extract_first_word(reply: str) -> str | None:
    """Return the first word; None: there is none."""
    words = reply.split(maxsplit=1)
    return words[0] if words else None


def strip_reply(reply: str) -> str | None:
    """Return the reply without blanks around it; None: it is empty."""
    return reply.strip() or None


def extract_code_block(reply: str) -> str | None:
    """Return the first fenced block of code, an open one to the end; without one the whole reply. None: it is empty."""
    fenced = re.search(r"```[A-Za-z0-9_+-]*[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", reply, re.DOTALL)
    found = fenced[1] if fenced else reply
    return found if found.strip() else None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "text": strip_reply,
    "first_line": extract_first_line,
    "first_word": extract_first_word,
    "number": extract_number,
    "final_number": extract_last_number,
    "letter": extract_choice_letter,
    "code": extract_code_block,
}
"""Name -> what it takes out of a reply; None: the reply says nothing of the kind."""


def extract_by_regex(reply: str, pattern: str) -> str | None:
    """Return the first group (or all) of the last match of a regular expression; None: it matches nowhere."""
    found = None
    for match in re.finditer(pattern, reply, re.DOTALL | re.MULTILINE):
        found = match[1] if match.re.groups else match[0]
    return None if found is None else found.strip()


def extract_answer(reply: str, method: str, pattern: str = "") -> str | None:
    """Return what a reply says: by a name of `EXTRACTORS`, or `regex` with a pattern. None: nothing of the kind."""
    return extract_by_regex(reply, pattern) if method == "regex" else EXTRACTORS[method](reply)


def normalize_text(text: str) -> str:
    """Small letters, one blank between words, no marks at the ends."""
    return " ".join(text.lower().split()).strip(".,;:!?\"' ")


def exact_match(given_answer: str, answer: str) -> bool:
    """The same text, as `normalize_text`."""
    return normalize_text(given_answer) == normalize_text(answer)


def numbers_match(given_answer: str, answer: str) -> bool:
    """The same number, however it is written."""
    value = normalize_number(given_answer)
    return value is not None and value == normalize_number(answer)


def contains_answer(given_answer: str, answer: str) -> bool:
    """The answer is part of what is said, as whole words."""
    return re.search(rf"(?<!\w){re.escape(normalize_text(answer))}(?!\w)", normalize_text(given_answer)) is not None


MATCHERS: dict[str, Callable[[str, str], bool]] = {
    "equal": exact_match,
    "number": numbers_match,
    "contains": contains_answer,
}
"""Name -> `(said, answer)` -> right."""


def is_correct(reply: str, answer: str, method: str, check: str, pattern: str = "") -> bool:
    """Tell whether a reply is right. What is taken out of the reply is taken out of the answer, too, where it holds it
    (GSM8K's answers are whole solutions); a reply that says nothing of the kind is wrong."""
    given_answer = extract_answer(reply, method, pattern)
    if given_answer is None:
        return False
    expected = extract_answer(answer, method, pattern)
    return MATCHERS[check](given_answer, answer if expected is None else expected)
