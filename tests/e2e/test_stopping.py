"""Early stopping through the command: at the same step whatever happened before, and finished all the same."""

from __future__ import annotations

import math
import signal
from pathlib import Path

from safetensors.torch import load_file

from anabatic.core import json_reader
from e2e import command
from e2e.home import Home, Options

SETTINGS: Options = {"eval.patience": 2, "eval.min-delta": 100.0, "eval.sample-prompts": "Spell the word wind."}
"""No evaluation improves by 100, so the third one, after step 12, is the last."""


def test_it_stops_once_and_for_all(home: Home, base: Path, tmp_path: Path) -> None:
    one, two, killed = tmp_path / "one", tmp_path / "two", tmp_path / "killed"
    ended = home.together(home.sft(one, base, more=SETTINGS), home.sft(two, base, 2, more=SETTINGS))
    assert "early stopping after step 12: 2 evaluations without a better loss" in ended[0].err
    for folder in (one, two):
        summary = command.summary(folder)
        assert summary["finished"] and summary["stopped_early"] and summary["steps"] == 12
        assert [step for step, _ in command.evaluations(folder)] == [4, 8, 12]
        assert command.checkpoints(folder)[-1] == 12 and (folder / "final_model" / "tokenizer.json").is_file()
        assert summary["valid_loss"] == min(loss for _, loss in command.evaluations(folder))
        assert summary["valid_perplexity"] == math.exp(summary["valid_loss"]) and 0 < summary["valid_accuracy"] < 1
        assert summary["best_step"] in (4, 8, 12)

    command.interrupt(home.start(*home.sft(killed, base, more=SETTINGS)), killed, 7, signal.SIGKILL, -9)
    home.anabatic(*home.sft(killed, base, more=SETTINGS))
    assert command.losses(killed) == command.losses(one)
    assert command.evaluations(killed) == command.evaluations(one)
    for name in ("best_model", "final_model"):
        weights = [load_file(folder / name / "model.safetensors") for folder in (one, killed)]
        assert all(tensor.equal(weights[1][key]) for key, tensor in weights[0].items())

    samples = [row for row in json_reader.read_json_lines(one / "metrics.jsonl") if row["kind"] == "sample"]
    assert [row["step"] for row in samples] == [4, 8, 12]

    again = home.anabatic(*home.sft(one, base, more=SETTINGS))
    assert "early stopping after step 12" in again.err and list(command.losses(one)) == list(range(1, 13))
    home.anabatic(*home.sft(one, base, more={**SETTINGS, "eval.patience": 9}))
    assert list(command.losses(one)) == list(range(1, 17)) and not command.summary(one)["stopped_early"]


def test_it_needs_something_held_out(home: Home, base: Path, tmp_path: Path) -> None:
    more = {**SETTINGS, "data.valid-fraction": 0}
    ended = home.anabatic(*home.sft(tmp_path / "run", base, more=more), code=2)
    assert "eval.patience is 2, but nothing is held out" in ended.err
