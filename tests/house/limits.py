"""The limits of the house, read from limits.toml."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest requires it on Python 3.10

ROWS: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("limits.toml").read_text(encoding="utf-8"))["limit"]
LIMITS: dict[str, int] = {row["name"]: row["value"] for row in ROWS}
