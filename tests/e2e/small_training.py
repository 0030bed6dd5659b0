"""A small model with rows to train it on, and `anabatic.sft` of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anabatic
from anabatic_testing.tiny_models import save_tiny_chat_model


def make_place(folder: Path) -> Path:
    """Write `model` and `rows.jsonl`; return the folder."""
    save_tiny_chat_model(folder)
    rows = [{"query": f"the wind {number}", "response": "moves upward"} for number in range(200)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def train_small(place: Path, out: str, **options: Any) -> anabatic.Run:
    """Fine-tune the model of `make_place`."""
    run = anabatic.sft(model=place / "model", data=place / "rows.jsonl", out=place / out, **options)
    assert isinstance(run, anabatic.Run)
    return run
