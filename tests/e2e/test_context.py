"""Two processes that share the tokens of a batch train as one does; a run continues with the mesh changed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anabatic.core import json_reader
from e2e import command
from e2e.home import SHORT, Home, Options
from e2e.test_dpo import pairs as pairs

SHARED: Options = {"parallel.context": 2}
LORA: Options = {"tuner": "lora", "lora.r": 4, "lora.init": "pissa", "optim.lr": 0.01}


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in json_reader.read_json_lines(folder / "metrics.jsonl") if row["kind"] == kind]


def require_equal(one: Path, two: Path, file: str) -> None:
    """Assert that two runs are equal but for rounding: every logged row, what is held out, and the final model."""
    for kind, keys in (("train", ("loss", "grad_norm", "targets", "tokens")), ("eval", ("valid_loss",))):
        expected, found = rows(one, kind), rows(two, kind)
        assert [row["step"] for row in found] == [row["step"] for row in expected]
        for row, other in zip(expected, found, strict=True):
            for key in keys:
                assert other[key] == pytest.approx(row[key], rel=1e-3 if key == "grad_norm" else 2e-4), (
                    key,
                    row,
                    other,
                )
    expected_weights, found_weights = (load_file(folder / "final_model" / file) for folder in (one, two))
    assert found_weights.keys() == expected_weights.keys()
    for key, value in expected_weights.items():
        torch.testing.assert_close(found_weights[key], value, rtol=1e-2, atol=2e-4, msg=key)


def test_a_pretraining_changes_its_mesh_twice(home: Home, base: Path, tmp_path: Path) -> None:
    """Two processes that share each batch, killed; then one alone; then two again, which also shard the weights."""
    out = tmp_path / "run"
    told = command.interrupt(home.start(*home.pretrain(out, 2, more=SHARED)), out, 7, signal.SIGKILL, -9)
    assert "context parallelism: 2 processes share the tokens of a batch" in told.err
    command.interrupt(home.start(*home.pretrain(out)), out, 17, signal.SIGTERM, 143)
    home.anabatic(*home.pretrain(out, 2, more={**SHARED, "parallel.strategy": "zero3"}))
    assert command.events(out).count("resume") == 2
    require_equal(base, out, "model.safetensors")


def test_an_adapter_is_killed_and_goes_on_bit_by_bit(home: Home, base: Path, tmp_path: Path) -> None:
    whole, killed, alone = tmp_path / "whole", tmp_path / "killed", tmp_path / "alone"
    more = {**LORA, **SHARED, "parallel.strategy": "zero2"}
    command.interrupt(home.start(*home.sft(killed, base, 2, more=more)), killed, 7, signal.SIGKILL, -9)
    home.together(*(home.sft(folder, base, 2, more=more) for folder in (whole, killed)))
    assert command.losses(whole) == command.losses(killed) and len(command.losses(whole)) == SHORT
    home.anabatic(*home.sft(alone, base, more=LORA))
    require_equal(alone, whole, "adapter_model.safetensors")


def test_answers_that_lie_on_two_processes_are_compared(home: Home, base: Path, pairs: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    home.together(home.dpo(one, base, pairs), home.dpo(two, base, pairs, 2, more=SHARED))
    require_equal(one, two, "model.safetensors")
    for row, other in zip(rows(one, "train"), rows(two, "train"), strict=True):
        assert other["margin"] == pytest.approx(row["margin"], rel=2e-3, abs=1e-4)
        assert other["accuracy"] == row["accuracy"]


def test_padded_batches_are_shared_too(home: Home, base: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    padded: Options = {"batch.packing": False}
    home.together(home.sft(one, base, more=padded), home.sft(two, base, 2, more={**padded, **SHARED}))
    require_equal(one, two, "model.safetensors")


REFUSED: dict[str, tuple[Options, int, str, str]] = {
    "processes": ({"parallel.context": 4}, 2, "parallel.context is 4, which does not divide 2 processes", "nproc 4"),
    "zero": ({"parallel.context": 0}, 1, "parallel.context is 0", "use 1 or more"),
    "copies": ({"parallel.replicate": 2}, 2, "parallel.replicate is 2, parallel.strategy is auto", "zero2 or zero3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_settings_name_the_numbers(home: Home, base: Path, tmp_path: Path, case: str) -> None:
    more, processes, error, hint = REFUSED[case]
    told = home.anabatic(*home.sft(tmp_path / "run", base, processes, more=more), code=2)
    assert "error: " in told.err and error in told.err and "hint: " in told.err and hint in told.err


def test_heads_that_are_not_divided_are_named(home: Home, base: Path, tmp_path: Path) -> None:
    heads = json.loads((base / "final_model" / "config.json").read_text())["num_attention_heads"]
    count = heads + 1
    if home.program:
        pytest.skip(f"the simulated machine has 2 NPUs, and {count} are needed")
    more: Options = {"parallel.context": count, "batch.micro-batch-tokens": 64, "batch.global-batch-tokens": 64}
    told = home.anabatic(*home.sft(tmp_path / "run", base, count, more=more), code=2)
    assert f"error: parallel.context is {count}, which does not divide the model's {heads} attention heads" in told.err


def test_rollouts_are_not_split(home: Home, base: Path, tmp_path: Path) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def vowels(completions, **_):\n    return [0.0 for _ in completions]\n")
    told = home.anabatic(*home.rl(tmp_path / "run", base, rewards, 2, more=SHARED), code=2)
    assert "error: " in told.err and "parallel.context is 2, and the tokens of rollouts" in told.err
