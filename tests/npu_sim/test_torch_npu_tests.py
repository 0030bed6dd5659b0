"""A sample of torch_npu's own tests (scripts/torch_npu_tests.py runs all of them)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from npu_sim.conftest import CACHE, Sim

ROOT = Path(__file__).parents[2]
FILES = ("npu/test_device", "npu/test_tensors", "autograd/test_complex", "nn/test_linear_layers")


def test_sample_of_torch_npu_tests(sim: Sim, shared_data: Path) -> None:
    """Files that have to pass whole."""
    words = [sys.executable, str(ROOT / "scripts/torch_npu_tests.py"), "--tests", str(shared_data / "torch_npu_tests")]
    words += ["--only", *FILES, "--results", str(sim.folder), "--jobs", "1", "--npus", "1"]
    variables = {**os.environ, "ANABATIC_CACHE": str(CACHE)}
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"| {len(FILES)} / {len(FILES)} |" in done.stdout and "100.0 % |" in done.stdout, done.stdout[-2000:]
