"""Every training command, in one process and in two: it learns, and leaves what a run folder must hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from anabatic.core import json_reader
from e2e import command
from e2e.home import SHORT, STEPS, Home


def check(folder: Path, steps: int, checkpoints: list[int]) -> None:
    """A finished run folder is whole, the loss fell, and plain transformers loads the model."""
    losses = command.losses(folder)
    assert list(losses) == list(range(1, steps + 1))
    last = sum(list(losses.values())[-3:]) / 3
    assert last < losses[1]
    held_out = [loss for _, loss in command.evaluations(folder)]
    assert held_out[-1] < 0.95 * held_out[0]
    assert command.checkpoints(folder) == checkpoints
    assert (folder / "config.yaml").is_file() and (folder / "rank-0.log").is_file()
    summary = command.summary(folder)
    assert summary["finished"] is True and summary["steps"] == steps and summary["tokens"] > 0
    assert summary["valid_loss"] == min(loss for _, loss in command.evaluations(folder))
    assert [step for step, _ in command.evaluations(folder)][-1] == steps
    for name in ("best_model", "final_model"):
        tokenizer = AutoTokenizer.from_pretrained(folder / name)
        model = AutoModelForCausalLM.from_pretrained(folder / name)
        ids = torch.tensor([tokenizer.encode("<|endoftext|>the wind moves upward along the warm slope of the hill")])
        with torch.no_grad():
            loss = model(input_ids=ids, labels=ids).loss
        assert loss < 5.0 and len(tokenizer) == model.config.vocab_size


def rows(folder: Path, key: str) -> list[Any]:
    return [row[key] for row in json_reader.read_json_lines(folder / "metrics.jsonl") if row["kind"] == "train"]


def check_same(one: Path, two: Path) -> None:
    """Two processes see the tokens that one sees, in the same steps."""
    for key in ("targets", "tokens"):
        assert rows(one, key) == rows(two, key)
    for key in ("loss", "grad_norm"):
        assert rows(two, key) == pytest.approx(rows(one, key), rel=2e-3)
    assert command.losses(two)[1] == pytest.approx(command.losses(one)[1], rel=1e-6)
    assert [loss for _, loss in command.evaluations(two)] == pytest.approx(
        [loss for _, loss in command.evaluations(one)], rel=2e-3
    )


def test_pretraining(base: Path, base2: Path) -> None:
    check(base, STEPS, [STEPS - 5, STEPS])
    check(base2, STEPS, [STEPS - 5, STEPS])
    assert command.summary(base2)["world_size"] == 2 and (base2 / "rank-1.log").is_file()
    check_same(base, base2)


@pytest.mark.parametrize("kind", ["mid", "sft"])
def test_continuing_a_model(home: Home, base: Path, tmp_path: Path, kind: str) -> None:
    words = {"mid": home.mid, "sft": home.sft}[kind]
    folders = [tmp_path / "one", tmp_path / "two"]
    home.together(*(words(folder, base, processes) for processes, folder in enumerate(folders, 1)))
    for folder in folders:
        check(folder, SHORT, [SHORT - 1, SHORT])
    check_same(*folders)
