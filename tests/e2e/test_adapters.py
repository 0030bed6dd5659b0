"""Adapters and a curriculum through the commands: trained, killed and continued, talked to, merged."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from anabatic.core import json_reader
from e2e import command
from e2e.home import Home, Options
from suite.quantized_folders import quantize_folder


def test_a_curriculum_in_two_processes(home: Home, base: Path, tmp_path: Path) -> None:
    names = ("explain", "reasoning", "topology")
    rows = [{"query": f"{n} and {n}?", "response": f"{2 * n}", "difficulty": names[n % 3]} for n in range(120)]
    data = tmp_path / "rows.json"
    data.write_text(json.dumps(rows))
    more = {"data.train": data, "curriculum.use": [], "schedule.max-steps": 20}
    one, two = tmp_path / "one", tmp_path / "two"
    home.together(home.sft(one, base, more=more), home.sft(two, base, 2, more=more))
    drawn = []
    for folder in (one, two):
        found = [row for row in json_reader.read_json_lines(folder / "metrics.jsonl") if row["kind"] == "train"]
        assert [row["stage"] for row in found] == [1] * 6 + [2] * 8 + [3] * 6
        drawn.append([row["samples"] for row in found])
    assert drawn[0] == drawn[1]
    early = drawn[0][5]
    assert early["topology"] == 0 and early["explain"] == pytest.approx(4 * early["reasoning"], abs=4)


def test_a_curriculum_by_loss_is_killed_and_goes_on(home: Home, base: Path, tmp_path: Path) -> None:
    rows = [
        {"query": f"{n}?", "response": "the wind moves upward" if n % 2 else f"{n * 7919 % 997}"} for n in range(120)
    ]
    data = tmp_path / "rows.json"
    data.write_text(json.dumps(rows))
    stages = (
        "{use: true, by: loss, stages: [{until: 0.5, mix: {easy: 1, hard: 0}}, {until: 1, mix: {easy: 0, hard: 1}}]}"
    )
    recipe = tmp_path / "loss.yaml"
    recipe.write_text(f"curriculum: {stages}\n")
    more: Options = {"data.train": data, "config": recipe, "data.valid-fraction": 0}
    one, two, killed = (tmp_path / name for name in ("one", "two", "killed"))
    command.interrupt(home.start(*home.sft(killed, base, more=more)), killed, 7, signal.SIGKILL, -9)
    home.together(home.sft(one, base, more=more), home.sft(two, base, 2, more=more), home.sft(killed, base, more=more))
    assert command.losses(one) == command.losses(killed)
    assert np.allclose(np.load(one / "difficulty.npy"), np.load(two / "difficulty.npy"), rtol=1e-5)
    hard = np.load(one / "difficulty.npy") > np.median(np.load(one / "difficulty.npy"))
    said = np.array([number % 2 == 0 for number in range(120)])
    assert (hard == said).mean() > 0.9  # what the base model was trained on is easier than numbers
    found = [row for row in json_reader.read_json_lines(one / "metrics.jsonl") if row["kind"] == "train"]
    assert found[7]["samples"]["hard"] == 0 and found[-1]["samples"]["hard"] > 0


def test_a_quantized_folder_trains_as_what_it_stands_for(home: Home, base: Path, tmp_path: Path) -> None:
    model, twin = tmp_path / "model", tmp_path / "twin"
    shutil.copytree(base / "final_model", model)
    quantize_folder(model, "fp8", twin)
    lora: Options = {"tuner": "lora", "schedule.max-steps": 4}
    runs = [tmp_path / name for name in ("one", "other", "two", "full")]
    home.together(
        home.sft(runs[0], model, more=lora),
        home.sft(runs[1], twin, more=lora),
        home.sft(runs[2], model, 2, more=lora | {"parallel.strategy": "zero3"}),
        home.sft(runs[3], model, more={"schedule.max-steps": 1}),
    )
    assert command.losses(runs[0]) == command.losses(runs[1])
    assert command.losses(runs[2]) == pytest.approx(command.losses(runs[0]), rel=1e-5)
    home.anabatic("merge", "--model", runs[0], "--out", tmp_path / "merged")
    for folder in (tmp_path / "merged", runs[3] / "final_model"):
        assert "quantization_config" not in json_reader.read_json_file(folder / "config.json")
        AutoModelForCausalLM.from_pretrained(folder)
    plan = home.anabatic("plan", "--", *home.sft(tmp_path / "none", model, more=lora)).out
    assert "FP8: trained in 16 bits" in " ".join(plan.split())
    config = json_reader.read_json_file(model / "config.json") | {"quantization_config": {"quant_method": "hqq"}}
    (model / "config.json").write_text(json.dumps(config))
    for words in (["plan", "--"], []):
        refused = home.anabatic(*words, *home.sft(tmp_path / "none", model, more=lora), code=2).err
        assert "quantized by hqq" in refused, refused
