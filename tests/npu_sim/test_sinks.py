"""gpt-oss: learned sinks in the fused attention of torch_npu."""

from __future__ import annotations

from npu_sim.conftest import Sim


def test_sinks_train_in_the_fused_operator(sim: Sim) -> None:
    """The CPU's losses and sinks to rounding, the plan's memory, and plain operators where the version has no sinks."""
    lines = sim.program("sinks.py", "training", "saved", "older").splitlines()
    assert [line for line in lines if not line.endswith(" True")] == []
    assert len(lines) == 8
