"""Two machines of two simulated NPUs each: one script with MASTER_ADDR and NODE_RANK changed, HCCL between them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from anabatic.core import json_reader
from cluster.nodes import SCRIPT, two
from npu_sim.conftest import Sim
from npu_sim.test_recipes import SMALL, small

__all__ = ["small"]


def test_the_recipe_for_two_machines(sim: Sim, small: tuple[Path, Path]) -> None:
    model, rows = small
    words = ["sft", "-c", "qwen32b-lora-curriculum", "--model", model, "--data.train", rows]
    given = {**SMALL, "schedule.max-steps": 6, "batch.micro-batch-tokens": 128, "out": "run"}
    words += [word for key, value in given.items() for word in (f"--{key}", value)]
    command = shlex.join(map(str, words))
    script = sim.folder / "launch.sh"
    script.write_text(SCRIPT.format(program=f"{sys.executable} -m anabatic", options="--check", command=command))
    with two() as nodes:
        lines = ["#!/bin/bash", f"export MASTER_ADDR={nodes.addresses[0]}"]
        for number, devices in enumerate(("0,1", "2,3")):
            inner = shlex.join(nodes.words(number, ["bash", script]))
            lines.append(f"NODE_RANK={number} ASCEND_RT_VISIBLE_DEVICES={devices} {inner} & pids[{number}]=$!")
        lines.append('wait "${pids[0]}"; zero=$?; wait "${pids[1]}"; exit $((zero + $?))')
        both = sim.folder / "both.sh"
        both.write_text("\n".join(lines))
        done = sim.command("bash", str(both), flags=["--npus", "4"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 x Ascend910B3" in done.stderr and "hccl MB/s" in done.stderr and "check passed" in done.stderr
    found = [row for row in json_reader.read_json_lines(sim.folder / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in found] == list(range(1, 7))
    assert found[-1]["loss"] < found[0]["loss"]
    assert {path.name for path in (sim.folder / "run").glob("rank-*.log")} == {f"rank-{rank}.log" for rank in range(4)}
