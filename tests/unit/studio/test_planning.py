"""A recipe while it is written: its values, its problems with their lines, its plan."""

from __future__ import annotations

import pytest

from anabatic.core.errors import ConfigError
from anabatic_studio import planning


@pytest.mark.parametrize(
    ("text", "line", "key", "message"),
    [
        ("model: x\nbatch:\n  seq_len: much\n", 3, "batch.seq_len", "whole number"),
        ("modell: x\n", 1, "modell", "modell"),
        ("model: [\n", 2, "", "not YAML"),
        ("a: 1\na: 2\n", 2, "", "twice"),
        ("- a\n", None, "", "not settings"),
        ("model: x\ndata: {train: [nowhere.jsonl]}\n", 2, "data.train", "nowhere.jsonl"),
        ("out: y\nmodel: ./no-folder\ndata: {train: ['task:all']}\n", 2, "model", "no-folder"),
    ],
)
def test_problems_name_line_and_setting(text, line, key, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problems = planning.check_recipe("sft", text)["problems"]
    problem = next(row for row in problems if message in row["message"])
    assert problem["line"] == line
    assert key in ("", problem["key"])


def test_values_are_those_of_the_text():
    values = planning.check_recipe("pretrain", "model: {depth: 4}\ndata:\n  train: [a, b]\n")["values"]
    assert values == {"model.depth": 4, "data.train": ["a", "b"]}


def test_changes_add_replace_and_remove():
    text = planning.apply_changes("model: a\nbatch:\n  seq_len: 5\n", {"model": "b", "batch.seq_len": None, "out": "o"})
    assert text == "model: b\nout: o\n"
    with pytest.raises(ConfigError):
        planning.apply_changes("- a\n", {"model": "b"})


def test_a_plan_has_memory_and_time_and_grows_with_the_model():
    recipe = "model: {{depth: {}}}\ntokenizer: t\ndata: {{train: [a.txt]}}\n"
    plans = [planning.plan_recipe("pretrain", recipe.format(depth), "Ascend910B3") for depth in (4, 12)]
    assert [plan["chip"] for plan in plans] == ["Ascend910B3"] * 2
    assert plans[0]["needs_bytes"] < plans[1]["needs_bytes"] < plans[1]["room_bytes"]
    assert plans[0]["step_seconds"] < plans[1]["step_seconds"]
    assert planning.plan_recipe("eval", "model: a\n") == {}
    assert "no chip" in planning.plan_recipe("pretrain", recipe.format(4), "910X")["error"]


def test_a_suggested_folder_is_free(tmp_path):
    (tmp_path / "sft-1").mkdir()
    assert planning.suggest_out(tmp_path, "sft", {str(tmp_path / "sft-2")}) == str(tmp_path / "sft-3")
    assert planning.suggest_out(tmp_path, "classify train") == str(tmp_path / "classify-train-1")
