"""Recurrent layers, the cells behind them and torch_npu's own recurrent operators equal torch's on the CPU."""

from __future__ import annotations

import json

from npu_sim.conftest import Sim


def test_recurrent_layers_and_operators(sim: Sim) -> None:
    told = json.loads(sim.program("recurrent.py"))
    assert told["wrong"] == {}
    assert told["checked"] > 100
    assert "npu_lstm with flag_seq is not simulated" in told["refused"]["flag_seq"]
    assert "num_layers must be 1, got 2" in told["refused"]["layers"]
    assert "npu_lstm: x must be [T, B, I]" in told["refused"]["shape"]
    assert "lstm_cell input_gates must be float or half, got BFloat16" in told["refused"]["bf16"]
