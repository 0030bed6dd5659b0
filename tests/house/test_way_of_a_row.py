"""The code that a plain training goes through: the files that a reader has to know, and how often the way climbs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from anabatic_testing.tiny_models import save_tiny_chat_model
from house import tree
from house.limits import LIMITS

FIRST_CALLS = 400
"""Calls of a recipe in which its climbs are counted."""
ROOMS = [set(re.split(r"[ :|]+", layer)) for layer in tree.read_layers()]
"""Rooms, highest first."""
IMPORT_HOOKS = ("cpu_speed/quick_imports.py",)
"""Called by Python's imports, not by code."""
PROGRAM = """
import json, os, sys
import anabatic
root = os.path.dirname(anabatic.__file__) + os.sep
optimized = 1  # a flag of functions; bodies of classes and modules do not have it (Python's inspect, CO_OPTIMIZED)
calls = []
def record_call(frame, event, argument):
    code = frame.f_code
    name = code.co_filename
    if event == "call" and code.co_flags & optimized and name.startswith(root) and name.endswith(".py"):
        calls.append(name[len(root):])
from anabatic.cli.app import main
sys.setprofile(record_call)
try:
    main(sys.argv[2:])
except SystemExit as end:
    code = end.code
sys.setprofile(None)
with open(sys.argv[1], "w") as file:
    json.dump([code or 0, calls], file)
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The file of each function that four steps of LoRA on a CPU run, in the main thread of the first process."""
    folder = tmp_path_factory.mktemp("row")
    model = save_tiny_chat_model(folder)
    rows = [
        {"messages": [{"role": "user", "content": f"say {at}"}, {"role": "assistant", "content": f"{at} it is"}]}
        for at in range(64)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["sft", "--model", model, "--data", "rows.jsonl", "--tuner", "lora", "--schedule.max-steps", "4"]
    words += ["--batch.seq-len", "64", "--batch.micro-batch-tokens", "128", "--batch.global-batch-tokens", "128"]
    words += ["--device.type", "cpu", "--device.threads", "1", "--out", "out"]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, folder / "calls.json", *words],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(tree.ROOT / "src"),
            "ANABATIC_CACHE": str(folder / "cache"),
            "ANABATIC_MEMORY_DIR": str(folder / "memory"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    code, found = json.loads((folder / "calls.json").read_text())
    assert code == 0 and "recipes/training/sft.py" in found and "train/step.py" in found, run.stderr
    return list(found)


@pytest.mark.process
def test_files_of_a_fine_tuning(calls: list[str]) -> None:
    files = sorted({*calls})
    assert len(files) <= LIMITS["sft_files"], f"{len(files)} files:\n  " + "\n  ".join(files)


@pytest.mark.process
def test_climbs_of_a_fine_tuning(calls: list[str]) -> None:
    """A climb is a call whose file is in a higher room than that of the call before it: the reader goes back up.

    The first calls of the recipe count, without the hooks of Python's imports, which nobody calls.
    """
    way = [file for file in calls if file not in IMPORT_HOOKS]
    way = way[way.index("recipes/training/sft.py") :][:FIRST_CALLS]
    climbs = [f"{a} -> {b}" for a, b in zip(way, way[1:], strict=False) if find_level(a) < find_level(b)]
    assert len(climbs) <= LIMITS["sft_climbs"], f"{len(climbs)} climbs:\n  " + "\n  ".join(climbs)


def find_level(file: str) -> int:
    """Return how high the room of a file is in the contract of the layers."""
    room = file.partition("/")[0]
    return -next(at for at, rooms in enumerate(ROOMS) if room in rooms)
