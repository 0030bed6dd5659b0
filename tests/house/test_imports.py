"""Help, version, recipes and dry runs start without the heavy libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


HEAVY = ("torch", "torch_npu", "numpy", "transformers", "tokenizers", "pyarrow", "datasets", "pandas")

PROBE = """
import json, resource, sys
from anabatic.cli.app import main
try:
    main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
used = resource.getrusage(resource.RUSAGE_SELF)
names = sorted({name.partition(".")[0] for name in sys.modules})
sys.stderr.write("\\n" + json.dumps({"code": code, "modules": names, "cpu": used.ru_utime + used.ru_stime}))
"""

PIPELINE = """
out: OUT
stages:
  tok: {command: tokenizer train, job: {data: {train: ["stdlib:"]}}}
  base: {command: pretrain, job: {tokenizer: "${tok}", data: {train: ["stdlib:"]}}}
"""


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "--version",
        "pretrain --help",
        "tokenizer train --help",
        "run --help",
        "config show pretrain",
        "config show run",
        "monitor --once",
        "doctor --root /etc",
        "env --explain",
        "explain EI0006",
        "plan --npus 8 -- sft --model Qwen/Qwen2.5-7B --data rows.jsonl --tuner lora",
        "config check PIPELINE",
        "run PIPELINE --dry-run",
        "pretrain --schedule.max-steps 1.5",
        "bench train --steps 1.5",
    ],
)
def test_starts_without_heavy_libraries(words: str, tmp_path: Path) -> None:
    recipe = tmp_path / "pipeline.yaml"
    recipe.write_text(PIPELINE.replace("OUT", str(tmp_path / "out")))
    typed = [word.replace("PIPELINE", str(recipe)) for word in words.split()]
    done = subprocess.run([sys.executable, "-c", PROBE, *typed], capture_output=True, text=True, timeout=240)
    result = json.loads(done.stderr.splitlines()[-1])
    print(f"anabatic {words}: {result['cpu']:.3f} s of CPU time")
    assert result["code"] == (2 if "1.5" in words else 0), done.stderr
    assert not set(HEAVY) & set(result["modules"])
    assert not (tmp_path / "out").exists()
