"""Models and data files that the page offers."""

from __future__ import annotations

import json

from anabatic_studio import pickers
from unit.fake_runs import write_training_run


def test_models_of_runs_folders_and_the_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    for folder, name, content in (
        ("runs/a/final_model", "config.json", {"model_type": "qwen3"}),
        ("runs/b/best_model", "adapter_config.json", {"base_model_name_or_path": "Qwen/Qwen3-8B"}),
        ("runs/a/checkpoint-5", "config.json", {"model_type": "qwen3"}),
        ("models/llama", "config.json", {"model_type": "llama"}),
        ("models/other", "config.json", {"name": "a web page's"}),
        ("models/list", "config.json", [1]),
        ("hf/hub/models--Qwen--Qwen3-0.6B/snapshots/abc", "config.json", {"model_type": "qwen3"}),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / name).write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "models" / "torn").mkdir()
    (tmp_path / "models" / "torn" / "config.json").write_text("{", encoding="utf-8")
    found = {row["path"]: row for row in pickers.list_models(tmp_path / "runs", [tmp_path / "models"])}
    assert found.keys() == {"runs/a/final_model", "runs/b/best_model", "models/llama", "Qwen/Qwen3-0.6B"}
    assert found["runs/b/best_model"]["adapter"] and found["runs/b/best_model"]["type"] == "Qwen/Qwen3-8B"


def test_data_files_without_runs_and_hidden_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_training_run(tmp_path / "runs" / "a", steps=3)
    for name in ("a.jsonl", "b.csv.gz", "c.PARQUET", "d.py", ".e.jsonl.swp", "sub/f.txt.zst", ".git/g.txt", "sub/h.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x", encoding="utf-8")
    found = pickers.list_data_files([tmp_path, tmp_path / "sub"], tmp_path / "runs")
    assert [row["path"] for row in found] == ["a.jsonl", "b.csv.gz", "c.PARQUET", "sub/f.txt.zst"]
    assert pickers.list_data_files([tmp_path / "nowhere"], tmp_path) == []
