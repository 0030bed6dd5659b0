"""An evaluation dealt over two processes: the figures and answers of one, in one file, known from then on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabatic.config.evaluate import EvalJob
from anabatic.config.sections.common import Data
from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.core.errors import ConfigError
from anabatic.evals.answer_cache import AnswerCache, rank_cache_path
from anabatic.recipes import evaluate
from anabatic_testing.multiprocess import spawn_ranks

CPU = DeviceConfig(type="cpu", dtype="fp32", threads=1)
TASK = """
data: {files: [rows.jsonl]}
prompt: "{{ words }} and"
choices: ["up", "down", "to the left", "{{ words }}"]
answer: "{{ right }}"
"""


def job(root: Path, run_folder: Path, out: str) -> EvalJob:
    return EvalJob(
        model=str(run_folder),
        tasks=[str(root / "winds.yaml"), "task:spelling#7"],
        max_new_tokens=5,
        batch_size=3,
        data=Data(valid=[str(root / "text.txt")], cache=str(root / "shards")),
        batch_tokens=150,
        seq_len=64,
        out=str(root / out),
        device=CPU,
    )


def measure(root: Path, run_folder: Path) -> None:
    """What each of the processes does."""
    evaluate.run(job(root, run_folder, "two"))


@pytest.mark.process
def test_two_processes_find_what_one_finds(tmp_path, run_folder, monkeypatch, capsys):
    rows = [{"words": "the wind moves " * (n % 5 + 1), "right": n % 4} for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "winds.yaml").write_text(TASK)
    (tmp_path / "text.txt").write_text("the wind moves upward along the slope\n\n" * 40)
    monkeypatch.setenv("ANABATIC_CACHE", str(tmp_path / "one-cache"))
    evaluate.run(job(tmp_path, run_folder, "one"))
    monkeypatch.setenv("ANABATIC_CACHE", str(tmp_path / "two-cache"))
    spawn_ranks(measure, 2, tmp_path, run_folder)
    one, two = (read(tmp_path / out / "eval.json") for out in ("one", "two"))
    assert two == one and set(one["tasks"]) == {"winds", "spelling"} and one["bits_per_byte"]["gzip9"] > 0
    samples = [(tmp_path / out / "samples.jsonl").read_bytes() for out in ("one", "two")]
    assert samples[0] == samples[1] and samples[0].count(b"\n") == 37
    assert len(list((tmp_path / "two-cache" / "evals").iterdir())) == 1
    evaluate.run(job(tmp_path, run_folder, "again"))
    again = json.loads((tmp_path / "again" / "eval.json").read_text())
    assert [task["known"] for task in again["tasks"].values()] == [120, 7]


def read(path: Path) -> dict:
    """eval.json without what differs between two runs of the same: the time."""
    found = json.loads(path.read_text())
    for task in found["tasks"].values():
        task.pop("seconds", None)
    return found


def test_answers_of_a_process_that_was_killed_are_taken_over(tmp_path):
    path = tmp_path / "store.jsonl"
    rank_cache_path(path, 1).write_text('{"a": [1.5, true, 2]}\n{"b": "half')
    store = AnswerCache(path)
    assert store.get_answer("a") == [1.5, True, 2] and store.get_answer("b") is None
    store.close()
    assert [one.name for one in tmp_path.iterdir()] == ["store.jsonl"]
    for read_it in (True, False):
        rank_cache_path(path, 3).write_text('{"c": [1.0, true, 2]}\n')
        store = AnswerCache(path, read_it)
        assert [store.get_answer(name) is not None for name in "ac"] == [read_it] * 2
        store.close()
        assert not rank_cache_path(path, 3).exists()


def test_an_endpoint_is_asked_by_one_process(tmp_path, run_folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="endpoint is given, and 2 processes"):
        evaluate.run(EvalJob(model=str(run_folder), tasks=["task:spelling#2"], endpoint="http://127.0.0.1:9"))
