"""Mixtures of experts train on the simulated device with the losses and gradients of transformers' own loop."""

from __future__ import annotations

from npu_sim.conftest import Sim


def test_families_with_even_and_uneven_routing(sim: Sim) -> None:
    lines = sim.program("expert_layers.py").splitlines()
    assert [line for line in lines if not line.endswith(" same")] == []
    assert len(lines) == 6 * 2 + 2 + 2
