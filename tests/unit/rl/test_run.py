"""Whole runs on a random model: it learns what is rewarded, stops anywhere and continues as if nothing had been."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anabatic.config.rl import HeldoutEvaluate, RlJob, RolloutSettings
from anabatic.config.sections.common import Data, Optim, Save
from anabatic.core.errors import AnabaticError, ConfigError, DataError, Failure
from anabatic.core.relaunch import EXIT_PREEMPTED
from anabatic.data.scoring.questions import Question
from anabatic.recipes.training.rl import run
from anabatic.rl.reward_worker import RewardCallError
from anabatic.rl.rewards import RewardSet
from anabatic.rl.rollout import Rollout
from unit.rl.conftest import Make

pytestmark = pytest.mark.process


TIMES = ("time", "rollout_s", "reward_s", "rollout_tokens_per_s", "tokens_per_s", "mfu", "eta_s", "data_wait")
TIMES += ("memory_bytes",)


def rows(job: RlJob, kind: str = "train") -> list[dict[str, Any]]:
    lines = (Path(job.out) / "metrics.jsonl").read_text().splitlines()
    found = [row for row in map(json.loads, lines) if row["kind"] == kind]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in found]


def weights(job: RlJob) -> dict[str, torch.Tensor]:
    return load_file(Path(job.out) / "final_model" / "model.safetensors")


def test_it_learns_what_is_rewarded(make: Make) -> None:
    optim, held = Optim(name="adamw", lr=0.02, weight_decay=0.0), HeldoutEvaluate(rows=8, every=0)
    job = make(steps=12, optim=optim, examples_per_step=8, eval=held, save=Save(), mask_truncated=False)
    assert run(job) == 0
    logged, held = rows(job), rows(job, "eval")
    assert held[0]["step"] == 0 and held[-1]["valid_reward"] > 1.5 * held[0]["valid_reward"]
    assert sum(row["reward"] for row in logged[-4:]) > 1.5 * sum(row["reward"] for row in logged[:4])
    for row in logged:
        assert row["reward"] == row["reward/vowels"] and 0 <= row["truncated"] <= 1
        assert row["logprob_diff"] < 1e-4 and abs(row["kl_engine"]) < 1e-4 and row["clipped"] == 0
    summary = json.loads((Path(job.out) / "summary.json").read_text())
    assert summary["finished"] and summary["valid_reward"] == max(row["valid_reward"] for row in held)
    samples = rows(job, "sample")
    assert len(samples) == 4 * len(held) and all("reward" in row and row["prompt"] for row in samples)


@pytest.mark.parametrize("extra", [{}, {"updates": 2, "kl_coef": 0.1, "algorithm": "gspo"}])
def test_it_goes_on_from_any_checkpoint(make: Make, extra: dict[str, Any]) -> None:
    """With two updates a round, every other checkpoint lies in the middle of one."""
    whole, again = make(name="whole", **extra), make(name="again", **extra)
    assert run(whole) == 0
    shutil.copytree(whole.out, again.out)
    for name in ("checkpoint-4", "final_model", "best_model"):
        shutil.rmtree(Path(again.out) / name)
    assert run(again) == 0
    assert rows(again) == rows(whole) and rows(again, "eval") == rows(whole, "eval")
    for name, weight in weights(whole).items():
        assert torch.equal(weights(again)[name], weight), name


def test_a_signal_while_answers_are_judged(make: Make, chat_model: Path, tmp_path: Path) -> None:
    whole, stopped = make(name="whole"), make(name="stopped")
    assert run(whole) == 0
    mark = tmp_path / "sent"
    mine = chat_model.parent / "mine.py"
    before = mine.read_text()
    kills = [
        "import os, pathlib, signal",
        f"mark = pathlib.Path({str(mark)!r})",
        "calls = 0",
        "def vowels(text, row):",
        "    global calls",
        "    calls += 1",
        "    if calls == 30 and not mark.exists():",
        "        mark.touch()",
        f"        for one in ({os.getpid()}, os.getpid(), os.getpid()):",
        "            os.kill(one, signal.SIGTERM)",
        *before.splitlines()[2:],
    ]
    mine.write_text("\n".join(kills) + "\n")
    try:
        assert run(stopped) == EXIT_PREEMPTED and mark.exists()
        assert run(stopped) == 0
    finally:
        mine.write_text(before)
    assert rows(stopped) == rows(whole)
    assert all(torch.equal(weights(stopped)[name], weight) for name, weight in weights(whole).items())


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"num_samples": 3}, ConfigError, "not a multiple"),
        ({"num_samples": 1, "examples_per_step": 8}, ConfigError, "no others to be compared with"),
        ({"rewards": []}, ConfigError, "rewards is empty"),
        ({"rewards": ["answer", "answr"]}, ConfigError, 'no reward "answr"'),
        ({"data": Data(train=["task:speling"])}, ConfigError, "no task"),
        ({"data": Data(train=["stdlib:"])}, ConfigError, "contains no questions"),
        ({"data": Data(train=["{folder}/empty.jsonl"])}, DataError, "nothing is asked"),
        ({"data": Data(train=["{folder}/text.jsonl"])}, DataError, "line 1: plain text, not a question"),
        ({"data": Data(train=["{folder}/long.jsonl"])}, DataError, "no question leaves room"),
        ({"data": Data(train=["{folder}/many.jsonl"])}, DataError, "2 of 3 rows .66.67%. are longer"),
        ({"data": Data(train=["{folder}/asks.jsonl"]), "rewards": ["answer"]}, DataError, "the row has no answer"),
        ({"turns": 2}, ConfigError, "has no function turn"),
    ],
)  # fmt: skip
def test_bad_input(make: Make, tmp_path: Path, given: dict[str, Any], error: type[AnabaticError], message: str) -> None:
    for name, row in {
        "empty": {"answer": "4"},
        "text": {"text": "a text"},
        "long": {"prompt": "long " * 80, "answer": "4"},
        "asks": {"prompt": "2 + 2?"},
    }.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    short, long = ((tmp_path / f"{name}.jsonl").read_text() for name in ("asks", "long"))
    (tmp_path / "many.jsonl").write_text((short + long) * 2)
    if "data" in given:
        given = {**given, "data": Data(**vars(given["data"]))}
        given["data"].train = [source.format(folder=tmp_path) for source in given["data"].train]
    with pytest.raises(error, match=message):
        run(make(**given))


def test_a_reward_that_always_fails_ends_the_run(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("def bad(text, row):\n    raise ValueError(len(text) * 0)\n")
    with pytest.raises(Failure, match="the reward bad failed for all 16 answers: ValueError: 0 .line 2 of bad.py"):
        run(make(rewards=[f"{file}:bad"], eval=HeldoutEvaluate(rows=4)))


def test_a_batch_with_nothing_to_learn(make: Make) -> None:
    """Every answer is cut off and masked: a batch runs through the model, whatever its loss is divided by."""
    job = make(steps=2, algorithm="dr_grpo", mask_truncated=False, rewards=["length"], num_samples=2)
    assert run(job) == 0
    assert all(row["loss"] == 0 and row["grad_norm"] == 0 for row in rows(job) if row["flat_groups"] == 1)


def test_a_signal_between_two_calls_of_a_reward_ends_the_judging(make: Make, chat_model: Path) -> None:
    """Each call may take as long as its time allows: hundreds of answers must not hold up the end."""
    said = iter([False, False, True])
    some = [Rollout(0, number, [1, 2], 1, [1], [0.0], "a") for number in range(4)]
    asked = Question("q:1", [{"role": "user", "content": "a?"}])
    with RewardSet([f"{chat_model.parent / 'mine.py'}:vowels"], pattern="", timeout=5.0, room=8) as judges:
        assert not judges.score_rollouts(some, [asked], lambda: next(said))
        assert [len(one.scores) for one in some] == [1, 1, 0, 0] and judges.score_rollouts(some, [asked])


def test_a_step_that_teaches_nothing_is_told_once(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "same.py"
    file.write_text("def same(text, row):\n    return 1.0\n")
    with caplog.at_level(logging.WARNING, logger="anabatic"):
        assert run(make(steps=2, rewards=[f"{file}:same"], mask_truncated=False)) == 0
    assert caplog.text.count("got the same reward, for every question: this step teaches nothing") == 1


def test_answers_that_are_all_cut_off_teach_nothing_and_break_nothing(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    job = make(steps=2)
    job.sampling.max_new_tokens = 1
    with caplog.at_level(logging.INFO, logger="anabatic"):
        assert run(job) == 0
    assert caplog.text.count("all answers were cut off at their limit") == 1 and "| loss" not in caplog.text
    assert [(row["targets"], row["loss"]) for row in rows(job)] == [(0, None)] * 2
    before = load_file(Path(job.model) / "model.safetensors")
    assert all(torch.equal(weight, before[name]) for name, weight in weights(job).items())


def test_a_turn_that_always_fails_ends_the_run(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "talk.py"
    file.write_text("def good(text, row):\n    return len(text)\n\ndef turn(messages, row):\n    return [1]\n")
    some = [Rollout(0, number, [1, 2], 1, [1], [0.0], "a", faults={"turn": "no"}) for number in range(3)]
    with RewardSet([f"{file}:good"], pattern="", timeout=5.0, room=8) as judges:
        with pytest.raises(RewardCallError, match="list was returned, no number and no text"):
            judges.get_turn_function()(Question("q:1", [{"role": "user", "content": "a?"}]), [])
        judges.require_working_rewards([*some, Rollout(0, 3, [1], 1)])
        with pytest.raises(Failure, match="turn failed for all 3 answers: no"):
            judges.require_working_rewards([*some, Rollout(0, 3, [1], 1, truncated=True)])
        judges.require_working_rewards([some[0], *(Rollout(0, 3, [1], 1, truncated=True) for _ in range(2))])


def test_a_correction_of_what_is_equal_changes_nothing(make: Make) -> None:
    """The engine of the process has the trainer's probabilities: weights are 1, in each update of a round."""
    plain, corrected = (
        make(name=name, steps=2, updates=2, mask_truncated=False, rollout=RolloutSettings(correction=name))
        for name in ("none", "token")
    )
    assert run(plain) == run(corrected) == 0
    before, after = rows(plain), rows(corrected)
    for key in ("loss", "grad_norm", "reward", "logprob_diff"):
        assert [row[key] for row in after] == pytest.approx([row[key] for row in before], rel=1e-3, abs=1e-5), key
    assert all(row["engine_shift"] < 1e-4 and row["engine_bound"] == 0 for row in after)
    assert "engine_shift" not in before[0]
    with pytest.raises(ConfigError, match="gspo has one ratio for an answer"):
        make(algorithm="gspo", rollout=RolloutSettings(correction="token"))
    with pytest.raises(ConfigError, match="correction_cap is 1"):
        RolloutSettings(correction_cap=1.0)
