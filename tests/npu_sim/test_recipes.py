"""The recipes for Qwen models, with a small one of the same architecture, on simulated NPUs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import transformers

from anabatic.core import json_reader
from anabatic.data.tokenizer import hf_folder
from anabatic.models.pretrained import save_model
from anabatic_testing.tiny_models import COMMON_CONFIG, FAMILY_CONFIGS, save_tiny_chat_model
from npu_sim.conftest import Sim

SMALL = {
    "batch.seq-len": 64, "batch.micro-batch-tokens": 256, "batch.global-batch-tokens": 512, "schedule.max-steps": 10,
    "log.every": 1, "save.every": 5, "eval.every": 5, "device.dtype": "bf16", "optim.lr": 0.02,
}  # fmt: skip
CASES = {
    "32b, curriculum": ("qwen32b-lora-curriculum", 2, []),
    "7b, one device": ("qwen-lora", 1, []),
    "7b, ddp": ("qwen-lora", 2, []),
    "7b, zero2": ("qwen-lora", 2, ["--parallel.deepspeed", "default-zero2"]),
    "14b, full, zero3": ("qwen-full", 2, []),
    "14b, full, offload, bf16": ("qwen-full", 2, ["--parallel.offload", "cpu", "--optim.weights", "bf16_kahan"]),
}
OTHERS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "continue, Chinese": ("pretrain", "continue-chinese", 2, {"eval.tokens": 1000, "data.valid-fraction": 0.2}),
    "tools": ("sft", "tools", 1, {"batch.seq-len": 256, "data.valid-fraction": 0.1}),
    "long context": ("sft", "long-context", 2, {"batch.seq-len": 256, "data.valid-fraction": 0.1}),
    "32B at 32k": ("sft", "qwen32b-32k-lora", 2, {"parallel.context": 2, "data.valid-fraction": 0.1}),
    "8B at 128k": ("sft", "qwen8b-128k-lora", 2, {"parallel.context": 2, "data.valid-fraction": 0.1}),
    "30B-A3B": ("sft", "qwen30b-a3b-lora", 2, {"data.valid-fraction": 0.1}),
    "235B-A22B": ("sft", "qwen235b-a22b-lora", 2, {"data.valid-fraction": 0.1}),
    "dpo": ("dpo", "dpo", 1, {"optim.lr": 0.005, "data.valid-fraction": 0.1}),
}
"""Case -> command, recipe, processes, and options beyond the small ones."""
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ROWS: dict[str, Any] = {
    "pretrain": {"text": "the wind moves upward 风向上吹"},
    "sft": {"query": "the wind", "response": "moves upward"},
    "tools": {
        "tools": [SCHEMA],
        "messages": [
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": "the wind"},
        ],
    },
    "dpo": {"prompt": "the", "chosen": "wind moves", "rejected": "upward"},
    "rl": {"question": "the wind", "answer": "moves #### 5"},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Qwen2 with grouped queries, biases and its own chat template, and rows of three levels."""
    root = tmp_path_factory.mktemp("small")
    save_tiny_chat_model(root, max_position_embeddings=256)
    draw, levels = random.Random(0), ("explain", "reasoning", "topology")
    rows = [
        {"instruction": f"{n} and", "input": "", "output": "the wind moves upward", "difficulty": draw.choice(levels)}
        for n in range(300)
    ]
    (root / "rows.json").write_text(json.dumps(rows))
    return root / "model", root / "rows.json"


@pytest.fixture(scope="module")
def mixture(small: tuple[Path, Path]) -> Path:
    """A Qwen3-MoE with the tokenizer and the chat template of the small model."""
    folder = small[0].with_name("mixture")
    tokenizer = hf_folder.load_tokenizer(small[0])
    settings = {**COMMON_CONFIG, **FAMILY_CONFIGS["Qwen3Moe"], "vocab_size": len(tokenizer), "hidden_size": 64}
    config = transformers.Qwen3MoeConfig(**{**settings, "max_position_embeddings": 256})
    transformers.set_seed(0)
    save_model(transformers.AutoModelForCausalLM.from_config(config), folder, tokenizer)
    return folder


def run(
    sim: Sim, command: str, recipe: str, processes: int, options: dict[str, Any], *more: str
) -> list[dict[str, Any]]:
    """Run a recipe on as many NPUs as it has processes; return its rows of training."""
    words = ["anabatic", command, "-c", recipe, "--out", "run", "--device.nproc", str(processes)]
    words += [word for key, value in options.items() for word in (f"--{key}", str(value))]
    done = sim.command("python", "-m", *words, *more, flags=["--npus", str(processes)])
    assert done.returncode == 0, done.stderr[-3000:]
    return [row for row in json_reader.read_json_lines(sim.folder / "run" / "metrics.jsonl") if row["kind"] == "train"]


@pytest.mark.parametrize("case", CASES)
def test_recipe(sim: Sim, small: tuple[Path, Path], case: str) -> None:
    name, processes, more = CASES[case]
    model, rows = small
    found = run(sim, "sft", name, processes, {**SMALL, "model": model, "data.train": rows}, *more)
    assert len(found) == 10
    assert found[-1]["loss"] < 0.95 * found[0]["loss"]
    stages = [row.get("stage") for row in found]
    assert stages == ([1] * 3 + [2] * 4 + [3] * 3 if "curriculum" in case else [None] * 10)
    file = "model.safetensors" if "full" in name else "adapter_model.safetensors"
    assert (sim.folder / "run" / "final_model" / file).is_file()


@pytest.mark.parametrize("case", OTHERS)
def test_recipe_of_another_kind(sim: Sim, small: tuple[Path, Path], mixture: Path, case: str) -> None:
    command, recipe, processes, options = OTHERS[case]
    rows = sim.folder / "rows.jsonl"
    made = [{**ROWS.get(case, ROWS[command]), "id": f"{case} {number}"} for number in range(100)]
    rows.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made), encoding="utf-8")
    model = mixture if "-A" in case else small[0]
    where = "model.path" if command == "pretrain" else "model"
    found = run(sim, command, recipe, processes, {**SMALL, where: model, "data.train": rows, **options})
    assert found[-1]["step"] == 10
    assert found[-1]["loss"] < 0.95 * found[0]["loss"]


def test_recipe_of_reinforcement(sim: Sim, small: tuple[Path, Path]) -> None:
    rows = sim.folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({**ROWS["rl"], "question": f"{n} and"}) + "\n" for n in range(40)))
    options = {
        "model": small[0],
        "data.train": rows,
        "batch.seq-len": 128,
        "examples-per-step": 2,
        "num-samples": 2,
        "device-batch-size": 2,
        "sampling.max-new-tokens": 8,
        "schedule.max-steps": 2,
        "eval.every": 0,
        "eval.rows": 1,
        "save.every": 1,
        "device.dtype": "bf16",
        "data.valid-fraction": 0.1,
    }
    found = run(sim, "rl", "grpo-maths", 1, options)
    assert [row["step"] for row in found] == [1, 2]
