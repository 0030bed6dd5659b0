"""Generation on simulated NPUs: the CPU's tokens, and one wait of the host for each step."""

from __future__ import annotations

import json
import re
from pathlib import Path

from npu_sim.conftest import Sim

MOST = (3, 3, 45)
"""Launches of a step over two layers, its graph and the copies to and from the device: one greedy row, four; four that
draw among the likeliest, which is not in the graph."""
COUNTED = (10, 10, 10)
"""Steps of each."""


def test_the_cpus_tokens_with_one_wait_a_step(sim: Sim) -> None:
    told = sim.program("generate.py", "6", flags=["--report", "sim.json"]).splitlines()
    assert told[2] == "same"
    steps = int(told[0].split()[1]) + sum(COUNTED)
    waits = {}
    for row in json.loads((sim.folder / "sim.json").read_text())["syncs"]:
        file = Path(row["line"].rpartition(":")[0]).name
        waits[file] = waits.get(file, 0) + row["count"]
    assert waits["sampling.py"] + waits["decode_graph.py"] >= steps  # each step, whichever file reads its tokens
    ours = {"attention.py", "kv_cache.py", "cached_attention.py", "forward.py", "engine.py", "scheduler.py"}
    assert not ours & set(waits), waits
    for line, most in zip(told[3:6], MOST, strict=True):
        operators, waited = map(float, re.findall(r"([\d.]+) (?:operators|waits)", line))
        assert waited == 1, line
        assert operators <= most, line
    captured = [int(line.split()[1]) for line in told if line.startswith("captured")]
    assert captured[0] >= 3 and captured[1] == 0, captured
    assert told[-2] == "alike"
    assert told[-1] == "[12, 12] True"


HALF_STATES = "tokens by npu_recurrent_gated_delta_rule, states in bf16"
OPERATORS = f"linear attention: prompts by npu_chunk_gated_delta_rule; {HALF_STATES}"
WIDE_STATES = "prompts by npu_chunk_gated_delta_rule; tokens by plain torch (config.json asks for states in float32"


def test_linear_attention_by_the_operators(sim: Sim) -> None:
    """The rule in float64, plain torch's tokens with requests that are read again, why operators are not used."""
    told = sim.program("linear_attention.py", "operators", "models", "reasons").splitlines()
    checks = [line for line in told if line.endswith(" True")]
    assert len(checks) == 2 * 5 + 3 * 2, told
    named = [line for line in told if line not in checks]
    assert named[0] == f"None: {OPERATORS}" and WIDE_STATES in named[1]
    assert named[2:4] == [f"{family} None: {OPERATORS}, 896 bytes" for family in ("Qwen3Next", "Qwen3_5Text")]
    assert WIDE_STATES in named[4] and named[4].endswith(" 1408 bytes")
    assert named[5:] == [
        "linear attention: plain torch (the operators take bfloat16, and the model is in float32)",
        "linear attention: plain torch (no fused operator on cpu)",
        "linear attention: prompts by plain torch (the operator takes 64 heads of 128 elements, the model has 2 and 66 "
        f"of 16 and 8); {HALF_STATES}",
        "linear attention: prompts by plain torch (module 'torch_npu' has no attribute 'npu_chunk_gated_delta_rule'); "
        f"{HALF_STATES}",
    ]
