"""The progress of a training in a notebook: what is shown, and where nothing is."""

from __future__ import annotations

import json
from pathlib import Path

from anabatic.api.notebook import NotebookProgress, find_display


def test_progress_of_a_training(tmp_path: Path) -> None:
    events = [
        {"event": "device"},
        {"event": "start", "step": 0, "steps": 40},
        {"event": "resume", "step": 10, "steps": 40},
    ]
    folder = tmp_path / "run <b>"
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    shown: list[str] = []
    progress = NotebookProgress(shown.append)
    progress.on_start(folder, {})
    assert 'max="40" value="10"' in shown[-1] and "run &lt;b&gt;: training, step 10 of 40" in shown[-1]
    progress.on_step(20, {"loss": 1.23456, "tokens_per_s": 5200.0, "eta_s": 65.0, "lr": 0.1})
    assert 'value="20"' in shown[-1] and "loss 1.2346 · 5.2K tokens/s · 1m05s left" in shown[-1]
    progress.on_step(30, {"loss": None, "reward": 0.5})
    progress.on_eval(30, {"valid_loss": 1.5})
    assert "loss 1.2346" in shown[-1] and "reward 0.500" in shown[-1] and "held-out loss 1.5000" in shown[-1]
    progress.on_end(40)
    assert "finished" in shown[-1] and "left" not in shown[-1] and "<b>" not in shown[-1]


def test_a_terminal_is_no_notebook() -> None:
    assert find_display() is None
