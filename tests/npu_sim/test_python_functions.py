"""`anabatic.sft(...)` on simulated NPUs: the same weights as the command, on one device and on two."""

from __future__ import annotations

import json

import pytest

from anabatic_testing.tiny_models import save_tiny_chat_model
from npu_sim.conftest import Sim


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_function_trains_what_the_command_trains(sim: Sim, nproc: int) -> None:
    save_tiny_chat_model(sim.folder)
    rows = [{"query": f"the wind {number}", "response": "moves upward"} for number in range(100)]
    (sim.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    flags = ["--npus", "2"]
    told = json.loads(sim.program("python_functions.py", str(sim.folder), str(nproc), flags=flags).splitlines()[-1])
    assert told["finished"] and told["answered"]
    assert told["weights"][0] == told["weights"][1]
    assert "device npu" in told["log"], told["log"]
