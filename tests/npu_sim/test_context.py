"""Ranks that share the tokens of a batch on simulated devices: loss and gradients are those of one CPU process."""

from __future__ import annotations

import pytest

from npu_sim import ranks
from npu_sim.conftest import Sim

ROUNDING = 1e-4


@pytest.mark.parametrize(
    ("world", "cases", "methods"),
    [(2, "qwen3,one key head,window,latent,experts", "ulysses"), (4, "qwen3,one key head", "ulysses,ring")],
)
def test_gradients_are_those_of_one_process(sim: Sim, world: int, cases: str, methods: str) -> None:
    results = ranks.run(sim, world, "context", "differences", cases, methods)
    assert set(results) == set(range(world))
    for told in results.values():
        assert isinstance(told, dict), told
        assert len(told) == 2 * len(cases.split(",")) * len(methods.split(","))
        assert max(told.values()) < ROUNDING, told
