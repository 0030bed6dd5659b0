"""A training and a generation without the folder `cpu_speed` give what they give with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anabatic_testing.tiny_models import save_tiny_chat_model
from house import tree

PLAIN = "import sys; sys.modules['anabatic.cpu_speed'] = None; "
RUN = "from anabatic.cli.app import main; main()"
WORDS = [
    *("--data", "rows.jsonl", "--tuner", "lora", "--schedule.max-steps", "4", "--batch.seq-len", "64"),
    *("--batch.micro-batch-tokens", "128", "--batch.global-batch-tokens", "128", "--device.type", "cpu"),
    *("--log.every", "1"),
]


def run_program(folder: Path, prefix: str, *words: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", prefix + RUN, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(tree.ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def read_losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.process
def test_losses_and_texts_are_the_same_without_the_folder(tmp_path: Path) -> None:
    model = save_tiny_chat_model(tmp_path)
    rows = [
        {"messages": [{"role": "user", "content": f"say {at}"}, {"role": "assistant", "content": f"{at} it is"}]}
        for at in range(64)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "asked.jsonl").write_text(json.dumps({"messages": rows[0]["messages"][:1]}) + "\n")
    losses, texts = [], []
    for name, prefix in (("fast", ""), ("plain", PLAIN)):
        run_program(tmp_path, prefix, "sft", "--model", model, *WORDS, "--out", name)
        losses.append(read_losses(tmp_path / name))
        infer = ("infer", "-m", model, "--inputs", "asked.jsonl", "-o", f"{name}.jsonl", "--device.type", "cpu")
        run_program(tmp_path, prefix, *infer, "--sampling.temperature", "0", "--sampling.max-new-tokens", "8")
        texts.append((tmp_path / f"{name}.jsonl").read_text(encoding="utf-8"))
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert texts[0] == texts[1]


def test_one_file_alone_imports_the_folder() -> None:
    """`core/cpu_info.py` loads it by name, so that the folder can be deleted."""
    folder = tree.ROOT / "src" / "anabatic" / "cpu_speed"
    door = tree.ROOT / "src" / "anabatic" / "core" / "cpu_info.py"
    found = [
        f"{tree.name(path)}: {line.strip()}"
        for path in tree.sources()
        if folder not in path.parents and path != door
        for line in path.read_text(encoding="utf-8").splitlines()
        if "anabatic.cpu_speed" in line
    ]
    assert not found, found
