"""Pipelines as jobs: their stages and problems, their devices, and a run of one in the queue."""

from __future__ import annotations

import json

import pytest

from anabatic.config.loading import settings
from anabatic_studio import pipelines, planning
from unit.studio.serving import studio

TOKENIZER = "{{command: tokenizer train, title: First, job: {{vocab_size: 280, data: {{train: [{text}]}}}}}}"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("".join(f"the wind number {n} went up slope {n * 7919}\n" for n in range(300)), encoding="utf-8")
    return path


def two_stages(tmp_path, text, second="280"):
    one = TOKENIZER.format(text=text)
    return f"out: {tmp_path / 'runs' / 'both'}\nstages:\n  one: {one}\n  two: {one.replace('280', second)}\n"


def test_stages_are_described_and_a_wrong_one_is_a_problem(tmp_path, text):
    checked = planning.check_recipe("run", two_stages(tmp_path, text))
    assert checked["problems"] == []
    assert checked["stages"][0] == {"name": "one", "command": "tokenizer train", "title": "First", "done": False}
    (problem,) = planning.check_recipe("run", two_stages(tmp_path, text, "many"))["problems"]
    assert "vocab_size" in problem["message"] and "two" in problem["message"]


def test_a_variable_that_is_missing_is_one_problem_however_many_stages_use_it():
    stage = "{command: tokenizer train, job: {data: {train: ['${text}']}}}"
    recipe = f"out: o\nvars: {{text: ''}}\nstages:\n  one: {stage}\n  two: {stage}\n"
    (problem,) = planning.check_recipe("run", recipe)["problems"]
    assert problem["key"] == "vars.text" and "empty" in problem["message"]
    assert planning.check_recipe("run", "out: o\n")["problems"][0]["message"].startswith("stages is empty")


def test_a_pipeline_gets_the_devices_of_its_largest_stage():
    stage = "{{command: {}, job: {{{}}}}}"
    rows = [
        stage.format("tokenizer train", "data: {train: [a]}"),
        stage.format("sft", "model: m, data: {train: [a]}, device: {nproc: 2}"),
        stage.format("sft", "model: m, data: {train: [a]}, device: {nproc: 8, type: cpu}"),
    ]
    recipe = "out: o\nstages:\n" + "".join(f"  s{index}: {row}\n" for index, row in enumerate(rows))
    device = pipelines.find_device_settings(settings.parse_job("run", recipe, "recipe"))
    assert (device.type, device.nproc) == ("auto", 2)
    alone = "out: o\nstages:\n  a: {command: data stats, job: {inputs: [a]}}\n"
    assert pipelines.find_device_settings(settings.parse_job("run", alone, "recipe")) is None


@pytest.mark.process
def test_the_queue_runs_a_pipeline_and_skips_what_is_done(tmp_path, text):
    root = tmp_path / "runs"
    root.mkdir()
    recipe = two_stages(tmp_path, text)
    with studio(root) as running:
        job = running.post("/api/jobs", {"command": "run", "text": recipe})
        assert running.wait_for(job["id"], "finished")["exit_code"] == 0
        events = [json.loads(line) for line in (root / "both" / "pipeline.jsonl").read_text().splitlines()]
        assert [row["stage"] for row in events if row.get("state") == "done"] == ["one", "two"]
        checked = running.post("/api/recipe", {"command": "run", "text": recipe})
        assert [stage["done"] for stage in checked["stages"]] == [True, True]
        changed = recipe.replace(
            "two: {command: tokenizer train, title: First, job: {vocab_size: 280",
            "two: {command: tokenizer train, title: First, job: {vocab_size: 290",
        )
        assert changed != recipe
        again = running.post("/api/jobs", {"command": "run", "text": changed})
        running.wait_for(again["id"], "finished")
        log = running.get(f"/api/jobs/{again['id']}/log")["text"]
        assert "[1/2] one: skipped" in log and "[2/2] two: anabatic tokenizer train" in log
