"""Starts the ranks of a test program (programs/ranks.py) and reads what they return."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from npu_sim.conftest import CACHE, PROGRAMS, Sim


def read(printed: str) -> dict[str, dict[int, Any]]:
    """Return what each rank returned, by case and rank."""
    results: dict[str, dict[int, Any]] = {}
    for line in printed.splitlines():
        if line.startswith('{"case"'):
            told = json.loads(line)
            results.setdefault(told["case"], {})[told["rank"]] = told["result"]
    return results


def run_all(sim: Sim, world: int, module: str, cases: str, *words: str, **variables: str) -> dict[str, dict[int, Any]]:
    """Run cases (names with commas between) on `world` devices of one machine."""
    command = ["python", str(PROGRAMS / "ranks.py"), str(world), module, cases, *words]
    done = sim.command(*command, flags=["--npus", str(world)], **variables)
    results = read(done.stdout)
    assert set(results) == set(cases.split(",")), done.stderr[-3000:]
    return results


def run(sim: Sim, world: int, module: str, case: str, *words: str, **variables: str) -> dict[int, Any]:
    """Run one case."""
    return run_all(sim, world, module, case, *words, **variables)[case]


def start(
    sim: Sim, space: str, world: int, first: int, total: int, *words: str, **variables: str
) -> subprocess.Popen[str]:
    """Start the ranks from `first` on, on their own machine in a network namespace."""
    command = ["ip", "netns", "exec", space, sys.executable, "-m", "anabatic", "sim", "--npus", str(world), "--"]
    command += ["python", str(PROGRAMS / "ranks.py"), str(world), *words]
    outer = {key: value for key, value in os.environ.items() if not key.startswith("ANABATIC_SIM_")}
    outer |= {"ANABATIC_CACHE": str(CACHE), "FIRST_RANK": str(first), "TOTAL_RANKS": str(total), **variables}
    return subprocess.Popen(
        command, env=outer, cwd=sim.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
