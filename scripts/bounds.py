"""Print what pip may install in an environment that tests other versions than the pinned ones (setup_other.sh).

usage: python scripts/bounds.py oldest     the lower bound of everything that pyproject.toml asks for, tools left out
       python scripts/bounds.py newest     the pins, with the newest torch that has a torch_npu
       python scripts/bounds.py wheel      the pins; serve too
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

NEWEST = "2.14.0"
"""torch; of it and of no newer one there is a torch_npu."""
TOOLS = (
    "hatchling",
    "pytest",
    "hypothesis",
    "schemathesis",
    "openai",
    "httpx2",
    "selenium",
    "expecttest",
    "import-linter",
)
"""What tests work with: the newest will do."""
ROOT = Path(__file__).resolve().parent.parent
LISTS = ("dependencies", "trajectory", "serve", "nmea", "constrain", "dev")


def oldest(project: str) -> list[str]:
    """Return `name==bound` for every requirement; the first word is that of the base where two name a package."""
    found: dict[str, str] = {}
    for name in LISTS:
        block = re.search(rf"^{name} = \[(.*?)\](?:\n| #)", project, re.M | re.S)
        assert block, name
        for line in re.findall(r'"([^"]+)"', block.group(1)):
            bound = re.match(r"([A-Za-z0-9_-]+)>=([0-9.]+)", line)
            newer = "python_version >=" in line
            if bound and not newer and not bound[1].startswith(TOOLS):
                found.setdefault(bound[1], bound[2])
    return [f"{name}=={version}" for name, version in found.items()]


def newest(pins: str) -> list[str]:
    """Return the pins without what belongs to the pinned torch."""
    kept = [line for line in pins.splitlines() if not line.startswith(("torch==", "nvidia-", "cuda-", "triton", "#"))]
    return [f"torch=={NEWEST}", *kept]


def main(kind: str) -> None:
    """Print the pins of one environment."""
    if kind == "oldest":
        lines = oldest((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    else:
        pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
        lines = newest(pins) if kind == "newest" else pins.splitlines()
    print("\n".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
