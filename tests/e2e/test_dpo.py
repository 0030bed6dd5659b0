"""Preferences through the command: learned, killed and continued, in one process and in two."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from anabatic.core import json_reader
from anabatic_testing.tiny_models import CORPUS_TEXT
from e2e import command
from e2e.home import SHORT, Home, Options

LORA: Options = {"tuner": "lora", "lora.r": 4, "lora.init": "pissa", "optim.lr": 0.01}
MEANS = ("rewards/chosen", "rewards/rejected", "margin", "accuracy")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The better answer names a bird, the other one a hill; questions differ."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    words = CORPUS_TEXT.split()
    rows = [
        {
            "prompt": f"{words[n % len(words)]} {n}?",
            "chosen": f"the bird {words[n % 7]}",
            "rejected": f"hill {words[n % 5]}",
        }
        for n in range(240)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in json_reader.read_json_lines(folder / "metrics.jsonl") if row["kind"] == kind]


@pytest.fixture(scope="module")
def whole(home: Home, base: Path, pairs: Path) -> tuple[Path, Path]:
    """Runs that nobody disturbed, in one process and in two."""
    one, two = home.root / "dpo", home.root / "dpo2"
    home.together(home.dpo(one, base, pairs), home.dpo(two, base, pairs, 2))
    return one, two


def test_it_learns_to_prefer(whole: tuple[Path, Path]) -> None:
    for folder in whole:
        logged, held_out = rows(folder, "train"), rows(folder, "eval")
        assert len(logged) == SHORT and logged[0]["loss"] == pytest.approx(math.log(2), rel=1e-5)
        assert logged[-1]["loss"] < 0.5 * logged[0]["loss"] and logged[-1]["accuracy"] > 0.9 > logged[0]["accuracy"]
        assert logged[-1]["margin"] > 0.5
        for row in logged:
            assert row["margin"] == pytest.approx(row["rewards/chosen"] - row["rewards/rejected"], abs=1e-5)
        assert held_out[-1]["valid_accuracy"] > 0.9 and held_out[-1]["valid_loss"] < held_out[0]["valid_loss"]
        summary = command.summary(folder)
        assert summary["finished"] and summary["valid_accuracy"] > 0.9
        assert summary["valid_loss"] == min(row["valid_loss"] for row in held_out)
        assert (folder / "final_model" / "model.safetensors").is_file() and (folder / "report.html").is_file()


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_two_processes_equal_one(
    home: Home, base: Path, pairs: Path, whole: tuple[Path, Path], tmp_path: Path, strategy: str
) -> None:
    divided = whole[1]
    if strategy != "ddp":
        divided = tmp_path / "run"
        home.anabatic(*home.dpo(divided, base, pairs, 2, more={"parallel.strategy": strategy}))
    whole = whole[0], divided
    one, two = (rows(folder, "train") for folder in whole)
    for key in ("targets", "tokens"):
        assert [row[key] for row in one] == [row[key] for row in two]
    for key in ("loss", "grad_norm", "rewards/chosen", "rewards/rejected"):
        assert [row[key] for row in two] == pytest.approx([row[key] for row in one], rel=5e-3, abs=1e-4), key
    held_out = [[row["valid_loss"] for row in rows(folder, "eval")] for folder in whole]
    assert held_out[1] == pytest.approx(held_out[0], rel=5e-3, abs=1e-4)


@pytest.mark.parametrize("more", [{"log.every": 3}, LORA], ids=["full", "lora"])
def test_killed_and_continued(home: Home, base: Path, pairs: Path, tmp_path: Path, more: Options) -> None:
    undisturbed, killed = tmp_path / "whole", tmp_path / "killed"
    home.anabatic(*home.dpo(undisturbed, base, pairs, more=more))
    process = home.start(*home.dpo(killed, base, pairs, more=more))
    command.interrupt(process, killed, 6, signal.SIGKILL, -9)
    home.anabatic(*home.dpo(killed, base, pairs, more=more))
    keys = ("step", "loss", "grad_norm", *MEANS)
    one, two = ([{key: row[key] for key in keys} for row in rows(folder, "train")] for folder in (undisturbed, killed))
    assert one == two and one[-1]["loss"] < one[0]["loss"]
    assert command.evaluations(killed) == command.evaluations(undisturbed)
    name = "adapter_model.safetensors" if more is LORA else "model.safetensors"
    weights = [load_file(folder / "final_model" / name) for folder in (undisturbed, killed)]
    assert weights[0].keys() == weights[1].keys() and all(weights[0][key].equal(weights[1][key]) for key in weights[0])


def test_bad_input(home: Home, base: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.jsonl"
    plain.write_text(
        json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    )
    cases: list[tuple[Path, Options, str]] = [
        (plain, {"data.valid-fraction": 0}, "plain.jsonl: line 1: one answer, where a pair has two"),
        (home.text, {}, "is plain text, not pairs of answers"),
        (plain, {"batch.micro-batch-tokens": 100}, "a pair has up to 2 x batch.seq_len = 128 tokens"),
        (plain, {"batch.no-packing": []}, "pairs are always packed"),
        (plain, {"loss-type": "ipo", "label-smoothing": 0.1}, "--label-smoothing is 0.1 with loss_type ipo"),
    ]
    runs = [home.dpo(tmp_path / str(n), base, data, more=more) for n, (data, more, _) in enumerate(cases)]
    for ended, (_, _, told) in zip(home.together(*runs, code=2), cases, strict=True):
        assert told in ended.err, ended.err


def test_a_sharded_adapter_begins_at_the_reference(home: Home, base: Path, pairs: Path, tmp_path: Path) -> None:
    more = {**LORA, "parallel.strategy": "zero3", "schedule.max-steps": 6, "eval.sample-prompts": "the wind?"}
    home.anabatic(*home.dpo(tmp_path / "run", base, pairs, 2, more=more))
    losses = list(command.losses(tmp_path / "run").values())
    assert losses[0] == pytest.approx(math.log(2), rel=1e-5) and losses[-1] < 0.95 * losses[0]
    assert (tmp_path / "run" / "final_model" / "adapter_model.safetensors").is_file()


def test_single_answers_and_a_reward_model(home: Home, base: Path, pairs: Path, tmp_path: Path) -> None:
    """Half of the single answers are bad ones; the reward model is one that transformers would load."""
    whole = [json.loads(line) for line in pairs.read_text().splitlines()]
    single = tmp_path / "single.jsonl"
    rated = [
        {"prompt": row["prompt"], "completion": row["chosen" if n % 2 else "rejected"], "label": n % 2 == 1}
        for n, row in enumerate(whole)
    ]
    single.write_text("".join(json.dumps(row) + "\n" for row in rated))
    kto, judge, small = tmp_path / "kto", tmp_path / "judge", tmp_path / "small"
    home.together(
        home.dpo(kto, base, single, more={"loss-type": "kto"}),
        home.reward(judge, base, pairs),
        home.reward(small, base, pairs, more={"tuner": "lora", "optim.lr": 0.02}),
    )
    for folder, first in ((kto, 0.5), (judge, None), (small, None)):
        logged = rows(folder, "train")
        assert first is None or logged[0]["loss"] == pytest.approx(first, rel=1e-5)
        assert logged[-1]["loss"] < 0.8 * logged[0]["loss"] and logged[-1]["accuracy"] > 0.9
        assert command.summary(folder)["valid_accuracy"] > 0.9
    config = json.loads((judge / "final_model" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"] and len(config["id2label"]) == 1
    names = load_file(judge / "final_model" / "model.safetensors").keys()
    assert "score.weight" in names and "lm_head.weight" not in names
    names = load_file(small / "final_model" / "adapter_model.safetensors").keys()
    assert "base_model.model.score.weight" in names and len(names) > 2
