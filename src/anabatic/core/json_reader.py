"""JSON from files and from other programs: what cannot be read is a ValueError, whatever is wrong with it.

Python's own reader raises a RecursionError for deep nesting, or, where its limit is higher than that of the code behind
it, returns what nothing can walk through.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_DEPTH = 100
"""Lists and objects inside one another; what people write has ten."""
MAX_FILE_BYTES = 1 << 30
"""Bytes of a JSON file that is read whole."""

PairsHook = Callable[[list[tuple[str, Any]]], Any]


def loads(text: str | bytes, pairs: PairsHook | None = None) -> Any:
    """Return the value that `text` spells.

    Args:
        pairs: makes an object of its keys and values, as `object_pairs_hook` of json.

    Raises:
        ValueError: it spells none, is no UTF-8, or is nested more than `MAX_DEPTH` deep.
    """
    value = loads_any_depth(text, pairs)
    return require_shallow(value) if _may_be_deep(text) else value


def loads_any_depth(text: str | bytes, pairs: PairsHook | None = None) -> Any:
    """Return the value that `text` spells, however deep: for those who look at the depth as they walk through it.

    Raises:
        ValueError: it spells none, is no UTF-8, or is too deep for Python's reader.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        if "integer string conversion" not in str(error):  # no UTF-8
            raise
        raise ValueError(f"an integer of more than {sys.get_int_max_str_digits():,} digits") from error


def read_json_file(path: Path) -> Any:
    """Return the value of a JSON file, with or without a byte order mark.

    Raises:
        OSError: it cannot be opened.
        ValueError: as for `loads`, or it is larger than `MAX_FILE_BYTES`.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path.stat().st_size:,} bytes, more than {MAX_FILE_BYTES:,}")
    return loads(path.read_text(encoding="utf-8-sig"))


def require_shallow(value: Any) -> Any:
    """Return `value`.

    Raises:
        ValueError: its lists and objects are nested more than `MAX_DEPTH` deep.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner.extend(one.values())
            elif isinstance(one, list):
                inner.extend(one)
        if not inner:
            return value
        level = inner
    raise ValueError(f"nested more than {MAX_DEPTH} deep")


def _may_be_deep(text: str | bytes) -> bool:
    """True where so many brackets are open at all: to count them costs next to nothing beside reading."""
    if isinstance(text, bytes):
        return text.count(b"[") + text.count(b"{") > MAX_DEPTH
    return text.count("[") + text.count("{") > MAX_DEPTH
