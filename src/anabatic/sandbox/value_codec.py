"""Python values as JSON, for two processes that do not trust each other: what arrives is data and nothing but data.

pickle and marshal would run or crash whatever a hostile end sends (docs.python.org/3/library/pickle.html, "Warning").
Both ends name their other objects by numbers; `encode_value` and `decode_value` leave those to a function of the
caller.
"""

from __future__ import annotations

import collections
import decimal
import fractions
from collections.abc import Callable
from typing import Any

MAX_EXACT_INT = 2**53
"""Below it an integer is itself; above it goes as hexadecimal digits: int() of decimal ones takes quadratic time."""
_BUILDERS: dict[str, Callable[..., Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque,
}  # fmt: skip
_CONTAINERS = ((list, "list"), (tuple, "tuple"), (frozenset, "frozenset"), (set, "set"), (collections.deque, "deque"))
_TEXT_CODECS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "float": (float, float.__repr__, float),
    "complex": (complex, complex.__repr__, complex),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "fraction": (fractions.Fraction, str, fractions.Fraction),
}


def encode_value(value: object, refer: Callable[[object], list[Any]]) -> Any:
    """Return a value as what JSON can say; `refer` names what is no data.

    A value of a class derived from one of Python's own goes as that one.

    Raises:
        RecursionError: it is nested too deeply, or holds itself.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value) if -MAX_EXACT_INT < value < MAX_EXACT_INT else ["int", hex(value)]
    for name, (kind, write, _) in _TEXT_CODECS.items():
        if isinstance(value, kind):
            return [name, write(value)]
    if isinstance(value, dict):
        return ["dict", [[encode_value(key, refer), encode_value(item, refer)] for key, item in value.items()]]
    for kind, name in _CONTAINERS:
        if isinstance(value, kind):
            return [name, [encode_value(item, refer) for item in value]]
    if isinstance(value, range):
        return ["range", [encode_value(number, refer) for number in (value.start, value.stop, value.step)]]
    return refer(value)


def decode_value(tree: Any, resolve: Callable[[str, Any], object]) -> Any:
    """Return the value; `resolve` gets the kind and the number of what is no data.

    Raises:
        ValueError, TypeError, RecursionError: it is nothing that `encode_value` writes.
    """
    if not isinstance(tree, list):
        if tree is None or isinstance(tree, (bool, str, int)):
            return tree
        raise ValueError(f"{type(tree).__name__} is no value")
    kind, content = tree
    if kind in _TEXT_CODECS:
        return _TEXT_CODECS[kind][2](content)
    if kind == "int":
        return int(content, 16)
    if kind == "dict":
        return {decode_value(key, resolve): decode_value(item, resolve) for key, item in content}
    if kind in _BUILDERS:
        return _BUILDERS[kind](decode_value(item, resolve) for item in content)
    if kind == "range":
        return range(*(decode_value(number, resolve) for number in content))
    return resolve(kind, content)
