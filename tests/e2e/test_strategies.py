"""Two processes under every strategy train as one process does; a run continues under another strategy."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from e2e import command
from e2e.home import SHORT, STEPS, Home, Options

CASES: dict[str, Options] = {
    "full": {"optim.lr": 0.003, "parallel.strategy": "zero2"},
    "muon": {"optim.name": "muon", "optim.lr": 0.003, "optim.matrix-lr": 0.003, "parallel.strategy": "zero3"},
    "lora": {"tuner": "lora", "lora.r": 4, "lora.init": "pissa", "optim.lr": 0.01, "parallel.strategy": "zero3",
             "parallel.offload": "cpu"},
}  # fmt: skip


def close(one: dict[int, float], two: dict[int, float]) -> None:
    """Assert that two runs have the same losses but for rounding."""
    assert one.keys() == two.keys()
    assert all(two[step] == pytest.approx(loss, rel=2e-4) for step, loss in one.items())


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / "final_model" / name)


@pytest.mark.parametrize("case", CASES)
def test_two_divided_processes_train_as_one_does(home: Home, base: Path, tmp_path: Path, case: str) -> None:
    one, two, options = tmp_path / "one", tmp_path / "two", CASES[case]
    alone = {key: value for key, value in options.items() if not key.startswith("parallel.")}
    _, told = home.together(home.sft(one, base, more=alone), home.sft(two, base, 2, more=options))
    assert f"strategy {options['parallel.strategy']}" in told.err
    close(command.losses(one), command.losses(two))
    file = "adapter_model.safetensors" if case == "lora" else "model.safetensors"
    expected, found = (load_file(folder / "final_model" / file) for folder in (one, two))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-2, atol=2e-4, msg=key)
    home.anabatic("checkpoint", "export", two, "--out", tmp_path / "exported")
    for name in (file, "adapter_config.json" if case == "lora" else "config.json", "tokenizer.json"):
        made = [(folder / name).read_bytes() for folder in (tmp_path / "exported", two / "final_model")]
        assert made[0] == made[1], name


def test_pretraining_divided_is_killed_and_goes_on_otherwise(home: Home, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    odd: Options = {"model.intermediate": 191, "schedule.max-steps": 20, "eval.sample-prompts": "The"}
    words = home.pretrain(two, 2, more={**odd, "parallel.strategy": "zero3"})
    command.interrupt(home.start(*words), two, 7, signal.SIGKILL, -9)
    going = home.pretrain(two, 2, more={**odd, "parallel.strategy": "zero2"})
    home.together(home.pretrain(one, more=odd), going)
    close(command.losses(one), command.losses(two))
    assert list(command.losses(two)) == list(range(1, 21)) and "resume" in command.events(two)


def test_an_offloaded_run_is_killed_and_goes_on(home: Home, base: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more: Options = {"optim.lr": 0.003, "parallel.strategy": "zero3", "parallel.offload": "cpu"}
    command.interrupt(home.start(*home.sft(killed, base, 2, more=more)), killed, 7, signal.SIGKILL, -9)
    home.together(*(home.sft(folder, base, 2, more=more) for folder in (whole, killed)))
    assert command.losses(whole) == command.losses(killed)


def test_a_run_of_two_divided_processes_goes_on_in_one(home: Home, base: Path, tmp_path: Path) -> None:
    out, single = tmp_path / "run", tmp_path / "single"
    command.interrupt(home.start(*home.sft(out, base, 2, more=CASES["full"])), out, 7, signal.SIGTERM, 143)
    home.together(*(home.sft(folder, base, more={"optim.lr": 0.003}) for folder in (out, single)))
    assert len(command.losses(out)) == SHORT
    close(command.losses(single), command.losses(out))


def test_a_divided_run_goes_on_in_other_numbers_of_processes(home: Home, base: Path, tmp_path: Path) -> None:
    """From one to two, four, two and one: each reads the parts that the ones before wrote."""
    out, single = tmp_path / "run", tmp_path / "single"
    more: Options = {"optim.lr": 0.003, "batch.micro-batch-tokens": 128}
    stages = ((1, 3), (2, 6), (4, 9), (2, 12))
    for processes, step in stages:
        divided = {**more, "parallel.strategy": "zero3"} if processes > 1 else more
        words = home.sft(out, base, processes, more=divided)
        command.interrupt(home.start(*words), out, step, signal.SIGTERM, 143)
    home.together(*(home.sft(folder, base, more=more) for folder in (out, single)))
    assert len(command.losses(out)) == SHORT and command.events(out).count("resume") == len(stages)
    close(command.losses(single), command.losses(out))


def test_a_run_of_one_process_goes_on_in_two_that_share_the_heads(home: Home, base: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(base, out, ignore=shutil.ignore_patterns(f"checkpoint-{STEPS}", "*_model", "summary.json"))
    told = home.anabatic(*home.pretrain(out, 2, more={"parallel.tensor": 2, "eval.sample-prompts": "The"}))
    assert "2 processes share 2 attention blocks and 2 MLPs" in told.err and "sample: The" in told.err
    close(command.losses(base), command.losses(out))
    assert "resume" in command.events(out)
    assert command.evaluations(out) == [pytest.approx(row, rel=2e-4) for row in command.evaluations(base)]
    expected, found = (weights(folder, "model.safetensors") for folder in (base, out))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-2, atol=2e-4, msg=key)
