"""Callbacks on simulated NPUs: told on rank 0, and what one decides ends the training on every device."""

from __future__ import annotations

import json

import pytest

from anabatic.core import json_reader
from anabatic_testing.tiny_models import save_tiny_chat_model
from npu_sim.conftest import Sim

CALLBACK = """
from pathlib import Path

from anabatic import StopTraining


class Notes:
    def on_step(self, step, metrics):
        with open(Path(__file__).with_name("notes.txt"), "a") as notes:
            notes.write(f"{step} {metrics['loss'] > 0}\\n")

    def on_eval(self, step, metrics):
        raise StopTraining("enough")
"""
OPTIONS = """
--tuner lora --schedule.max-steps 6 --device.type npu --log.every 1 --eval.every 2
--batch.seq-len 64 --batch.micro-batch-tokens 128 --batch.global-batch-tokens 256
"""


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_callback_stops_every_device(sim: Sim, nproc: int) -> None:
    save_tiny_chat_model(sim.folder)
    rows = [{"query": f"the wind {number}", "response": "moves upward"} for number in range(100)]
    (sim.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (sim.folder / "mine.py").write_text(CALLBACK, encoding="utf-8")
    words = ["anabatic", "sft", "--model", "model", "--data", "rows.jsonl", "--out", "run", *OPTIONS.split()]
    words += ["--log.callbacks", "mine.py:Notes", "--device.nproc", str(nproc)]
    done = sim.command("python", "-m", *words, flags=["--npus", str(nproc)])
    assert done.returncode == 0, done.stderr[-3000:]
    assert (sim.folder / "notes.txt").read_text() == "1 True\n2 True\n"
    summary = json_reader.read_json_file(sim.folder / "run" / "summary.json")
    assert summary["finished"] and summary["stopped_early"] and summary["steps"] == 2
    assert summary["world_size"] == nproc
    assert (sim.folder / "run" / "final_model" / "adapter_model.safetensors").is_file()
