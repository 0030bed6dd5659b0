"""A model that sees trains on two simulated NPUs with the losses of one process on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import anabatic
from anabatic.core import json_reader
from npu_sim.conftest import Sim
from suite import tiny_vision


def read_losses(run: Path) -> list[float]:
    return [row["loss"] for row in json_reader.read_json_lines(run / "metrics.jsonl") if row["kind"] == "train"]


def test_two_devices_have_the_losses_of_a_processor(sim: Sim) -> None:
    folder = sim.folder
    tiny_vision.save_seeing_model(folder / "model")
    tiny_vision.write_shapes(folder / "shapes", rows=40, text_every=5)
    options = {
        "data.valid_fraction": 0.0, "lora.dropout": 0.0, "batch.seq_len": 96, "batch.micro_batch_tokens": 192,
        "batch.global_batch_tokens": 384, "schedule.max_steps": 4, "log.every": 1, "device.dtype": "fp32",
    }  # fmt: skip
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    words += ["--model", "model", "--data", "shapes/rows.jsonl", "--out", "npu", "--npus", "2"]
    done = sim.command("anabatic", "sft", "-c", "qwen3-vl-lora", *words, flags=["--npus", "2"])
    assert done.returncode == 0, done.stderr[-3000:]
    rows = folder / "shapes" / "rows.jsonl"
    anabatic.sft(
        "qwen3-vl-lora", model=folder / "model", data=rows, out=folder / "cpu", **{**options, "device.type": "cpu"}
    )
    assert read_losses(folder / "npu") == pytest.approx(read_losses(folder / "cpu"), rel=1e-5)
