"""Reinforcement learning through the command, in one process and in two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from safetensors.torch import load_file

from anabatic.core import json_reader
from anabatic_testing.multiprocess import find_free_port
from e2e import command
from e2e.home import Home
from suite.fake_servers import FakeVllm, running

MINE = """
def vowels(text, row):
    assert row["tokens"] <= 8 and row["question"]
    return sum(letter in "aeiou" for letter in text) / 8
"""


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in json_reader.read_json_lines(folder / "metrics.jsonl") if row["kind"] == kind]


def test_two_processes_equal_one(home: Home, base: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    folders = tmp_path / "one", tmp_path / "two"
    more = {"updates": 2, "kl-coef": 0.01, "eval.samples": 2, "tuner": "lora"}
    home.together(*(home.rl(out, base, mine, n, more) for n, out in enumerate(folders, start=1)))
    one, two = (rows(folder, "train") for folder in folders)
    assert len(one) == len(two) == 4 and "valid_pass@2" in rows(folders[1], "eval")[0]
    for key in ("reward", "reward/vowels", "reward/length", "answer_tokens", "truncated", "targets", "flat_groups"):
        assert [row[key] for row in two] == pytest.approx([row[key] for row in one]), key
    for key in ("loss", "grad_norm", "entropy", "logprob_diff", "kl"):
        assert [row[key] for row in two] == pytest.approx([row[key] for row in one], rel=5e-3, abs=1e-4), key
    for key in ("valid_reward", "valid_pass@1"):
        values = [[row[key] for row in rows(folder, "eval")] for folder in folders]
        assert values[0] == pytest.approx(values[1]) and len(values[0]) == 2
    weights = [load_file(folder / "final_model" / "adapter_model.safetensors") for folder in folders]
    for name, weight in weights[0].items():
        assert weight.numpy() == pytest.approx(weights[1][name].numpy(), rel=1e-2, abs=1e-4), name
    assert command.summary(folders[1])["finished"] and (folders[1] / "report.html").is_file()


def test_a_server_answers_for_divided_weights(home: Home, base: Path, tmp_path: Path) -> None:
    """Two processes under zero3, which the engine of the process refuses, learn as one process does."""
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    model = base / "final_model"
    with running(FakeVllm(model)) as one, running(FakeVllm(model)) as two:
        served = {"rollout.engine": "vllm", "python": False}
        folders = tmp_path / "one", tmp_path / "two"
        home.anabatic(*home.rl(folders[0], model, mine, 1, served | {"rollout.url": one}))
        more = served | {"rollout.url": [one, two], "parallel.strategy": "zero3"}
        home.anabatic(*home.rl(folders[1], model, mine, 2, more))
    alone, divided = (rows(folder, "train") for folder in folders)
    for key in ("reward", "answer_tokens", "loss", "grad_norm"):
        assert [row[key] for row in divided] == pytest.approx([row[key] for row in alone], rel=5e-3, abs=1e-4), key
    assert all(row["sync_logprob_diff"] < 1e-3 for row in divided)


KEY = "sk-e2e"


@contextmanager
def own_server(home: Home, model: Path, folder: Path, port: int | None = None) -> Iterator[tuple[str, command.Running]]:
    """Yield the address of `anabatic serve`, which takes weights from `folder`, and its process."""
    port = port or find_free_port()
    words = ("--port", port, "--device.type", "cpu", "--device.dtype", "fp32", "--weights-folder", folder)
    keyed = replace(home, variables={**home.variables, "ANABATIC_API_KEYS": KEY})
    server = keyed.start("serve", model, *words, "--device.threads", 1)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return httpx2.get(f"{url}/health", timeout=5).status_code == 200
        except httpx2.TransportError:  # it does not listen yet
            return False

    try:
        command.wait_for(server, answers)
        yield url, server
    finally:
        command.kill(server)


def test_our_own_server_answers(home: Home, base: Path, tmp_path: Path) -> None:
    """Adapters, then all weights: one server after the other learns what the engine of the process learns."""
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    keyed = replace(home, variables={**home.variables, "OPENAI_API_KEY": KEY})
    model = base / "final_model"
    with own_server(home, model, tmp_path) as (url, _):
        for tuner in ("lora", "full"):
            more = {"tuner": tuner, "python": False}
            folders = tmp_path / f"{tuner}-own", tmp_path / f"{tuner}-served"
            served = {"rollout.engine": "anabatic", "rollout.url": url}
            home.anabatic(*home.rl(folders[0], model, mine, 1, more))
            keyed.anabatic(*home.rl(folders[1], model, mine, 1, more | served))
            own, theirs = (rows(folder, "train") for folder in folders)
            for key in ("reward", "answer_tokens", "loss", "grad_norm"):
                wanted = pytest.approx([row[key] for row in own], rel=1e-4, abs=1e-6)
                assert [row[key] for row in theirs] == wanted, (tuner, key)
            assert all(row["sync_logprob_diff"] < 1e-4 for row in theirs)


def test_a_server_that_is_killed_is_replaced(home: Home, base: Path, tmp_path: Path) -> None:
    """kill -9 for one of two servers, which comes back: each answer counts once, and is that of an undisturbed run."""
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    keyed = replace(home, variables={**home.variables, "OPENAI_API_KEY": KEY})
    model = base / "final_model"
    more: dict[str, object] = {"python": False, "schedule.max-steps": 6}
    with own_server(home, model, tmp_path) as (one, first), own_server(home, model, tmp_path) as (two, _):
        served = {"rollout.engine": "anabatic", "rollout.url": [one, two]}
        training = keyed.start(*keyed.rl(tmp_path / "served", model, mine, 1, more | served))
        command.wait_for_step(training, tmp_path / "served", 2)
        command.kill(first)
        with own_server(home, model, tmp_path, int(one.rpartition(":")[2])):
            told = command.end(training)
        home.anabatic(*home.rl(tmp_path / "own", model, mine, 1, more))
    assert f"{one} is left out until it answers again" in told.err
    own, theirs = (rows(tmp_path / name, "train") for name in ("own", "served"))
    for key in ("reward", "answer_tokens", "loss", "grad_norm"):
        assert [row[key] for row in theirs] == pytest.approx([row[key] for row in own], rel=1e-4, abs=1e-6), key
