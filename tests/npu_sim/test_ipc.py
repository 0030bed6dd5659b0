"""Tensors and events go from process to process without a copy, as through torch_npu's IPC on one server."""

from __future__ import annotations

import json

import pytest

from npu_sim.conftest import PROGRAMS, Sim


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"])
def test_processes_share_device_memory_and_events(sim: Sim, allocator: str) -> None:
    flags = ["--npus", "2"]
    done = sim.command("python", str(PROGRAMS / "ipc.py"), flags=flags, PYTORCH_NPU_ALLOC_CONF=allocator)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["received"] == [1, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], True, 0]
    assert told["written by producer"] == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    assert told["view"] == [[3, 1], [[10.0, 20.0], [40.0, 50.0]], 4]
    assert told["written by consumer"] == [7.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    assert told["parameter"] == ["Parameter", True, 3.0]
    assert told["other device"] == [0, [3.25, 3.25]]
    assert told["event"] == [True, "recorded"] and told["recorded elsewhere"] is True
    assert told["exit"] == 0
    assert told["after the producer's death"] == [3000.0, 3]
    if not allocator:
        assert told["after a fork"] == [1.0, 1.0, 1.0]
    assert "aclrtIpcGetEventHandle failed" in told["plain event"] or "interprocess" in told["plain event"]
