"""Packed models with the NPU's fused operators: the CPU's losses and gradients, and few launches."""

from __future__ import annotations

import json

import pytest

from npu_sim.conftest import Sim


@pytest.mark.parametrize(("mode", "kind"), [("full", "single"), ("lora", "grouped")])
def test_families(sim: Sim, mode: str, kind: str) -> None:
    lines = sim.program("packed.py", mode).splitlines()
    assert [line for line in lines if not line.endswith(f" {kind} same")] == []
    assert len(lines) == 17


def test_plain_and_fused_modules_under_autocast(sim: Sim) -> None:
    names = ["Llama", "Mistral", "Gemma2", "Gemma3Text", "Glm4", "Phi3", "Olmo2", "DeepseekV3", "Qwen3Next"]
    assert sim.program("packed.py", "autocast", *names).splitlines() == [f"{name} same" for name in names]


def test_frozen_weights_in_four_bits(sim: Sim) -> None:
    told = sim.program("packed.py", "nf4", "Llama")
    assert told == "Llama single same"


def test_a_lora_step_launches_few_operators_and_waits_for_none(sim: Sim) -> None:
    told = sim.program("lora_step.py", flags=["--report", "sim.json"]).splitlines()[-1]
    assert "28 adapters in 16 groups" in told
    report = json.loads((sim.folder / "sim.json").read_text())
    assert report["step"]["operators"] <= 335
    assert report["step"]["syncs"] == 0
    assert max(device["hbm_peak"] for device in report["devices"]) <= 0.6 * 251e6
