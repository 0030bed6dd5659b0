"""Sums that scripts leave to the shell: `$((100 * 524288))`, `$(expr 16 / $nproc)`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence

_EXPRESSION = re.compile(r"\$\(\((.*)\)\)|\$\(\s*expr\s(.*)\)", re.S)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
}


def evaluate_sum(text: str, known: Mapping[str, Sequence[str]]) -> str:
    """Return the result of a sum of two whole numbers; other text as it is.

    Args:
        text: `$((A * B))` or `$(expr A / B)`, of numbers and variables.
        known: variables that the script has set.
    """
    match = _EXPRESSION.fullmatch(text)
    if match is None:
        return text
    inner = _VARIABLE.sub(r"\1", match[1] or match[2] or "").replace("\\", "")
    found = re.findall(r"\w+|[-+*/%]", inner)
    if len(found) != 3 or "".join(found) != "".join(inner.split()) or found[1] not in _OPERATORS:
        return text
    left, right = (known.get(word, [word])[0] for word in found[::2])
    if not all(re.fullmatch(r"\d{1,18}", one) for one in (left, right)) or (found[1] in "/%" and int(right) == 0):
        return text
    return str(_OPERATORS[found[1]](int(left), int(right)))
