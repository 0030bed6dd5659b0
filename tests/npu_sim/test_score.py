"""Scoring choices on simulated NPUs: the CPU's likelihoods, and one wait of the host a batch."""

from __future__ import annotations

import json
from pathlib import Path

from npu_sim.conftest import Sim


def test_the_cpus_likelihoods_with_one_wait_a_batch(sim: Sim) -> None:
    told = sim.program("score.py", flags=["--report", "sim.json"]).splitlines()
    assert told[-1] == "same"
    batches = int(told[-2].split()[1])
    waits: dict[str, int] = {}
    for row in json.loads((sim.folder / "sim.json").read_text())["syncs"]:
        file = Path(row["line"].rpartition(":")[0]).name
        waits[file] = waits.get(file, 0) + row["count"]
    assert 1 < batches < 20 and waits.pop("likelihood.py") <= batches
    ours = {"attention.py", "forward.py", "ops.py", "segments.py", "trees.py"}
    assert not ours & set(waits), waits
