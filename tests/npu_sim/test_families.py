"""Model families train and generate on the simulated device with the CPU's numbers, to the last bit."""

from __future__ import annotations

import importlib.util

import pytest

from npu_sim.conftest import Sim


@pytest.mark.parametrize(
    ("modes", "count"),
    [
        (["plain"], 17),
        (["checkpoint:Llama,Qwen3Moe", "classify:Llama,Gemma3Text,Qwen3Moe", "bf16:Llama,Mistral,Gemma2,Qwen3Moe"], 9),
    ],
)
def test_families(sim: Sim, modes: list[str], count: int) -> None:
    lines = sim.program("families.py", *modes).splitlines()
    assert [line for line in lines if not line.endswith(" same")] == []
    assert len(lines) == count


def test_adapters(sim: Sim) -> None:
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    lines = sim.program("families.py", "lora:Llama,Qwen3Moe,DeepseekV3,Glm4").splitlines()
    assert [line for line in lines if not line.endswith(" same")] == []
    assert len(lines) == 4
