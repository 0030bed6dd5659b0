"""torch_npu's older operators (shapes, activations, norms, convolutions, optimizers) equal formulas in float64."""

from __future__ import annotations

import json

from npu_sim.conftest import Sim


def test_older_operators(sim: Sim) -> None:
    told = json.loads(sim.program("legacy.py"))
    assert told["wrong"] == {}
    assert told["checked"] > 60
    assert "multiples of 32 from 32 to 4096" in told["refused"]["softmax shape"]
    assert "stride, padding and dilation need 2 numbers" in told["refused"]["conv stride"]
    assert "with transposed inputs is not simulated" in told["refused"]["transposed"]
    assert "npu_bert_apply_adam with adam_mode 1 is not simulated" in told["refused"]["bert mode"]
    assert "p and k must not both be None" in told["refused"]["top none"]
