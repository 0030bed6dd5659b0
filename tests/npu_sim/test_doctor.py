"""The doctor on a simulated machine: what is there is judged, what a simulated NPU lacks is not missed."""

from __future__ import annotations

import json
import sys

from npu_sim.conftest import Sim


def test_doctor(sim: Sim) -> None:
    flags = ["--npus", "2", "--fault", "health@1=alarm"]
    done = sim.command(sys.executable, "-m", "anabatic", "doctor", "--json", "--lang", "en", flags=flags)
    assert done.returncode == 1, done.stderr
    rows = {row["id"]: row for row in json.loads(done.stdout)["lines"]}
    assert rows["npu.simulated"]["found"] == "simulated: 2 x Ascend910B3"
    assert {"npu-smi.ok", "chip.ok", "toolkit.ok", "pair.ok", "release.matched", "hdk.matched"} <= set(rows)
    assert rows["health.bad"]["found"] == "NPU 1: Alarm"
    broken = {name for name, row in rows.items() if row["status"] == "FAIL"}
    assert broken <= {"health.bad", "ecc.bad"}
    assert {"import.npu", "import.hung"} & set(rows)  # a busy machine does not import torch in seven seconds
