"""Plug-ins of an installed package, used by the commands: reader, tracker, callback, reward, evaluation task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anabatic_testing.tiny_models import save_tiny_chat_model
from unit.plugin_package import install_package

SHORT = "--batch.seq-len 64 --batch.micro-batch-tokens 128 --batch.global-batch-tokens 256 --device.type cpu"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugins")
    install_package(folder / "site")
    save_tiny_chat_model(folder)
    (folder / "data").mkdir()
    (folder / "data" / "a.lines").write_text("".join(f"the wind {number}\n" for number in range(100)))
    rows = [{"question": "the", "choices": ["wind", "hill"], "answer": number % 2} for number in range(4)]
    (folder / "site" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(place: Path, line: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(place / "site"), "ANABATIC_CACHE": str(place / "cache")}
    command = [sys.executable, "-m", "anabatic", *line.split()]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_training_with_reader_tracker_and_callback(place: Path, nproc: int) -> None:
    done = run(
        place,
        f"sft --model model --data data --tuner lora --out run-{nproc} --schedule.max-steps 3 {SHORT} "
        f"--log.sinks made --log.callbacks recorder --device.nproc {nproc}",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "98 rows as query and response" in done.stderr
    told = (place / "site" / "told.jsonl").read_text().splitlines()
    (place / "site" / "told.jsonl").unlink()
    kinds = [json.loads(line)[0] for line in told]
    assert kinds[0] == "open" and kinds.count("step") == 2 and kinds.count("save") == 1 and kinds[-1] == "close"


def test_rows_are_tokenized_again_with_another_version_of_the_reader(place: Path) -> None:
    line = (
        f"sft --model model --data data --tuner lora --out versions --schedule.max-steps 1 --save.resume never {SHORT}"
    )
    assert run(place, line).returncode == 0
    known = set((place / "cache" / "shards").iterdir())
    assert run(place, line).returncode == 0 and set((place / "cache" / "shards").iterdir()) == known
    metadata = place / "site" / "made-plugin-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 2.0"))
    assert run(place, line).returncode == 0 and set((place / "cache" / "shards").iterdir()) > known


def test_a_reinforcement_learning_with_a_reward_of_the_package(place: Path) -> None:
    done = run(
        place,
        "rl --model model --data task:spelling#40 --rewards vowels --out rl --examples-per-step 2 --num-samples 2 "
        "--device-batch-size 2 --schedule.max-steps 1 --sampling.max-new-tokens 8 --batch.seq-len 64 --device.type cpu",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (place / "rl" / "metrics.jsonl").read_text().splitlines()]
    assert any(row.get("reward", 0) != 0 for row in rows if row["kind"] == "train")


def test_an_evaluation_of_a_task_of_the_package(place: Path) -> None:
    done = run(place, "eval model --tasks made --device.type cpu --out eval")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "made" in (place / "eval" / "eval.json").read_text()


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("rl --model model --data task:spelling#40 --rewards vowel --out x", 'Did you mean "vowels"'),
        ("sft --model model --data data --out x --log.sinks mad", 'Did you mean "made"'),
        ("sft --model model --data data --out x --log.callbacks recoder --device.nproc 2", 'Did you mean "recorder"'),
        ("sft --model model --data data --out x --log.callbacks nowhere.py:Mine --device.nproc 2", "no such file"),
        ("eval model --tasks mad --device.type cpu", "made"),
    ],
)
def test_names_that_no_package_has(place: Path, line: str, hint: str) -> None:
    done = run(place, line)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and hint in done.stderr
    assert not (place / "x").exists()
