"""Rows that the studio shows before a training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabatic.core.errors import AnabaticError
from anabatic_studio import preview_process
from anabatic_testing.tiny_models import save_tiny_chat_model

pytestmark = pytest.mark.process


def make_model() -> None:
    save_tiny_chat_model(Path())
    Path("model").rename("MODEL")


def test_the_rows_are_those_that_the_job_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"question_text": "Q0?", "reply": "A0", "prompt": "WRONG", "response": "WRONG"}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    make_model()
    text = "model: MODEL\ndata:\n  train: [rows.jsonl]\n  columns: {query: question_text, response: reply}\n"
    shown = json.dumps(preview_process.preview_rows("sft", text))
    assert "Q0?" in shown and "A0" in shown and "WRONG" not in shown


@pytest.mark.parametrize("name", ["--help", "--config=rows.jsonl", '"\\0"', "-x"])
def test_names_are_never_options(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"rows": 1, "inputs": ["other"]}\n', encoding="utf-8")
    make_model()
    with pytest.raises(AnabaticError) as caught:
        preview_process.preview_rows("sft", f"model: MODEL\ndata: {{train: [{name}]}}\n")
    assert name.strip('"').replace("\\0", "NUL") in str(caught.value) or "x00" in str(caught.value)
