"""aten operators that only an NPU has, sparse tensors, integers and SyncBatchNorm equal the CPU's results."""

from __future__ import annotations

import json
import re

from npu_sim.conftest import PROGRAMS, Sim

ROUNDING = 1e-5


def test_operators_without_a_cpu_kernel(sim: Sim) -> None:
    told = json.loads(sim.program("aten_gaps.py"))
    assert told["wrong"] == {}
    assert told["checked"] > 50
    assert "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs" in told["refused"]["mm dtype"]
    assert "input dtypes must be the same" in told["refused"]["mm mixed"]
    assert "weight must be [out channels, 1, [1, 3]]" in told["refused"]["depthwise kernel"]
    assert "expected target dtype to be Long or Byte" in told["refused"]["float labels"]
    assert "'aten::addmm' is not currently supported on the NPU backend" in told["refused"]["sparse product"]


def test_synchronised_batch_norm(sim: Sim) -> None:
    script = str(PROGRAMS / "sync_batch_norm.py")
    done = sim.command("torchrun", "--standalone", "--nproc_per_node", "2", script, flags=["--npus", "2"])
    assert done.returncode == 0, done.stderr[-3000:]
    errors = [float(found) for found in re.findall(r"rank \d off by (\S+)", done.stdout)]
    assert len(errors) == 2
    assert max(errors) < ROUNDING
