"""How much code a plain training goes through: a reader has to know that many files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anabatic.testing.tiny_models import save_tiny_chat_model
from house import tree
from house.limits import LIMITS

PROGRAM = """
import json, os, sys
import anabatic
root = os.path.dirname(anabatic.__file__) + os.sep
optimized = 1  # a flag of functions; bodies of classes and modules do not have it (Python's inspect, CO_OPTIMIZED)
files = set()
def record_call(frame, event, argument):
    code = frame.f_code
    name = code.co_filename
    if event == "call" and code.co_flags & optimized and name.startswith(root) and name.endswith(".py"):
        files.add(name[len(root):])
from anabatic.cli.app import main
sys.setprofile(record_call)
try:
    main(sys.argv[2:])
except SystemExit as end:
    code = end.code
sys.setprofile(None)
with open(sys.argv[1], "w") as file:
    json.dump([code or 0, sorted(files)], file)
"""


@pytest.mark.process
def test_files_of_a_fine_tuning(tmp_path: Path) -> None:
    """Four steps of LoRA on a CPU; functions that run in the main thread of the first process."""
    model = save_tiny_chat_model(tmp_path)
    rows = [
        {"messages": [{"role": "user", "content": f"say {at}"}, {"role": "assistant", "content": f"{at} it is"}]}
        for at in range(64)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["sft", "--model", model, "--data", "rows.jsonl", "--tuner", "lora", "--schedule.max-steps", "4"]
    words += ["--batch.seq-len", "64", "--batch.micro-batch-tokens", "128", "--batch.global-batch-tokens", "128"]
    words += ["--device.type", "cpu", "--out", "out"]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "files.json", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tree.ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    code, files = json.loads((tmp_path / "files.json").read_text())
    assert code == 0 and "recipes/training/sft.py" in files and "train/step.py" in files, run.stderr
    assert len(files) <= LIMITS["sft_files"], f"{len(files)} files:\n  " + "\n  ".join(files)
