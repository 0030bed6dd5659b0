"""Print the answers of a result file of `swift infer` as numbers, so that two of them can be compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Print one number per character."""
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        for letter in json.loads(line)["response"]:
            print(f"character {ord(letter)}")


if __name__ == "__main__":
    main()
