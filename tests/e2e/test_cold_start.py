"""What a training loads that starts cold, in one process on a processor: no compiler, no sharded tensors, no sympy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from anabatic.core import json_reader
from e2e.small_training import make_place

pytestmark = pytest.mark.slow

HEAVY = {
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "sympy",
    "accelerate",
}
PROGRAM = """
import sys
from anabatic.cli.app import main
try:
    main()
finally:
    print(*sys.modules, sep="\\n")
"""


@pytest.mark.parametrize("tuner", ["lora", "full"])
def test_training_with_checkpoint_and_model_loads_nothing_heavy(tmp_path: Path, tuner: str) -> None:
    place = make_place(tmp_path)
    options = {
        "model": place / "model",
        "data.train": place / "rows.jsonl",
        "out": place / "run",
        "tuner": tuner,
        "device.type": "cpu",
        "batch.seq-len": 64,
        "batch.micro-batch-tokens": 64,
        "batch.global-batch-tokens": 64,
        "schedule.max-steps": 2,
    }
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "sft", *words], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert {"torch", "transformers.modeling_utils", "torch.distributed.checkpoint"} <= loaded
    assert not loaded & HEAVY
    assert json_reader.read_json_file(place / "run" / "summary.json")["finished"] is True
    assert (place / "run" / "checkpoint-2" / "manifest.json").is_file()
