"""`anabatic plan` as typed: what is printed, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabatic.cli.app import main


def run(words: list[str]) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    return int(caught.value.code or 0)


SFT = ["--", "sft", "--model", "Qwen/Qwen2.5-7B", "--data", "rows.jsonl", "--tuner", "lora", "--batch.seq-len", "2048"]


def test_a_plan_names_parts_time_and_what_is_faster(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--npus", "8", "--tokens", "20000000", *SFT, "--recompute", "full"]) == 0
    said = capsys.readouterr().out
    for part in (
        "7.6B parameters",
        "8 x Ascend910B3",
        "frozen weights",
        "tokens/s",
        "The run: ",
        "x as fast: --parallel",
    ):
        assert part in said
    assert "assumed: batch.global_batch_tokens" in said


def test_what_does_not_fit_is_said_by_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--", "sft", "--model", "Qwen/Qwen2.5-7B", "--data", "rows.jsonl"]
    assert run(["plan", "--json", *words]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"] and found["others"] == [] and found["binding"].startswith("memory: ")
    assert found["assumed"][1] == "batch.micro_batch_tokens 1024, the smallest"
    assert sum(found["parts"].values()) == pytest.approx(found["memory_bytes"], rel=1e-9)
    assert run(["plan", "--sweep", "--npus", "8", "--nodes", "2", *words]) == 1  # ddp does not fit there either
    assert "zero3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("npus", "micro", "told"), [("8", "2048", False), ("3", "2048", True), ("64", "2048", True), ("1", "3000", True)]
)
def test_a_step_that_cannot_be_divided_is_named(
    npus: str, micro: str, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--batch.global-batch-tokens", "32768", "--batch.micro-batch-tokens", micro]
    run(["plan", "--npus", npus, *SFT, *sizes])
    assert ("batch.global_batch_tokens 32768 is no multiple of" in capsys.readouterr().out) == told


def test_segments_longer_than_the_model_was_made_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"model_type": "qwen2", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    command = ["plan", "--", "sft", "--model", str(tmp_path), "--data", "rows.jsonl"]
    assert run([*command, "--batch.seq-len", "1024"]) == 2
    assert "batch.seq_len is 1024, the model was made for 512 positions" in capsys.readouterr().err
    assert run(command) in (0, 1)  # the default follows the model
    assert "batch.seq_len 512 (the model was made for 512 positions" in capsys.readouterr().err


def test_a_model_from_the_dial_and_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "base.yaml"
    recipe.write_text("model: {depth: 20}\ntokenizer: nowhere\ndata: {train: ['stdlib:']}\n")
    assert run(["plan", "--npus", "8", "--chip", "910B4", "--", "pretrain", "-c", str(recipe)]) == 0
    said = capsys.readouterr().out
    assert "20 blocks of width 1280" in said and "Ascend910B4, 32 GiB" in said and "The run: " in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "which command?"),
        (["--chip", "910Z9", *SFT], "no chip '910Z9' is known"),
        (["--npus", "0", *SFT], "--npus is 0"),
        (["--nodes", "-1", *SFT], "--nodes is -1"),
        (["--tokens", "many", *SFT], "tokens"),
        (["--npus", "3", *SFT, "--parallel.tensor", "2"], "parallel.tensor is 2, which does not divide 3 devices"),
        (["--npus", "4", *SFT, "--parallel.tensor", "3"], "does not divide 4 devices"),
        (["--npus", "8", *SFT, "--parallel.tensor", "8"], "use 1 or 2 or 4"),
        (
            ["--npus", "8", *SFT, "--parallel.context", "8"],
            "parallel.context is 8, which does not divide the model's 28 attention heads",
        ),
        (["--npus", "6", *SFT, "--parallel.context", "4"], "parallel.context is 4, which does not divide 6 devices"),
        (["--npus", "1000", "--nodes", "1001", *SFT], "more than 1,000,000"),
        (
            ["--", "sft", "--model", "Qwen/Qwen2.5-7B", "--data", "x", "--quantize", "nf4"],
            "the model itself is trained",
        ),
        (
            ["--npus", "2", *SFT, "--quantize", "nf4", "--parallel.strategy", "zero3"],
            "zero3, which divides",
        ),
        (["--", "chat", "-m", "x"], "chat is not a command that trains"),
        (["--", "anabatic", "sft"], "leave `anabatic` out"),
        (["recipe.yaml"], "sft -c recipe.yaml"),
        (["sft", "--model", "x"], "stand after --"),
        ([*SFT, "--dry-run"], "--dry-run is an option of the command alone"),
        (["--", "sft", "--model", "nowhere/at-all-9b", "--data", "x"], "nor a model whose sizes are known"),
    ],
)
def test_what_cannot_be_planned(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *words]) == 2
    said = capsys.readouterr().err
    assert why in said and "hint: " in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("pretrain --tokenizer nowhere --data stdlib: --model.depth 4", "The run: "),
        ("sft --model Qwen/Qwen2.5-0.5B --data x --batch.micro-batch-tokens 1024", "micro-batch 1,024 x"),
        ("dpo --model Qwen/Qwen2.5-0.5B --data x --tuner lora", "reference"),
        ("reward --model Qwen/Qwen2.5-0.5B --data x --batch.micro-batch-tokens 2048", "trained weights"),
        ("rl --model Qwen/Qwen2.5-0.5B --data x --tuner lora --kl-coef 0.1", "draw and judge answers is not counted"),
        ("classify pretrain --data x", "batch.rows 64"),
        ("classify train --data x", "4,096 words, an assumption"),
    ],
)
def test_every_training_has_a_plan_for_this_machine(
    words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run([*words.split(), "--device.type", "cpu", "--out", str(out), "--dry-run"]) in (0, 1)  # as memory allows
    said = capsys.readouterr().out
    for part in (
        "1 x processor (of this machine",
        "parameters: ",
        told,
        "Memory of each host",
        "Disk, GiB",
        "A checkpoint: ",
    ):
        assert part in said
    assert not out.exists(), "nothing is begun"


@pytest.mark.parametrize(
    ("nodes", "options", "checkpoints"),
    [
        (16, "--parallel.strategy zero3", 4 / 16),  # this machine's part and its neighbour's, and both of the new step
        (1, "--parallel.strategy zero3", 2),
        (16, "--parallel.strategy ddp", 2),  # every machine holds everything
        (16, "--parallel.strategy ddp --parallel.tensor 2", 16),  # eight halves of a machine, and its neighbour's
    ],
)
def test_copies_in_memory_are_counted(
    nodes: int, options: str, checkpoints: float, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--json", "--chip", "H100", "--npus", "8", "--nodes", str(nodes), "--", "sft"]
    words += ["--model", "Qwen/Qwen2.5-1.5B", "--data", "x", "--save.memory-every", "50", *options.split()]
    assert run(words) == 0
    found = json.loads(capsys.readouterr().out)
    copies = found["host_bytes"]["copies in memory, while one is made"]
    assert copies == pytest.approx(checkpoints * found["checkpoint_bytes"], rel=1e-6)


def test_what_a_run_needs_beside_its_devices(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--json", "--chip", "H100", "--npus", "8", "--nodes", "2", "--tokens", "20000000"]
    words += ["--", "sft", "--model", "Qwen/Qwen2.5-7B", "--data", "x", "--parallel.strategy", "zero3"]
    assert run([*words, "--parallel.offload", "cpu", "--save.keep-last", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    params = found["parameters"]
    assert found["checkpoint_bytes"] == 12 * params  # fp32 weights and two moments
    assert found["model_bytes"] == 4 * params  # as they are trained
    assert found["host_bytes"]["a file of the saved model"] == 4 * 2**30  # of 28 GiB
    assert found["disk_bytes"]["checkpoints, 4 at most"] == 4 * 12 * params
    assert found["host_bytes"]["offloaded weights and optimizer"] == pytest.approx(12 * params / 2, rel=1e-6)
    assert found["host_bytes"]["offloaded gradients"] == pytest.approx(4 * params / 2, rel=1e-6)
    assert found["run_kwh"] == pytest.approx(16 * 0.7 * found["run_seconds"] / 3600)
    assert "copies in memory, while one is made" not in found["host_bytes"]
    assert run(["plan", "--json", *SFT]) == 0
    assert json.loads(capsys.readouterr().out)["run_kwh"] is None  # no power of a 910B3 is published
