"""Trainings in the studio's queue: stopped, continued, in two processes, and as the command line trains them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from e2e.home import Home
from unit.studio.serving import studio

STEPS = 40


def recipe(home: Home, out: Path) -> str:
    return f"""
tokenizer: {home.tokenizer}
model: {{depth: 2, width: 64}}
out: {out}
data: {{train: [{home.text}], cache: {home.cache}}}
batch: {{seq_len: 64, micro_batch_tokens: 256, global_batch_tokens: 512}}
schedule: {{max_steps: {STEPS}}}
save: {{every: 5}}
log: {{every: 1}}
device: {{type: cpu, nproc: 2}}
"""


def losses(out: Path) -> list[Any]:
    rows = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(row["step"], row["loss"]) for row in rows if row["kind"] == "train"]


def test_a_training_that_was_stopped_continues_bit_for_bit(home: Home, tmp_path: Path) -> None:
    with studio(tmp_path) as running:
        whole = running.post("/api/jobs", {"command": "pretrain", "text": recipe(home, tmp_path / "whole")})
        running.wait_for(whole["id"], "finished")
        stopped = running.post("/api/jobs", {"command": "pretrain", "text": recipe(home, tmp_path / "parts")})
        running.wait_for(stopped["id"], "running")
        running.wait_until(lambda: "saved" in running.get(f"/api/jobs/{stopped['id']}/log")["text"])
        running.post(f"/api/jobs/{stopped['id']}/stop", {})
        assert running.wait_for(stopped["id"], "stopped")["exit_code"] == 143
        assert len(losses(tmp_path / "parts")) < STEPS and list((tmp_path / "parts").glob("checkpoint-*"))
        running.post(f"/api/jobs/{stopped['id']}/restart", {})
        done = running.wait_for(stopped["id"], "finished")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert done["runs"] and done["exit_code"] == 0
    weights = [(tmp_path / name / "final_model" / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]
