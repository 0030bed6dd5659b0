"""The recipes for big Qwen models, with a small one of the same architecture, on simulated NPUs."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from anabatic.core import jsonl
from anabatic.data import tokenizer as tokenizers
from anabatic.models.hf import save_model
from anabatic.testing.tiny import tiny_qwen2, tiny_text, tiny_tokenizer
from npu_sim.conftest import Sim

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = {
    "batch.seq-len": 64, "batch.micro-batch-tokens": 256, "batch.global-batch-tokens": 512, "schedule.max-steps": 10,
    "log.every": 1, "save.every": 5, "eval.every": 5, "device.dtype": "bf16", "optim.lr": 0.02,
}  # fmt: skip
CASES = {
    "32b, curriculum": ("qwen32b-lora-curriculum.yaml", 2, []),
    "7b, one device": ("qwen7b-lora.yaml", 1, []),
    "7b, ddp": ("qwen7b-lora.yaml", 2, []),
    "7b, zero2": ("qwen7b-lora.yaml", 2, ["--parallel.deepspeed", "default-zero2"]),
    "14b, full, zero3": ("qwen14b-full.yaml", 2, []),
    "14b, full, offload, bf16": (
        "qwen14b-full.yaml", 2, ["--parallel.offload", "cpu", "--optim.weights", "bf16_kahan"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Qwen2 with grouped queries, biases and its own chat template, and rows of three levels."""
    root = tmp_path_factory.mktemp("small")
    tokenizer = tiny_tokenizer(root, tiny_text(root))
    save_model(tiny_qwen2(), root / "model", tokenizers.load(tokenizer))
    draw, levels = random.Random(0), ("explain", "reasoning", "topology")
    rows = [
        {"instruction": f"{n} and", "input": "", "output": "the wind moves upward", "difficulty": draw.choice(levels)}
        for n in range(300)
    ]
    (root / "rows.json").write_text(json.dumps(rows))
    return root / "model", root / "rows.json"


@pytest.mark.parametrize("case", CASES)
def test_recipe(sim: Sim, small: tuple[Path, Path], case: str) -> None:
    name, processes, more = CASES[case]
    model, rows = small
    words = ["anabatic", "sft", "-c", str(RECIPES / name), "--model", str(model), "--data.train", str(rows)]
    words += ["--out", "run", "--device.nproc", str(processes), *more]
    words += [word for key, value in SMALL.items() for word in (f"--{key}", str(value))]
    done = sim.command("python", "-m", *words, flags=["--npus", str(processes)])
    assert done.returncode == 0, done.stderr[-3000:]
    found = [row for row in jsonl.read(sim.folder / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert len(found) == 10
    assert found[-1]["loss"] < 0.95 * found[0]["loss"]
    stages = [row.get("stage") for row in found]
    assert stages == ([1] * 3 + [2] * 4 + [3] * 3 if "curriculum" in case else [None] * 10)
    file = "adapter_model.safetensors" if "lora" in name else "model.safetensors"
    assert (sim.folder / "run" / "final_model" / file).is_file()
