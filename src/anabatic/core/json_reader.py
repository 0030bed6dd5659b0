"""Read JSON of files and of other programs; all invalid input raises ValueError.

The reader of Python raises a RecursionError for deep nesting, or, if its limit is higher than that of later code,
returns a value that cannot be traversed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_DEPTH = 100
"""Maximum nesting of lists and objects; hand-written files have about ten levels."""
MAX_FILE_BYTES = 1 << 30
"""Maximum bytes of a JSON file."""

PairsHook = Callable[[list[tuple[str, Any]]], Any]


def loads(text: str | bytes, pairs_hook: PairsHook | None = None) -> Any:
    """Parse `text`.

    Args:
        pairs_hook: builds an object from its keys and values, as `object_pairs_hook` of json.

    Raises:
        ValueError: the text is not valid JSON or UTF-8, or is nested deeper than `MAX_DEPTH`.
    """
    value = loads_any_depth(text, pairs_hook)
    return require_shallow(value) if _may_be_deep(text) else value


def loads_any_depth(text: str | bytes, pairs_hook: PairsHook | None = None) -> Any:
    """Parse `text` without a limit of depth: for callers that check the depth as they traverse the value.

    Raises:
        ValueError: the text is not valid JSON or UTF-8, or is nested too deep for the reader of Python.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs_hook)
    except RecursionError as error:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        if "integer string conversion" not in str(error):  # invalid UTF-8
            raise
        raise ValueError(f"an integer of more than {sys.get_int_max_str_digits():,} digits") from error


def read_json_file(path: Path) -> Any:
    """Load a JSON file, with or without a byte order mark.

    Raises:
        OSError: the file cannot be opened.
        ValueError: as for `loads`, or the file is larger than `MAX_FILE_BYTES`.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path.stat().st_size:,} bytes, more than {MAX_FILE_BYTES:,}")
    return loads(path.read_text(encoding="utf-8-sig"))


def require_shallow(value: Any) -> Any:
    """Return `value` unchanged after a check of its depth.

    Raises:
        ValueError: its lists and objects are nested deeper than `MAX_DEPTH`.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                children.extend(item.values())
            elif isinstance(item, list):
                children.extend(item)
        if not children:
            return value
        level = children
    raise ValueError(f"nested more than {MAX_DEPTH} deep")


def _may_be_deep(text: str | bytes) -> bool:
    """Return whether the text has more than `MAX_DEPTH` opening brackets; counting is cheap compared with parsing."""
    if isinstance(text, bytes):
        return text.count(b"[") + text.count(b"{") > MAX_DEPTH
    return text.count("[") + text.count("{") > MAX_DEPTH
