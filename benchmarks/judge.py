"""Count how the sandbox judges programs: right ones of many shapes, which must pass, and cheats, which must not.

    python benchmarks/judge.py            # the programs of judge_programs.jsonl beside this file
    python benchmarks/judge.py -v         # and names those that are not judged as they should be

A right program passes its tests in ordinary Python. A cheat is wrong; one that passes in ordinary Python by operators
of its own alone (`own`), such as an `__eq__` that says yes, or by a change of objects that it is given, may pass.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from anabatic.core import json_reader
from anabatic.sandbox.limits import ResourceLimits
from anabatic.sandbox.sandbox_runner import Sandbox

LIMITS = ResourceLimits(seconds=6.0, cpu_seconds=5, memory_mib=256, processes=8)
BRIEF = ResourceLimits(seconds=1.5, cpu_seconds=1, memory_mib=128, processes=8)


def main() -> int:
    """Judge all programs; return 1 if a cheat passes."""
    told: dict[str, Counter[str]] = {}
    used = 0.0
    rows = list(json_reader.read_json_lines(Path(__file__).with_name("judge_programs.jsonl")))
    with Sandbox(LIMITS) as box, Sandbox(BRIEF) as brief:
        for row in rows:
            done = (brief if row.get("bomb") else box).check_program(row["program"], row["tests"])
            used += done.cpu_seconds
            result = "passes" if done.passed else "unjudged" if not done.is_judged else "fails"
            told.setdefault(row["kind"], Counter())[result] += 1
            if "-v" in sys.argv and (result == "passes") == (row["kind"] != "right"):
                print(f"{row['kind']}, {row['name']}: {result}, {done.describe_end(LIMITS)}")
    for kind, counts in told.items():
        print(f"{kind}: {', '.join(f'{count} {result}' for result, count in counts.most_common())}")
    print(f"{1000 * used / len(rows):.1f} ms of CPU per program")
    return int(told["cheat"]["passes"] > 0)


if __name__ == "__main__":
    sys.exit(main())
