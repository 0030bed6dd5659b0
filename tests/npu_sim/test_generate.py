"""Generation on simulated NPUs: the CPU's tokens, and one wait of the host for each step."""

from __future__ import annotations

import json
from pathlib import Path

from npu_sim.conftest import Sim


def test_the_cpus_tokens_with_one_wait_a_step(sim: Sim) -> None:
    told = sim.program("generate.py", "6", flags=["--report", "sim.json"]).splitlines()
    assert told[-1] == "same"
    steps = int(told[-3].split()[1])
    waits = {}
    for row in json.loads((sim.folder / "sim.json").read_text())["syncs"]:
        file = Path(row["line"].rpartition(":")[0]).name
        waits[file] = waits.get(file, 0) + row["count"]
    assert waits.pop("sampling.py") <= steps
    ours = {"attention.py", "cache.py", "cached.py", "forward.py", "engine.py", "schedule.py", "segments.py"}
    assert not ours & set(waits), waits
