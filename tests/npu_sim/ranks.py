"""Starts the ranks of a test program (programs/ranks.py) and reads what they return."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from npu_sim.conftest import CACHE, PROGRAMS, Sim


def read(printed: str) -> dict[int, Any]:
    """Return what each rank returned, by rank."""
    lines = (json.loads(line) for line in printed.splitlines() if line.startswith('{"rank"'))
    return {line["rank"]: line["result"] for line in lines}


def run(sim: Sim, world: int, module: str, case: str, *words: str, **variables: str) -> dict[int, Any]:
    """Run a case on `world` devices."""
    command = ["python", str(PROGRAMS / "ranks.py"), str(world), module, case, *words]
    done = sim.command(*command, flags=["--npus", str(world)], **variables)
    results = read(done.stdout)
    assert results, done.stderr[-3000:]
    return results


def start(
    sim: Sim, space: str, world: int, first: int, total: int, *words: str, **variables: str
) -> subprocess.Popen[str]:
    """Start the ranks from `first` on, on a machine of their own in a network namespace."""
    command = ["ip", "netns", "exec", space, sys.executable, "-m", "anabatic", "sim", "--npus", str(world), "--"]
    command += ["python", str(PROGRAMS / "ranks.py"), str(world), *words]
    outer = {key: value for key, value in os.environ.items() if not key.startswith("ANABATIC_SIM_")}
    outer |= {"ANABATIC_CACHE": str(CACHE), "FIRST_RANK": str(first), "TOTAL_RANKS": str(total), **variables}
    return subprocess.Popen(
        command, env=outer, cwd=sim.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
