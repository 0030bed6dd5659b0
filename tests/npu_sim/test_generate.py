"""Generation on simulated NPUs: the CPU's tokens, and one wait of the host for each step."""

from __future__ import annotations

import json
import re
from pathlib import Path

from npu_sim.conftest import Sim

MOST = (3, 3, 45)
"""Launches of a step over two layers, its graph and the copies to and from the device: one greedy row, four; four that
draw among the likeliest, which is not in the graph."""
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
    assert waits["sampling.py"] + waits["decode_graph.py"] >= steps  # each step, whichever file reads its tokens
    ours = {"attention.py", "kv_cache.py", "cached_attention.py", "forward.py", "engine.py", "scheduler.py"}
    assert not ours & set(waits), waits
    for line, most in zip(told[3:6], MOST, strict=True):
        operators, waited = map(float, re.findall(r"([\d.]+) (?:operators|waits)", line))
        assert waited == 1, line
        assert operators <= most, line
    captured = [int(line.split()[1]) for line in told if line.startswith("captured")]
    assert captured[0] >= 3 and captured[1] == 0, captured
    assert told[-2] == "alike"
    assert told[-1] == "[12, 12] True"
