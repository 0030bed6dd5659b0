"""Print the part of CHANGELOG.md about one version: the text of its release page.

usage: python scripts/release_notes.py 0.2.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).resolve().parent.parent / "CHANGELOG.md"


def find_notes(text: str, version: str) -> str:
    """Return the lines below the heading of a version; empty if it has none."""
    match = re.search(rf"^## \[{re.escape(version)}\].*?\n(.*?)(?=^## \[|\Z)", text, re.M | re.S)
    return match[1].strip() if match else ""


def main() -> None:
    notes = find_notes(CHANGELOG.read_text(encoding="utf-8"), sys.argv[1]) if len(sys.argv) == 2 else ""
    if not notes:
        sys.exit(f"error: CHANGELOG.md has no part on {sys.argv[1:]}\nhint: rename [Unreleased] to the version")
    sys.stdout.write(notes + "\n")


if __name__ == "__main__":
    main()
