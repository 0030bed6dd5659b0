"""Generated tasks through the engine, and the `eval` recipe from the job to eval.json."""

from __future__ import annotations

import json
import logging

import pytest

from anabatic.config.evaluate import EvalJob
from anabatic.config.shared import Data
from anabatic.config.shared import Device as DeviceConfig
from anabatic.core.errors import ConfigError, DataError
from anabatic.data import tasks
from anabatic.data import tokenizer as tokenizers
from anabatic.evals import generative
from anabatic.infer.engine import Engine
from anabatic.infer.sampling import Sampling
from anabatic.models.hf import load_model
from anabatic.recipes import evaluate

CPU = DeviceConfig(type="cpu", dtype="fp32", threads=1)


def load(run_folder):
    import torch

    folder = run_folder / "final_model"
    return load_model(folder, torch.device("cpu")), tokenizers.load(folder)


@pytest.mark.parametrize("name", list(tasks.TASKS))
def test_right_replies_score_one_and_the_best_constant_scores_chance(name):
    rows = list(tasks.rows(name, "test", tasks.CHANCE_ROWS, 0))
    right = [row.messages[1]["content"] for row in rows]
    perfect = generative.score(name, rows, right, show=2)
    assert (perfect.accuracy, perfect.n, len(perfect.examples)) == (1.0, len(rows), 2)
    constants = [generative.score(name, rows, [reply] * len(rows)).accuracy for reply in sorted(set(right))[:40]]
    assert max(constants) <= perfect.chance


def test_the_replies_are_the_engines(run_folder):
    model, tokenizer = load(run_folder)
    scores = generative.evaluate(
        model, tokenizer, {"spelling": 5, "identity": 3}, max_new_tokens=6, batch_size=2, show=5
    )
    assert list(scores) == ["spelling", "identity"]
    engine = Engine(model, tokenizer, max_batch=1, max_len=200)
    for name, number in (("spelling", 5), ("identity", 3)):
        rows = list(tasks.rows(name, "test", number, 0))
        prompts = [generative.prompt_of(tokenizer, row) for row in rows]
        expected = engine.generate(prompts, Sampling(temperature=0.0, max_new_tokens=6))
        assert [example.reply for example in scores[name].examples] == [one.text for one in expected]
        assert scores[name].n == number


def test_the_prompt_is_the_rendered_question(run_folder):
    _, tokenizer = load(run_folder)
    row = next(tasks.rows("arithmetic", "test", 1, 0))
    text = tokenizer.decode(generative.prompt_of(tokenizer, row))
    assert text == f"<|im_start|>user\n{row.messages[0]['content']}<|im_end|>\n<|im_start|>assistant\n"


def test_eval_writes_and_prints_both_parts(run_folder, tmp_path, capsys):
    (tmp_path / "valid.txt").write_text("Some text that is held out, with ümlauts. " * 20)
    evaluate.run(
        EvalJob(
            model=str(run_folder),
            data=Data(valid=[str(tmp_path / "valid.txt")], cache=str(tmp_path / "cache")),
            tasks=["task:all#4"],
            max_new_tokens=4,
            show=1,
            device=CPU,
        )
    )
    out = capsys.readouterr().out
    assert "bits per byte" in out and "gzip -9" in out and "chance" in out
    written = json.loads((run_folder / "eval.json").read_text())
    assert written["bits_per_byte"]["bytes"] == (tmp_path / "valid.txt").stat().st_size
    assert list(written["tasks"]) == list(tasks.TASKS)
    for name, task in written["tasks"].items():
        assert task["n"] == 4
        assert task["chance"] == tasks.chance(name)
        assert set(task["examples"][0]) == {"prompt", "reply", "answer", "correct"}


def test_the_held_out_share_of_the_training_text_is_measured(run_folder, tmp_path):
    (tmp_path / "train.txt").write_text("".join(f"line {n} of a file that is cut\n" for n in range(200)))
    data = Data(train=[str(tmp_path / "train.txt")], valid_fraction=0.1, cache=str(tmp_path / "cache"))
    job = EvalJob(model=str(run_folder), data=data, out=str(tmp_path / "out"), device=CPU)
    evaluate.run(job)
    num_bytes = json.loads((tmp_path / "out" / "eval.json").read_text())["bits_per_byte"]["bytes"]
    assert num_bytes == pytest.approx(0.1 * (tmp_path / "train.txt").stat().st_size, rel=0.2)


def test_a_model_outside_a_run_folder_gets_no_file_and_that_is_said(run_folder, tmp_path, caplog, capsys):
    import shutil

    shutil.copytree(run_folder / "final_model", tmp_path / "model")
    with caplog.at_level(logging.INFO, logger="anabatic"):
        evaluate.run(EvalJob(model=str(tmp_path / "model"), tasks=["task:identity#1"], max_new_tokens=2, device=CPU))
    assert "eval.json is not written" in caplog.text
    assert not list(tmp_path.rglob("eval.json"))
    assert "identity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("specs", "message"),
    [(["task:spelin"], 'no task "spelin"'), (["corpus.txt"], "is not a task"), (["task:all#0"], "not a number")],
)
def test_bad_tasks(specs, message):
    with pytest.raises(ConfigError, match=message):
        evaluate.wanted_tasks(specs)


def test_all_means_each_and_later_sources_win():
    assert evaluate.wanted_tasks(["task:all", "task:spelling#7"]) == {
        "spelling": 7,
        "counting": 200,
        "arithmetic": 200,
        "identity": 200,
    }


def test_a_tokenizer_without_template_is_refused(run_folder):
    _, tokenizer = load(run_folder)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        generative.prompt_of(tokenizer, next(tasks.rows("spelling", "test", 1, 0)))


def test_several_processes_are_refused(run_folder):
    with pytest.raises(ConfigError, match=r"device\.nproc is 2"):
        evaluate.run(EvalJob(model=str(run_folder), tasks=["task:all"], device=DeviceConfig(nproc=2)))
