"""Generated tasks through the engine, and the `eval` recipe from the job to its files."""

from __future__ import annotations

import json
import logging

import pytest

from anabatic.config.evaluate import EvalJob
from anabatic.config.sections.common import Data
from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.builtin import synthetic_tasks
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.data.tokenizer.hf_folder import encode_chat
from anabatic.evals.item_records import compute_chance
from anabatic.evals.tasks import registry
from anabatic.evals.tasks.graders import grade_replies, is_correct
from anabatic.evals.tasks.items import ContextPair, EvalItem
from anabatic.infer.engine import Engine
from anabatic.infer.sampling import Sampling
from anabatic.models.pretrained import load_model
from anabatic.recipes import evaluate

CPU = DeviceConfig(type="cpu", dtype="fp32", threads=1)


def load(run_folder):
    import torch

    folder = run_folder / "final_model"
    return load_model(folder, torch.device("cpu")), tokenizers.load_tokenizer(folder)


@pytest.mark.process
@pytest.mark.parametrize("name", list(synthetic_tasks.TASKS))
def test_right_replies_score_one_and_the_best_constant_scores_chance(name):
    (planned,) = registry.plan_tasks([f"task:{name}"]).tasks
    rows = list(synthetic_tasks.generate_task_rows(name, "test", synthetic_tasks.CHANCE_ROWS, 0))
    items = [EvalItem(n, "", [ContextPair(row.messages[:-1])], answer=row.answer) for n, row in enumerate(rows)]
    right = [row.messages[1]["content"] for row in rows]
    assert all(record["right"]["exact"] for record in grade_replies(planned.task, items, right))
    for reply in sorted(set(right))[:8]:
        assert sum(is_correct(planned.task, item, reply) for item in items) / len(items) <= compute_chance(
            planned.task, items
        )


def test_the_replies_are_the_engines(run_folder, tmp_path):
    job = EvalJob(
        model=str(run_folder),
        tasks=["task:spelling#5,task:identity#3"],
        max_new_tokens=6,
        batch_size=2,
        show=9,
        out=str(tmp_path),
        device=CPU,
    )
    evaluate.run(job)
    written = json.loads((tmp_path / "eval.json").read_text())["tasks"]
    assert list(written) == ["spelling", "identity"]
    model, tokenizer = load(run_folder)
    engine = Engine(model, tokenizer, max_batch=1, max_len=200)
    for name, number in (("spelling", 5), ("identity", 3)):
        rows = list(synthetic_tasks.generate_task_rows(name, "test", number, 0))
        prompts = [encode_chat(tokenizer, row.messages[:-1]) for row in rows]
        expected = engine.generate(prompts, Sampling(temperature=0.0, max_new_tokens=6))
        assert [example["reply"] for example in written[name]["examples"]] == [one.text for one in expected]
        assert [example["prompt"] for example in written[name]["examples"]] == [r.messages[0]["content"] for r in rows]
        assert written[name]["n"] == number


@pytest.mark.process
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
    assert "bits per byte" in out and "gzip -9" in out and "baseline" in out
    written = json.loads((run_folder / "eval.json").read_text())
    assert written["bits_per_byte"]["bytes"] == (tmp_path / "valid.txt").stat().st_size
    assert list(written["tasks"]) == list(synthetic_tasks.TASKS)
    for name, task in written["tasks"].items():
        assert task["n"] == 4
        assert task["chance"] == synthetic_tasks.chance_accuracy(name)
        assert set(task["examples"][0]) == {"prompt", "reply", "answer", "correct"}
    assert len((run_folder / "samples.jsonl").read_text().splitlines()) == 16
    assert "Wilson" in (run_folder / "eval.md").read_text()


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
    [
        (["task:spelin"], 'no task "spelin"'),
        (["corpus.txt"], 'no task "corpus.txt"'),
        (["arc_esy"], 'Did you mean "arc_easy"'),
        (["task:all#0"], "not a number"),
        (["none.yaml"], "does not exist"),
    ],
)
def test_bad_tasks(specs, message):
    with pytest.raises(ConfigError, match=message):
        registry.plan_tasks(specs)


def test_all_means_each_and_later_sources_win():
    plan = registry.plan_tasks(["task:all", "task:spelling#7"])
    assert {one.task.name: one.limit for one in plan.tasks} == {
        "spelling": 7,
        "counting": None,
        "arithmetic": None,
        "identity": None,
    }


def test_what_a_model_cannot_be_asked_is_refused(run_folder, tmp_path, caplog):
    import shutil

    shutil.copytree(run_folder / "final_model", tmp_path / "model")
    for name in ("chat_template.jinja",):
        (tmp_path / "model" / name).unlink(missing_ok=True)
    config = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    whole = "kind: perplexity\nprompt: '{{ t }}'\ndata: {files: [t.csv]}\n"
    (tmp_path / "whole.yaml").write_text(whole)
    (tmp_path / "t.csv").write_text("t\na b\n")
    tasks = [str(tmp_path / "whole.yaml"), "task:all"]
    with caplog.at_level(logging.INFO, logger="anabatic"), pytest.raises(ConfigError, match="no chat template"):
        evaluate.run(EvalJob(model=str(tmp_path / "model"), tasks=tasks, device=CPU))
    assert "whole:" not in caplog.text  # what cannot be asked is said before anything is
    (tmp_path / "long.yaml").write_text(whole.replace("perplexity", "generate") + "answer: x\nmax_new_tokens: 256\n")
    with pytest.raises(DataError, match="a reply of 256 tokens leaves no room for a question, the context has 256"):
        evaluate.run(EvalJob(model=str(tmp_path / "model"), tasks=[str(tmp_path / "long.yaml")], device=CPU))
