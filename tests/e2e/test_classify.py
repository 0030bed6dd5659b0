"""A vessel classifier through the commands: two processes train what one does, and a file is classified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabatic_testing.tiny_models import save_tiny_chat_model
from e2e import command
from e2e.home import Home
from e2e.vessels import write_demo

STEPS = 8


def write_rows(path: Path) -> None:
    """Fast vessels and slow ones."""
    rows = []
    for number in range(96):
        speed = ("SPD_100", "SPD_20")[number % 2]
        text = " ".join(f"DT_60 {speed} TURN_0 MOVE_NONE" for _ in range(3 + number % 4))
        name = ("Ferry", "Trawler")[number % 2]
        rows.append({"text": text, "class": name, "vessel": f"v{number % 24}", "words": "motion-v1-r10"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_two_processes_equal_one_and_a_file_is_classified(home: Home, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    write_rows(rows)
    words = [
        "classify",
        "train",
        "--data",
        rows,
        "--depth",
        1,
        "--batch.seq-len",
        64,
        "--batch.micro-batch-tokens",
        128,
        "--batch.global-batch-tokens",
        256,
        "--optim.lr",
        0.01,
        "--schedule.max-steps",
        STEPS,
        "--head.dropout",
        0,
        "--device.type",
        home.device,
        "--device.threads",
        1,
        "--log.every",
        1,
        "--eval.every",
        4,
    ]
    runs = [tmp_path / "one", tmp_path / "two"]
    home.together(*([*words, "--out", out, "--device.nproc", number] for number, out in enumerate(runs, start=1)))
    one, two = (list(command.losses(folder).values()) for folder in runs)
    assert len(one) == STEPS and one[-1] < 0.8 * one[0]
    assert two == pytest.approx(one, rel=5e-3, abs=1e-4)
    held_out = [[loss for _, loss in command.evaluations(folder)] for folder in runs]
    assert held_out[1] == pytest.approx(held_out[0], rel=5e-3, abs=1e-4)
    said = home.anabatic("classify", "predict", rows, "-m", runs[1], "--level", "vessel", "--device.type", home.device)
    told = [json.loads(line) for line in said.out.splitlines()]
    assert len(told) == 24 and all(abs(sum(row["probabilities"]) - 1) < 1e-4 for row in told)


@pytest.mark.parametrize("is_real", [False, True])
def test_the_recipe_of_the_guide_takes_its_three_vessels(
    home: Home, tmp_path: Path, request: pytest.FixtureRequest, is_real: bool
) -> None:
    """A fifth of three vessels is none: a recipe's early stopping is left out, and said to be."""
    rows = tmp_path / "rows.jsonl"
    if is_real:
        rows = request.getfixturevalue("shared_data") / "ais" / "source_demo" / "train_dataset_demo.jsonl"
    else:
        write_demo(rows)
    words = ["classify", "train", "-c", "vessel-8npu", "--model.path", save_tiny_chat_model(tmp_path), "--data", rows]
    words += ["--device.type", home.device, "--device.nproc", 1, "--device.threads", 1, "--device.dtype", "fp32"]
    done = home.anabatic(*words, "--schedule.max-steps", 2, "--schedule.epochs", "null", "--out", tmp_path / "run")
    assert "warning: nothing of the data is held out: the training is not stopped early" in done.err
    assert len(command.losses(tmp_path / "run")) >= 1 and (tmp_path / "run" / "final_model").is_dir()
