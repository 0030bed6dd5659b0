"""What a training loads that starts cold, in one process on a processor: no compiler, no sharded tensors, no sympy.

And stages of a pipeline that start warm: forked from one process, they make what they make alone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from anabatic.core import json_reader
from e2e.small_training import make_place

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


def find_forked_stages(process: subprocess.Popen[str]) -> set[int]:
    """Return the processes that the server of a pipeline has forked and that live now."""
    found = set[int]()
    try:
        for child in psutil.Process(process.pid).children():
            if "anabatic.launch.local.forkserver" in child.cmdline():
                found |= {each.pid for each in child.children() if each.name() == "anabatic"}
    except psutil.NoSuchProcess:  # ended between two looks
        return found
    return found


def test_stages_of_a_pipeline_are_forked_and_train_as_they_would_alone(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    job = (
        f"{{model: {place / 'model'}, data: {{train: [{place / 'rows.jsonl'}]}}, device: {{type: cpu}},"
        " batch: {seq_len: 64, micro_batch_tokens: 64, global_batch_tokens: 64}, schedule: {max_steps: 20}}"
    )
    recipe = place / "pipeline.yaml"
    recipe.write_text(
        f"out: {place / 'runs'}\nstages:\n"
        + "".join(f"  {name}:\n    command: sft\n    job: {job}\n" for name in ("one", "two"))
    )
    command = [sys.executable, "-m", "anabatic"]
    process = subprocess.Popen([*command, "run", str(recipe)], stderr=subprocess.PIPE, text=True)
    forked = set[int]()
    while process.poll() is None:
        forked |= find_forked_stages(process)
    assert process.stderr is not None and process.returncode == 0, process.stderr.read()
    process.stderr.close()
    assert len(forked) == 2
    alone = [*command, "sft", "-c", str(place / "runs" / "one" / "stage.yaml"), "--out", str(place / "alone")]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    weights = [
        (folder / "final_model" / "model.safetensors").read_bytes()
        for folder in (place / "runs" / "one", place / "runs" / "two", place / "alone")
    ]
    assert weights[0] == weights[1] == weights[2]
