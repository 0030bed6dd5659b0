"""Generation on simulated NPUs: the CPU's tokens, and one wait of the host for each step."""

from __future__ import annotations

import json
import re
from pathlib import Path

from npu_sim.conftest import Sim

MOST = (72, 72, 110)
"""Operators of a step over two layers: one greedy row, four, four that draw among the likeliest."""
COUNTED = (10, 10, 10)
"""Steps of each."""


def test_the_cpus_tokens_with_one_wait_a_step(sim: Sim) -> None:
    told = sim.program("generate.py", "6", flags=["--report", "sim.json"]).splitlines()
    assert told[2] == "same"
    steps = int(told[0].split()[1]) + sum(COUNTED)
    waits = {}
    for row in json.loads((sim.folder / "sim.json").read_text())["syncs"]:
        file = Path(row["line"].rpartition(":")[0]).name
        waits[file] = waits.get(file, 0) + row["count"]
    assert waits.pop("sampling.py") <= steps
    ours = {"attention.py", "cache.py", "cached.py", "forward.py", "engine.py", "schedule.py", "segments.py"}
    assert not ours & set(waits), waits
    for line, most in zip(told[3:], MOST, strict=True):
        operators, waited = map(float, re.findall(r"([\d.]+) (?:operators|waits)", line))
        assert waited == 1, line
        assert operators <= most, line
